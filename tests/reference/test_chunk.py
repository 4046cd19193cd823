"""The parts of one chunk: block sums, decayed products, the inverse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdagen.reference.activation import log_decay
from kdagen.reference.chunk import (
    block_sums,
    decayed_products,
    solve_unit_lower,
    unit_lower_inverse,
)


@pytest.mark.parametrize("size", [1, 8])
def test_decayed_products_are_the_definition(size):
    rng = np.random.RandomState(0)
    query, key, decay = (rng.randn(2, size, 3).astype(np.float32) for _ in range(3))
    decay = np.where(rng.rand(2, size, 3) < 0.3, -1e4, -np.abs(decay)).astype(np.float32)
    found = decayed_products(query, key, block_sums(jnp.asarray(decay)))
    wide = decay.astype(np.float64)
    for got, left in zip(found, (key, query), strict=True):
        expected = np.zeros((2, size, size))
        for t in range(size):
            for j in range(t):
                between = np.exp(wide[:, j + 1 : t + 1].sum(axis=1))
                expected[:, t, j] = np.sum(left[:, t] * key[:, j] * between, axis=-1)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_the_inverse_is_one_and_its_solve_has_its_gradient():
    rng = np.random.RandomState(0)
    strict = jnp.asarray(np.tril(rng.randn(3, 16, 16), -1), jnp.float32) * 0.3
    rhs = jnp.asarray(rng.randn(3, 16, 5), jnp.float32)
    whole = jnp.eye(16) + strict
    np.testing.assert_allclose(unit_lower_inverse(strict) @ whole, np.eye(16)[None] + 0 * strict,
                               atol=1e-5)  # fmt: skip
    ours = jax.grad(lambda *a: jnp.sum(solve_unit_lower(*a) ** 2), argnums=(0, 1))(strict, rhs)
    theirs = jax.grad(
        lambda m, r: jnp.sum(jnp.linalg.solve(jnp.eye(16) + jnp.tril(m, -1), r) ** 2),
        argnums=(0, 1),
    )(strict, rhs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_a_log_decay_of_exactly_zero_has_its_full_gradient():
    gate = jnp.asarray([-1.0, 0.0, 0.5, -1e4, -2e4, -jnp.inf])
    np.testing.assert_array_equal(log_decay(gate), [-1, 0, 0, -1e4, -1e4, -1e4])
    grad = jax.grad(lambda g: log_decay(g).sum())(gate)
    np.testing.assert_array_equal(grad, [1, 1, 0, 1, 0, 0])


@pytest.mark.parametrize("a_log", [20.0, 88.0, 100.0])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_saturated_activations_are_finite_with_finite_gradients(a_log, lower_bound):
    gate = jnp.asarray([-1e30, -90.0, -3.0, -1.5, 1.5, 3.0, 90.0, 1e30])

    def total(gate, a_log):
        kind = dict(use_gate_in_kernel=True, lower_bound=lower_bound)
        return log_decay(gate, a_log, **kind).sum()

    value, grads = jax.value_and_grad(total, argnums=(0, 1))(gate, jnp.float32(a_log))
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)
    if a_log > 88:
        assert grads[1] == 0


def test_the_bounded_gate_keeps_its_gradient_where_a_sigmoid_is_flat():
    # At a * x = 24 a float32 sigmoid is exactly 1, and yet a * e^-24 is no small number.
    a_log, x = np.float32(20.0), np.float32(24.0 / np.exp(20.0))
    kind = dict(use_gate_in_kernel=True, lower_bound=-5.0)
    got = jax.grad(lambda x: log_decay(x, jnp.float32(a_log), **kind))(jnp.float32(x))
    a = np.exp(np.float64(a_log))
    assert got == pytest.approx(-5 * a * np.exp(-a * np.float64(x)), rel=1e-4)
