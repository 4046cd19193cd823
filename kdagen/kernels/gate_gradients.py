"""Gate activation with its derivatives, and the gradient of L2 normalisation, inside a kernel.

The log decay is in log2 units, as in ``kdagen.kernels.gates``; gradients are with respect to
natural units: d alpha / d (ln alpha) = alpha.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kdagen.kernels import gates
from kdagen.kernels.lanes import BF16, F32, LOG2_E, dot, stack
from kdagen.kernels.numerics import LOG_DECAY_FLOOR


@dataclass
class Gate:
    """A log decay [C, K] and the derivatives that its gradient takes, all f32.

    Attributes:
      decay: log2 alpha, at most 0; the gates' floor is that of ``LOG_DECAY_FLOOR``.
      by_gate: derivative of ln alpha by the gate operand, 0 below the floor.
      by_log_rate: derivative of ln alpha by a_log; None for a log decay.
    """

    decay: jax.Array
    by_gate: jax.Array
    by_log_rate: jax.Array | None = None


def log_decay(gate: jax.Array) -> Gate:
    """The gate is ln alpha; above 0 it counts as 0, without a gradient."""
    gate = gate.astype(F32)
    floored = jnp.clip(gate, -LOG_DECAY_FLOOR, 0.0)
    held = jnp.where((gate > 0.0) | (gate < -LOG_DECAY_FLOOR), 0.0, 1.0)
    return Gate(floored * LOG2_E, held)


def softplus(raw: jax.Array, rate: jax.Array, bias: jax.Array, *, dtype: DTypeLike = BF16) -> Gate:
    """ln alpha = -rate * softplus(raw + bias), rate = exp(a_log); rate and bias are rows [1, K]."""
    decay = gates.softplus(raw, rate, bias, LOG_DECAY_FLOOR, dtype=dtype)
    held = jnp.where(decay > -LOG_DECAY_FLOOR * LOG2_E, 1.0, 0.0)
    z = (raw.astype(F32) + bias) * LOG2_E
    # e^-|x| is formed 2^32 times too large: a rate may lift one that is below what f32 holds
    power = jnp.exp2(32.0 - jnp.abs(z))
    low = rate * 2.0**-32
    slope = jnp.where(z >= 0.0, rate, power * low) / (1.0 + power * 2.0**-32)
    return Gate(decay, -slope * held, decay * (held / LOG2_E))


def bounded(raw: jax.Array, rate: jax.Array, bias: jax.Array, lower_bound: float) -> Gate:
    """ln alpha = lower_bound * sigmoid(rate * (raw + bias)), rate = exp(a_log)."""
    x = raw.astype(F32) + bias
    z = x * (rate * LOG2_E)
    u = jnp.exp2(-jnp.abs(z))
    share = 1.0 / (1.0 + u)
    closed = u * share
    opened = jnp.where(z >= 0.0, share, closed)
    # sigmoid(z) * sigmoid(-z), which keeps its relative accuracy at both ends
    # the rate, of up to e^88, comes last: five times as much would be infinite
    slope = closed * (share * lower_bound) * rate
    return Gate(opened * (lower_bound * LOG2_E), slope, slope * x)


def parts(x: jax.Array, count: int) -> jax.Array:
    """x itself (1), or its two bf16 parts one below the other (2), whose sum is x to 2^-17."""
    if count == 1:
        return x
    high = x.astype(BF16)
    return stack([high, (x - high.astype(F32)).astype(BF16)])


def lane_sums(x: jax.Array, width: int, dtype: DTypeLike = BF16) -> jax.Array:
    """Sum over the lanes of x [R, D], in every lane: [R, width] f32."""
    return dot(x, jnp.ones((x.shape[1], width), F32), dtype=dtype)


def normalized(
    x: jax.Array, inverse_norm: jax.Array, cotangent: jax.Array, along: jax.Array
) -> jax.Array:
    """Cotangent [C, K] f32 of what was normalised to x, x = inverse_norm * unnormalised."""
    return inverse_norm * (cotangent - x * along)
