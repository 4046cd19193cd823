"""Gate activation and L2 normalisation inside a kernel, in f32 and in log2 units."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kdagen.kernels.lanes import BF16, F32, LOG2_E, beside, dot, index, rows, same_block, stack

NORM_EPSILON = 1e-6

_LEAST = 2.0**-126
"""The smallest f32 that is not flushed to zero."""

_LN_2 = (0.693359375, -2.12194440e-4)
"""ln 2 in two parts, of which the first has 10 bits: products with whole numbers are exact."""

_LOG2_1P = (
    1.44269499,
    -0.721339379,
    0.480676186,
    -0.3582781,
    0.275140838,
    -0.196070916,
    0.111636808,
    -0.0418265517,
    0.00736614956,
)
"""Coefficients of log2(1 + u) / u for u from 0 to 1, least squares of the relative error: 4e-8."""


def inverse_norms(xs: Sequence[jax.Array], *, dtype: DTypeLike = BF16) -> list[jax.Array]:
    """1 / sqrt(sum(x^2) + 1e-6) by rows of each x [C, K] f32, in every lane: [C, K] f32.

    In bf16 the sums are one product with ones: it leaves them in all lanes, where a lane reduction
    would make the XLU the limit of the kernel. Squares round to bf16 one by one; over 128 of them
    that averages to 1e-4 of the norm. In f32 it is the MXU that has no time to spare.
    """
    if dtype == F32:
        return [jnp.broadcast_to(_inverse_norm(x), x.shape) for x in xs]
    tokens, key_dim = xs[0].shape
    narrow = [x.astype(BF16) for x in xs]
    sums = dot(stack([x * x for x in narrow]), jnp.ones((key_dim, key_dim), BF16))
    roots = lax.rsqrt(sums + NORM_EPSILON)
    return [rows(roots, i * tokens, tokens) for i in range(len(xs))]


def _inverse_norm(x: jax.Array) -> jax.Array:
    square = jnp.sum(x * x, axis=1, keepdims=True) + NORM_EPSILON
    root = lax.rsqrt(square)
    # one step of Newton: not every chip's compiler adds it to the hardware's own estimate
    return root * (1.5 - 0.5 * (square * root) * root)


def rate(a_log: jax.Array) -> jax.Array:
    """exp(a_log) of f32, at most e^88, to 3e-7: e^x of the hardware loses digits far from 0."""
    whole, rest = _split(jnp.clip(a_log, -256.0, 88.0))
    return jnp.exp(rest) * jnp.exp2(whole)


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A whole number w and a rest r of at most ln 2 / 2 with e^x = 2^w e^r."""
    whole = jnp.floor(x * LOG2_E + 0.5)
    return whole, (x - whole * _LN_2[0]) - whole * _LN_2[1]


def log_decay(gate: jax.Array, floor: float) -> jax.Array:
    """The log decay [C, K] itself, in natural units: at most 0, at least -floor; f32."""
    return jnp.maximum(jnp.minimum(gate.astype(F32), 0.0), -floor)


def softplus(
    raw: jax.Array, rate: jax.Array, bias: jax.Array, floor: float, *, dtype: DTypeLike = BF16
) -> jax.Array:
    """log2 alpha = -rate * log2(1 + e^(raw + bias)) [C, K], f32, at least -floor / ln 2.

    ``rate``, from 0 to e^88, and ``bias`` are rows [1, K]. A rate may lift an e^x that is below
    what f32 holds to a decay that matters, so e^x is formed 2^32 times too large.
    The relative error is 2.5e-4 for kernels in bf16, where the VALU is the limit, and 3e-7 in f32.
    """
    # a raw gate that overflowed times a rate of 0 would be NaN; so small a rate decays nothing
    rate = jnp.maximum(rate, _LEAST)
    raw = raw.astype(F32)
    scaled = _softplus_f32(raw, rate, bias) if dtype == F32 else _softplus_bf16(raw, rate, bias)
    return jnp.maximum(scaled, -floor * LOG2_E)


def _softplus_bf16(raw: jax.Array, rate: jax.Array, bias: jax.Array) -> jax.Array:
    z = (raw + bias) * LOG2_E
    # e^x in units of 2^-32 / log2(e), which are those of log2(1 + e^x) where e^x is small
    power = jnp.exp2(jnp.minimum(z, 64.0) + (32.0 + math.log2(LOG2_E)))
    # for z from 64 on the logarithm stands still; from 24 on it is z already
    log = jnp.maximum(z, jnp.log2(1.0 + power * (2.0**-32 / LOG2_E)))
    # 1 + e^x keeps 12 bits of an e^x of 2^-12, and what log2(1 + e^x) is short of e^x is as small
    return jnp.where(z < -12.0, power * (rate * -(2.0**-32)), log * -rate)


def _softplus_f32(raw: jax.Array, rate: jax.Array, bias: jax.Array) -> jax.Array:
    x = raw + bias
    # what the sum has lost counts where e^x is small, as the product with log2(e) below
    back = x - raw
    lost = (raw - (x - back)) + (bias - back)
    lost = jnp.where((x < 0.0) & (jnp.abs(lost) < 1e-4), lost, 0.0)
    low = jnp.maximum(-jnp.abs(x), -256.0)
    whole, rest = _split(low)
    power = jnp.exp(rest + lost) * jnp.exp2(whole + 32.0)
    u = power * 2.0**-32
    # no log2: near 1 its relative accuracy is the hardware's own
    ratio = jnp.full_like(u, _LOG2_1P[-1])
    for coefficient in _LOG2_1P[-2::-1]:
        ratio = ratio * u + coefficient
    return (power * ratio) * (rate * -(2.0**-32)) - jnp.maximum(x, 0.0) * LOG2_E * rate


def bounded(raw: jax.Array, rate: jax.Array, bias: jax.Array, lower_bound: float) -> jax.Array:
    """log2 alpha = lower_bound * sigmoid(rate * (raw + bias)) / ln 2 [C, K], f32.

    ``rate``, from 0 to e^88, and ``bias`` are rows [1, K].
    """
    z = (raw.astype(F32) + bias) * (jnp.maximum(rate, _LEAST) * -LOG2_E)
    return (lower_bound * LOG2_E) / (1.0 + jnp.exp2(jnp.minimum(z, 126.0)))


def cumulative(
    decays: Sequence[jax.Array], block: int, *, exact: bool = False, dtype: DTypeLike = BF16
) -> list[jax.Array]:
    """Sums of each of ``decays`` [C, K] from the start of each block of rows to each row, f32.

    One product with a block-diagonal triangle of ones, in ``dtype``; the decays stand side by side,
    since two weights of 128 columns are loaded in the time of one. For a product in bf16 an f32
    operand is split in two bf16 parts, which sit one below the other in the contraction; ``exact``
    says that it is bf16-valued already.
    """
    tokens, key_dim = decays[0].shape
    row, column = index((tokens, tokens), 0), index((tokens, tokens), 1)
    ones = ((row >= column) & same_block(row, column, block)).astype(F32)
    decay = beside(decays)
    if dtype == F32:
        sums = dot(ones, decay, dtype=F32)
    else:
        ones, high = ones.astype(BF16), decay.astype(BF16)
        if exact:
            sums = dot(ones, high)
        else:
            low = (decay - high.astype(F32)).astype(BF16)
            sums = dot(beside([ones, ones]), stack([high, low]))
    return [sums[:, i * key_dim : (i + 1) * key_dim] for i in range(len(decays))]
