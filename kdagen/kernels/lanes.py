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


FULL, SPLIT = 6, 3
"""Passes of the MXU for a product in f32: right to 2^-23 of its terms, or to 2^-16."""

Parts = tuple[jax.Array, ...]
"""What an operand of a product is the sum of: itself, or two bf16 parts."""


def dot(
    a: jax.Array, b: jax.Array, dims=NN, dtype: DTypeLike = BF16, passes: int = FULL
) -> jax.Array:
    """a @ b (``NN``) or a @ b^T (``NT``) of operands cast to ``dtype``, accumulated in f32.

    ``dtype`` is bf16, one pass of the MXU, or f32, ``passes`` of them: ``FULL`` or ``SPLIT``.
    """
    return dot_parts(parts(a, dtype, passes), parts(b, dtype, passes), dims)


def parts(x: jax.Array, dtype: DTypeLike, passes: int = FULL) -> Parts:
    """x as an operand of ``dot_parts``. In f32 with three passes: two bf16 parts, or x itself where
    it is bf16 already."""
    if dtype == BF16 or passes == FULL or x.dtype == BF16:
        return (x.astype(BF16 if passes == SPLIT else dtype),)
    high = x.astype(BF16)
    return high, (x - high.astype(F32)).astype(BF16)


def dot_parts(a: Parts, b: Parts, dims=NN) -> jax.Array:
    """``dot`` of operands in parts; the product of two low parts is left out."""
    count = a[0].shape[0]
    made = _dot(stack(a), b[0], dims)
    low = [rows(made, count, count)] if len(a) > 1 else []
    low += [_dot(a[0], b[1], dims)] if len(b) > 1 else []
    return rows(made, 0, count) + sum(low[1:], low[0]) if low else made


def _dot(a: jax.Array, b: jax.Array, dims) -> jax.Array:
    # the precision is named for bf16 too: left out, it would be that of
    # ``jax.default_matmul_precision`` where the kernel is traced
    precision = lax.Precision.HIGHEST if a.dtype == F32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=F32)


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


def beside(pieces: Sequence[jax.Array]) -> jax.Array:
    """The pieces side by side along the lanes."""
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(list(pieces), axis=1)


def diagonal(pieces: Sequence[jax.Array]) -> jax.Array:
    """The block-diagonal array of pieces of one shape."""
    zero = jnp.zeros_like(pieces[0])
    places = range(len(pieces))
    return stack(
        [beside([piece if i == j else zero for j in places]) for i, piece in enumerate(pieces)]
    )


def rows(x: jax.Array, start: int, count: int) -> jax.Array:
    """Rows start to start + count of a 2-d value."""
    return x[start : start + count]


def choose(pieces: Sequence[jax.Array], which: jax.Array) -> jax.Array:
    """pieces[i] where ``which`` is i; the pieces and ``which`` have one shape."""
    result = pieces[0]
    for i, piece in enumerate(pieces[1:], 1):
        result = jnp.where(which == i, piece, result)
    return result
