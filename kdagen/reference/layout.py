"""The two layouts of what is per token, and the way from one to the other."""

import jax
import jax.numpy as jnp


def heads_first(x: jax.Array, layout: str) -> jax.Array:
    """[H, B, T, ...] of an array in `layout`, which is that or "BTHD" for [B, T, H, ...]."""
    return x if layout == "HBTD" else jnp.moveaxis(x, 2, 0)


def heads_first_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The shape that `heads_first` gives."""
    return shape if layout == "HBTD" else (shape[2], *shape[:2], *shape[3:])


def in_layout(x: jax.Array, layout: str) -> jax.Array:
    """[H, B, T, ...] brought to `layout`; the inverse of `heads_first`."""
    return x if layout == "HBTD" else jnp.moveaxis(x, 0, 2)
