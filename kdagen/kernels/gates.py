"""Gate activation and L2 normalisation inside a kernel, in f32 and in log2 units."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kdagen.kernels.lanes import BF16, F32, LOG2_E, dot, index, rows, same_block, stack

NORM_EPSILON = 1e-6


def inverse_norms(xs: Sequence[jax.Array], *, dtype: DTypeLike = BF16) -> list[jax.Array]:
    """1 / sqrt(sum(x^2) + 1e-6) by rows of each x [C, K] f32, in every lane: [C, K] f32.

    The sums are one product with ones: it leaves them in all lanes, where a lane reduction would
    make the XLU the limit of the kernel. Squares round to ``dtype`` one by one; in bf16, over 128
    of them, that averages to 1e-4 of the norm.
    """
    tokens, key_dim = xs[0].shape
    ones = jnp.ones((key_dim, key_dim), dtype)
    sums = dot(stack([x * x for x in xs]), ones, dtype=dtype)
    roots = lax.rsqrt(sums + NORM_EPSILON)
    return [rows(roots, i * tokens, tokens) for i in range(len(xs))]


def log_decay(gate: jax.Array, floor: float) -> jax.Array:
    """The log decay [C, K] itself, in natural units: at most 0, at least -floor; f32."""
    return jnp.maximum(jnp.minimum(gate.astype(F32), 0.0), -floor)


def softplus(raw: jax.Array, rate: jax.Array, bias: jax.Array, floor: float) -> jax.Array:
    """log2 alpha = -rate * log2(1 + e^(raw + bias)) [C, K], f32.

    ``rate`` and ``bias`` are rows [1, K]. log2(1 + u) for u = 2^-|z| loses its relative accuracy
    as u falls, where u itself is the better value.
    """
    z = (raw.astype(F32) + bias) * LOG2_E
    u = jnp.exp2(-jnp.abs(z))
    # u - u^2/2 is right to 2e-8 relative where 1 + u still holds 12 bits of u
    log = jnp.where(u < 2.0**-12, u * (LOG2_E - (0.5 * LOG2_E) * u), jnp.log2(1.0 + u))
    return jnp.maximum(-rate * (jnp.maximum(z, 0.0) + log), -floor * LOG2_E)


def bounded(raw: jax.Array, rate: jax.Array, bias: jax.Array, lower_bound: float) -> jax.Array:
    """log2 alpha = lower_bound * sigmoid(rate * (raw + bias)) / ln 2 [C, K], f32."""
    z = (raw.astype(F32) + bias) * (rate * -LOG2_E)
    return (lower_bound * LOG2_E) / (1.0 + jnp.exp2(z))


def cumulative(
    decay: jax.Array, block: int, *, exact: bool = False, dtype: DTypeLike = BF16
) -> jax.Array:
    """Sums of ``decay`` [C, K] from the start of each block of rows to each row, f32.

    One product with a block-diagonal triangle of ones, in ``dtype``. For a product in bf16 an f32
    operand is split in two bf16 parts, which sit one below the other in the contraction; ``exact``
    says that it is bf16-valued already.
    """
    tokens = decay.shape[0]
    row, column = index((tokens, tokens), 0), index((tokens, tokens), 1)
    ones = ((row >= column) & same_block(row, column, block)).astype(F32)
    if dtype == F32:
        return dot(ones, decay, dtype=F32)
    ones = ones.astype(BF16)
    high = decay.astype(BF16)
    if exact:
        return dot(ones, high)
    low = (decay - high.astype(F32)).astype(BF16)
    return dot(jnp.concatenate([ones, ones], axis=1), stack([high, low]))
