"""Constants of the numerics that code without JAX must know too."""

TOKEN_FLOOR = 22.0
"""Largest decay of one token, in nats, that the unbounded factorisation takes as it stands.

2^-32 of the state survives such a token, less than an f32 sum resolves, and eight of them either
side of a reference row stay within an f32 exponent. A larger decay counts as this one.
"""

LOG_DECAY_FLOOR = 1e4
"""Largest decay of one token, in nats, that is told from a larger one anywhere."""
