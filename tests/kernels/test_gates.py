"""Gates and norms of a kernel against float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kdagen.kernels import gates
from kdagen.kernels.lanes import BF16, F32, LOG2_E
from tests.kernels.plain import BOUND_F32, error, name_of, run

# Raw gates (and biases) from where only a large rate makes a decay of them to beyond every floor.
RAW_RANGES = ((-90, -60), (-60, -20), (-20, -8), (-8, -1), (-1, 1), (1, 8), (8, 100), (100, 1e4))


@pytest.mark.parametrize(("dtype", "bound"), [(F32, 2e-6), (BF16, 1e-4)], ids=name_of)
def test_softplus_keeps_its_relative_accuracy(dtype, bound):
    rng = np.random.default_rng(0)
    for low, high in RAW_RANGES:
        raw = rng.uniform(low, high, (64, 128)).astype("float32")
        bias = rng.uniform(-1, 1, (1, 128)).astype("float32")
        for a_log in (-20, 0, 20, 60, 88):
            rate = np.full((1, 128), np.exp(a_log)).astype("float32")
            got = run(gates.softplus, raw, rate, bias, floor=1e4, dtype=dtype)
            x = raw.astype(float) + bias
            expected = rate * (np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))
            expected = -LOG2_E * np.minimum(expected, 1e4)
            # what decays less in all the tokens of a sequence does not show in any result
            seen = expected < -1e-20
            relative = got[seen] / expected[seen] - 1.0
            assert np.sqrt(np.mean(relative**2)) <= bound if seen.any() else True, (low, a_log)
            assert (got[~seen] <= 0).all() and (got[~seen] > -1.1e-20).all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_a_large_rate_lifts_what_f32_cannot_hold(dtype):
    """e^-90 is below the smallest f32 that a TPU does not flush; e^88 of it is a decay of 0.14."""
    assert not run(halved, np.full((8, 128), 2.0**-126, "float32")).any(), (
        "no flush to be seen here"
    )
    raw, bias = np.full((8, 128), -90.0, "float32"), np.zeros((1, 128), "float32")
    rate = np.full((1, 128), np.exp(88.0), "float32")
    got = run(gates.softplus, raw, rate, bias, floor=1e4, dtype=dtype)
    assert error(got, np.full(raw.shape, -LOG2_E * np.exp(-2.0))) < 2e-5


def halved(x):
    return 0.5 * x


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_a_gate_is_finite_whatever_it_is_given(dtype):
    largest = float(np.finfo("float32").max)
    values = [-largest, largest, -1e30, 1e30, -200.0, 200.0, -103.0, -88.0, 88.0, 0.0, -0.0, 1e-30]
    raw = np.resize(np.float32(values), (8, 128))
    for rate in (0.0, 1e-38, 1.0, 1e38, np.exp(88.0)):
        for bias in (0.0, largest, -largest, 5.0):
            row = [np.full((1, 128), x, "float32") for x in (rate, bias)]
            for got, least in (
                (run(gates.softplus, raw, *row, floor=1e4, dtype=dtype), -1e4),
                (run(gates.bounded, raw, *row, lower_bound=-5.0), -5.0),
            ):
                assert ((got <= 0) & (got >= 1.00001 * least * LOG2_E)).all(), (rate, bias)


def test_bounded_keeps_its_relative_accuracy():
    rng = np.random.default_rng(0)
    raw = rng.uniform(-12, 12, (64, 128)).astype("float32")
    bias = rng.uniform(-1, 1, (1, 128)).astype("float32")
    for a_log in (-20, -1, 0, 5, 88):
        rate = np.full((1, 128), np.exp(a_log)).astype("float32")
        got = run(gates.bounded, raw, rate, bias, lower_bound=-5.0)
        with np.errstate(over="ignore"):
            expected = -5 * LOG2_E / (1 + np.exp(-rate.astype(float) * (raw.astype(float) + bias)))
        seen = expected < -1e-6
        assert error(got[seen], expected[seen]) < BOUND_F32
        assert np.abs(got[~seen]).max(initial=0.0) < 1.1e-6


@pytest.mark.parametrize(("dtype", "bound"), [(F32, 3e-7), (BF16, 1e-3)], ids=name_of)
def test_inverse_norms(dtype, bound):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 64, 256)).astype("float32")
    x[0, :, 100:] = 0.0  # padded lanes
    x[1, 0] = 0.0  # a row past the end
    x[1, 1] *= 1e-3
    x[1, 2] *= 1e4
    got = run(gates.inverse_norms, list(x), dtype=dtype)
    expected = 1 / np.sqrt(np.sum(x.astype(float) ** 2, axis=-1, keepdims=True) + 1e-6)
    assert np.abs(np.stack(got) / expected - 1).max() < 4 * bound
    assert np.sqrt(np.mean((np.stack(got) / expected - 1) ** 2)) < bound


@pytest.mark.parametrize("block", [8, 16, 32])
def test_cumulative_sums(block):
    rng = np.random.default_rng(0)
    decay = -5 * rng.random((2, 64, 256)).astype("float32")

    def expected(x: np.ndarray) -> np.ndarray:
        return np.cumsum(x.astype(float).reshape(2, -1, block, 256), axis=2).reshape(x.shape)

    def sums(x: np.ndarray, **kind) -> np.ndarray:
        return np.stack(run(gates.cumulative, list(x), block=block, **kind))

    assert error(sums(decay, dtype=F32), expected(decay)) < 1e-7
    # two bf16 parts of 8 bits and a guard bit each
    assert error(sums(decay), expected(decay)) < 1e-5
    rounded = np.asarray(jnp.asarray(decay).astype(BF16).astype(F32))
    assert error(sums(rounded, exact=True), expected(rounded)) < 1e-7
