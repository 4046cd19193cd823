"""Small helpers on values in VMEM: products, index arrays, pieces."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

BF16, F32 = jnp.bfloat16, jnp.float32
LOG2_E = 1.4426950408889634

NN = (((1,), (0,)), ((), ()))
NT = (((1,), (1,)), ((), ()))


def dot(a: jax.Array, b: jax.Array, dims=NN, dtype: DTypeLike = BF16) -> jax.Array:
    """a @ b (``NN``) or a @ b^T (``NT``) of operands cast to ``dtype``, accumulated in f32.

    ``dtype`` is bf16, one pass of the MXU, or f32, six. The precision is named either way: left
    out, it would be that of ``jax.default_matmul_precision`` where the kernel is traced.
    """
    precision = lax.Precision.HIGHEST if dtype == F32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a.astype(dtype), b.astype(dtype), dims, precision=precision, preferred_element_type=F32
    )


def index(shape: tuple[int, ...], axis: int) -> jax.Array:
    """int32 array of its own row (axis 0) or lane (axis 1) numbers."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def quotient(x: jax.Array, by: int) -> jax.Array:
    """x // by for x >= 0. The operator takes signs, which a trace without a chip cannot lower."""
    return lax.div(x, jnp.int32(by))


def remainder(x: jax.Array, by: int) -> jax.Array:
    """x % by for x >= 0."""
    return lax.rem(x, jnp.int32(by))


def same_block(x: jax.Array, y: jax.Array, size: int) -> jax.Array:
    """Where x and y, both >= 0, lie in the same block of ``size``."""
    return quotient(x, size) == quotient(y, size)


def stack(pieces: Sequence[jax.Array]) -> jax.Array:
    """The pieces one below the other."""
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(list(pieces), axis=0)


def rows(x: jax.Array, start: int, count: int) -> jax.Array:
    """Rows start to start + count of a 2-d value."""
    return x[start : start + count]


def choose(pieces: Sequence[jax.Array], which: jax.Array) -> jax.Array:
    """pieces[i] where ``which`` is i; the pieces and ``which`` have one shape."""
    result = pieces[0]
    for i, piece in enumerate(pieces[1:], 1):
        result = jnp.where(which == i, piece, result)
    return result
