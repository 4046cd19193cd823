"""Errors and their bounds."""

from __future__ import annotations

import numpy as np
import pytest

from kdagen.measure.accuracy import GATES, INPUTS, OUTPUTS, PARAMETERS, bound, relative_error

ALL = OUTPUTS + INPUTS + GATES + PARAMETERS


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", (2e-5, 5e-5, 2e-4, 2e-4)), ("bfloat16", (5e-3, 5e-3, 8e-3, 6e-3))],
)
def test_every_tensor_has_its_bound(dtype, expected):
    for names, usual in zip((OUTPUTS, INPUTS, GATES, PARAMETERS), expected, strict=True):
        for name in names:
            assert bound(name, dtype) == usual
            hard = dict(ill_conditioned=True)
            assert bound(name, dtype, **hard) == (2e-2 if dtype == "bfloat16" else 5 * usual)


def test_what_bfloat16_is_allowed_beyond_the_table():
    for tokens, factor in ((1, 1), (1024, 1), (4096, 2)):
        for name in ALL:
            above = bound(name, "bfloat16", beta_above_one=True, tokens=tokens)
            assert above == pytest.approx(1e-2 * factor)
            assert bound(name, "float32", beta_above_one=True, tokens=tokens) == bound(
                name, "float32"
            )
        long = bound("output", "bfloat16", undecayed=True, tokens=tokens)
        assert long == (6e-3 if tokens > 1024 else 5e-3)
        assert bound("query", "bfloat16", undecayed=True, tokens=tokens) == 5e-3
    hardest = dict(ill_conditioned=True, beta_above_one=True)
    assert bound("output", "bfloat16", **hardest) == 5e-2


@pytest.mark.parametrize("arguments", [("dquery", "float32"), ("query", "float64")])
def test_what_has_no_bound_is_an_error(arguments):
    with pytest.raises(KeyError):
        bound(*arguments)


def test_relative_error():
    reference = np.array([3.0, -4.0])
    assert relative_error(reference.astype(np.float32), reference) == 0
    assert relative_error(np.array([3.0, -4.05]), reference) == pytest.approx(1e-2)
    for bad in (np.nan, np.inf):
        assert relative_error(np.array([3.0, bad]), reference) == float("inf")
    nothing = np.zeros(2)
    assert relative_error(np.array([0.0, 9e-31]), nothing) == 0
    assert relative_error(np.array([0.0, 2e-30]), nothing) == float("inf")
    with pytest.raises(ValueError, match="shape"):
        relative_error(np.zeros(3), reference)
