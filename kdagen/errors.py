"""The root of kdagen's errors; every part derives its own beside the code that raises them."""


class KdagenError(Exception):
    """An error whose message names what was wrong, what it was and what it may be."""
