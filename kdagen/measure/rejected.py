"""How a task of a worker says that a candidate came to nothing."""

from __future__ import annotations

from kdagen.errors import KdagenError


class Rejected(KdagenError):
    """A candidate that came to nothing.

    Attributes:
      status: one of ``kdagen.store.schema.STATUSES`` but "ok".
      reason: one line.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
