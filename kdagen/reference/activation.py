"""What happens to the inputs before the recurrence: L2 normalisation and the gate activation."""

import math

import jax
import jax.numpy as jnp

LARGEST_A_LOG = 88.0
SMALLEST_LOG_DECAY = -1e4
_NORM_EPSILON = 1e-6
_LOW = -20.0


def l2_normalize(x: jax.Array) -> jax.Array:
    """x * rsqrt(sum(x * x) + 1e-6) over the last axis; of [..., D]; dtype kept."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_EPSILON)


def _log1p_exp(x: jax.Array) -> jax.Array:
    """log(1 + exp(x)) of x <= 0."""
    return jnp.log1p(jnp.exp(x))


def _softplus(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0) + _log1p_exp(-jnp.abs(x))


@jax.custom_jvp
def _log_softplus(x: jax.Array) -> jax.Array:
    """log(log(1 + exp(x))), which is x - exp(x) / 2 to the last bit from -20 down."""
    low = x < _LOW
    return jnp.where(low, x - jnp.exp(x) / 2, jnp.log(_softplus(jnp.where(low, _LOW, x))))


@_log_softplus.defjvp
def _log_softplus_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    low = x < _LOW
    inside = jnp.where(low, _LOW, x)
    slope = jnp.where(low, 1 - jnp.exp(x) / 2, jax.nn.sigmoid(inside) / _softplus(inside))
    return _log_softplus(x), slope * dx


@jax.custom_jvp
def _sigmoid_of_product(a_log: jax.Array, x: jax.Array) -> jax.Array:
    """sigmoid(exp(a_log) * x) with a derivative that keeps its relative accuracy where it
    saturates."""
    return jax.nn.sigmoid(jnp.exp(a_log) * x)


@_sigmoid_of_product.defjvp
def _sigmoid_of_product_jvp(primals, tangents):
    # s * (1 - s) is 0 in float32 from a*x = 17 on, where e^-17 times an a of e^20 still counts; and
    # e^-90 is 0 where an a of e^88 makes it e^-2.
    (a_log, x), (da_log, dx) = primals, tangents
    a = jnp.exp(a_log)
    size = jnp.abs(a * x)
    log_slope = -size - 2 * _log1p_exp(-size)
    # From the left: a * x may be infinite where the slope is 0.
    by_a_log = jnp.exp(log_slope) * x * a
    return _sigmoid_of_product(a_log, x), jnp.exp(a_log + log_slope) * dx + by_a_log * da_log


def log_decay(
    gate: jax.Array,
    a_log: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
) -> jax.Array:
    """ln(alpha) of every channel, at most 0 and at least -1e4.

    With x = gate + bias and A = exp(min(a_log, 88)):

        not use_gate_in_kernel     gate itself
        lower_bound is None        -A * softplus(x), as -exp(a_log + log(softplus(x)))
        else                       lower_bound * sigmoid(A * x)

    softplus(-90) lies below the smallest normal number, and times e^88 it still counts.

    Values above 0 count as 0 and values below -1e4 as -1e4, both with zero gradient; so does an
    a_log above 88, with zero gradient to a_log.

    Args:
      gate: [..., K], float32 or float64.
      a_log: broadcastable to gate, or None for A = 1.
      bias: broadcastable to gate, or None.

    Returns:
      [..., K] in gate's dtype.
    """
    if not use_gate_in_kernel:
        value = jnp.where(gate > 0, 0, gate)
    else:
        x = gate if bias is None else gate + bias
        if a_log is None:
            a_log = jnp.zeros((), gate.dtype)
        a_log = jnp.where(a_log > LARGEST_A_LOG, LARGEST_A_LOG, a_log)
        if lower_bound is None:
            exponent = a_log + _log_softplus(x)
            # Before the exponential: the gradient of an infinite one is NaN.
            over = exponent > math.log(-SMALLEST_LOG_DECAY)
            bounded = -jnp.exp(jnp.where(over, 0, exponent))
            value = jnp.where(over, SMALLEST_LOG_DECAY, bounded)
        else:
            value = lower_bound * _sigmoid_of_product(a_log, x)
    return jnp.where(value < SMALLEST_LOG_DECAY, SMALLEST_LOG_DECAY, value)
