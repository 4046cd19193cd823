"""The gate activation and its gradient against float64, where float32 runs out of range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdagen.reference.activation import log_decay
from tests.reference.cases import assert_close, make_case
from tests.runtime.run import results

# From where ln(alpha) vanishes to where it saturates: -exp(a_log + raw) of a low raw gate.
LOG_SIZES = np.linspace(-12, 14, 53)


def exact(raw, a_log):
    """-exp(a_log) * softplus(raw) and its two derivatives, in float64."""
    a = np.exp(np.minimum(a_log, 88.0))
    value = -a * (np.maximum(raw, 0) + np.log1p(np.exp(-np.abs(raw))))
    free = value >= -1e4
    by_raw = np.where(free, -a / (1 + np.exp(-raw)), 0)
    return np.maximum(value, -1e4), by_raw, np.where(free & (a_log <= 88), value, 0)


@pytest.mark.parametrize("a_log", [-3.0, 20.0, 88.0, 100.0])
def test_softplus_needs_no_subnormal_number(a_log):
    raw = (LOG_SIZES - min(a_log, 88.0)).astype(np.float32)
    raw = np.concatenate([raw, np.float32([-3e38, -1e4, -5, -0.5, 0, 0.5, 5, 1e4, 3e38])])
    logs = np.full_like(raw, a_log)
    f = lambda raw, logs: log_decay(raw, logs, use_gate_in_kernel=True)  # noqa: E731
    value, pull = jax.vjp(f, jnp.asarray(raw), jnp.asarray(logs))
    with np.errstate(over="ignore"):
        expected = exact(raw.astype(np.float64), logs.astype(np.float64))
    for found, wanted in zip((value, *pull(jnp.ones_like(value))), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-37)


def test_a_steep_sigmoid_has_the_gradient_of_its_tail():
    a_log = np.float32(88.0)
    a = np.exp(np.float64(a_log))
    raw = np.float32(np.array([-100, -90, -70, -30, -2, 2, 30, 70, 90, 100]) / a)
    f = lambda raw: log_decay(raw, a_log, use_gate_in_kernel=True, lower_bound=-5.0).sum()  # noqa: E731
    y = a * raw.astype(np.float64)
    wanted = -5 * a * np.exp(-np.abs(y)) / (1 + np.exp(-np.abs(y))) ** 2
    np.testing.assert_allclose(jax.grad(f)(jnp.asarray(raw)), wanted, rtol=2e-4)


@pytest.mark.parametrize("implementation", ["xla_chunked", "recurrent"])
@pytest.mark.parametrize("a_log", [20.0, 88.0, 100.0])
def test_low_raw_gates_under_a_large_a_log(a_log, implementation):
    case = make_case(raw=True, a_log=a_log, tokens=40, width_k=24, width_v=12)
    sizes = np.random.RandomState(3).uniform(-7, 3, case.operands["gate"].shape)
    case.operands["gate"] = jnp.asarray(sizes - min(a_log, 88.0), "float32")
    case.operands["delta_time_bias"] = jnp.zeros_like(case.operands["delta_time_bias"])
    assert_close(results(case, implementation=implementation), case)
