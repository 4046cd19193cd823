"""What happens to the inputs before the recurrence: L2 normalisation and the gate activation."""

import jax
import jax.numpy as jnp

LARGEST_A_LOG = 88.0
SMALLEST_LOG_DECAY = -1e4
_NORM_EPSILON = 1e-6


def l2_normalize(x: jax.Array) -> jax.Array:
    """x * rsqrt(sum(x * x) + 1e-6) over the last axis; of [..., D]; dtype kept."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_EPSILON)


def _softplus(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@jax.custom_jvp
def _sigmoid_of_product(a: jax.Array, x: jax.Array) -> jax.Array:
    """sigmoid(a * x) with a derivative that keeps its relative accuracy where it saturates."""
    return jax.nn.sigmoid(a * x)


@_sigmoid_of_product.defjvp
def _sigmoid_of_product_jvp(primals, tangents):
    # s * (1 - s) is 0 in float32 from a*x = 17 on, where e^-17 times an a of e^20 still counts.
    (a, x), (da, dx) = primals, tangents
    opened = _sigmoid_of_product(a, x)
    slope = opened * _sigmoid_of_product(-a, x)
    return opened, (slope * a) * dx + (slope * x) * da


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
        lower_bound is None        -A * softplus(x)
        else                       lower_bound * sigmoid(A * x)

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
            a = jnp.ones((), gate.dtype)
        else:
            a = jnp.exp(jnp.where(a_log > LARGEST_A_LOG, LARGEST_A_LOG, a_log))
        if lower_bound is None:
            value = -a * _softplus(x)
        else:
            value = lower_bound * _sigmoid_of_product(a, x)
    return jnp.where(value < SMALLEST_LOG_DECAY, SMALLEST_LOG_DECAY, value)
