"""Gradients of the generated kernels at the edges of what a call may hold."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kdagen.gradient.variant import BackwardVariant
from kdagen.measure import accuracy, kinds
from kdagen.problem import Problem
from tests.kernels.backward_calls import call, draw, reference
from tests.reference.cases import make_case
from tests.runtime.run import results

LOG_DECAY = Problem(tokens=70, heads=2, initial_state=True, final_state=True)
SOFTPLUS = dataclasses.replace(LOG_DECAY, gate="softplus", qk_l2norm=True)
BOUNDED = dataclasses.replace(SOFTPLUS, gate="bounded", lower_bound=-5.0)
EXACT = {"dtype": "float32", "gate_dtype": "float32", "beta_dtype": "float32"}
EXACT_VARIANT = {"inverse_block": 4, "inverse_dtype": "float32"}
SMALL = BackwardVariant(heads=2, sub_block=1)


def assert_within(problem, got, expected, where=lambda name: np.s_[:]):
    """Every gradient as a whole, or what ``where`` selects of it, is within its bound."""
    errors = {
        name: accuracy.relative_error(np.asarray(got[name])[where(name)], x[where(name)])
        for name, x in expected.items()
    }
    bounds = {name: accuracy.bound(name, problem.dtype) for name in errors}
    assert not {n: (x, bounds[n]) for n, x in errors.items() if not x <= bounds[n]}


@pytest.mark.parametrize("chunk", [32, 128])
@pytest.mark.parametrize("exact", [False, True], ids=["bfloat16", "float32"])
def test_hard_data_in_short_and_long_chunks(chunk, exact):
    # long chunks of these keys need an inverse above bfloat16 in any case
    facts, parameters = EXACT if exact else {}, EXACT_VARIANT if exact or chunk == 128 else {}
    problem = dataclasses.replace(LOG_DECAY, tokens=140, **facts)
    given = kinds.telling(problem) + kinds.telling(problem)[:1]
    problem = kinds.with_heads(problem, given, 128 // chunk)
    variant = BackwardVariant(heads=128 // chunk, chunk=chunk, sub_block=1, **parameters)
    data = draw(problem, given, chunk)
    found = kinds.errors(problem, given, call(problem, variant, data), reference(problem, data))
    assert not kinds.outside(problem, found)


def test_a_cotangent_of_the_state_alone():
    """Zeros that are given, where a loss does not depend on the output."""
    given = (kinds.Kind("0"), kinds.Kind("-0.05"))
    data = draw(LOG_DECAY, given, SMALL.chunk)
    data = dataclasses.replace(data, d_output=jnp.zeros_like(data.d_output))
    got, expected = call(LOG_DECAY, SMALL, data), reference(LOG_DECAY, data)
    assert not expected["query"].any() and expected["gate"].any()
    assert not kinds.outside(LOG_DECAY, kinds.errors(LOG_DECAY, given, got, expected))


@pytest.mark.parametrize("base", [SOFTPLUS, BOUNDED], ids=lambda x: x.gate)
@pytest.mark.parametrize("a_log", [20.0, 88.0, 100.0])
def test_rates_at_and_beyond_what_they_saturate_at(base, a_log):
    problem = dataclasses.replace(base, heads=4, value_heads=4)
    drawn = kinds.draw(problem, (kinds.Kind("moderate"),))
    raw = np.asarray(drawn["gate"]).astype(np.float64)
    if base.gate == "softplus":
        raw -= min(a_log, 88.0)  # decays of about one
    else:
        raw = np.where(np.abs(raw) < 0.1, 0.1, raw)  # no f32 holds the gradient nearer to 0
    values = drawn | {
        "gate": jnp.asarray(raw, problem.gate_dtype),
        "a_log": jnp.full((4,), a_log, jnp.float32),
        "delta_time_bias": jnp.zeros_like(drawn["delta_time_bias"]),
    }
    data = draw(problem, (), SMALL.chunk, values=values)
    got, expected = call(problem, SMALL, data), reference(problem, data)
    assert expected["gate"].any() == (base.gate == "softplus")
    assert expected["a_log"].any() == (base.gate == "softplus" and a_log < 88.5)
    assert_within(problem, got, expected)


def test_rows_of_a_batch_that_differ():
    """Each as if it were alone: a row of no decay beside one that forgets everything."""
    problem = dataclasses.replace(LOG_DECAY, batch=2)
    values = kinds.draw(problem, (kinds.Kind("0"),))
    values["gate"] = values["gate"].at[:, 1].set(-20.0)
    values["value"] = values["value"].at[:, 0].multiply(100.0)
    data = draw(problem, (), SMALL.chunk, values=values)
    variant = BackwardVariant(heads=1, rows=2, sub_block=1)
    got, expected = call(problem, variant, data), reference(problem, data)
    for row in range(2):
        index = {"initial_state": np.s_[row]}
        assert_within(problem, got, expected, lambda name, i=index, r=row: i.get(name, np.s_[:, r]))


@pytest.mark.parametrize(("tokens", "exact"), [(1, False), (70, False), (70, True)])
def test_one_head(tokens, exact):
    facts, parameters = (EXACT, EXACT_VARIANT) if exact else ({}, {})
    problem = dataclasses.replace(SOFTPLUS, heads=1, value_heads=1, tokens=tokens, **facts)
    variant = BackwardVariant(heads=1, chunks=2, sub_block=1, **parameters)
    data = draw(problem, (kinds.Kind("moderate"),), variant.chunk)
    got, expected = call(problem, variant, data), reference(problem, data)
    if not exact:
        # one number, that may be near 0: held to the size of what it is the sum of
        bias = np.asarray(data.values["delta_time_bias"])[:, None, None]
        x = np.asarray(data.values["gate"]).astype(np.float64) + bias
        terms = expected["gate"] * np.logaddexp(x, 0.0) * (1.0 + np.exp(-x))
        error = abs(float(got["a_log"][0]) - float(expected.pop("a_log")[0]))
        assert error <= accuracy.bound("a_log", problem.dtype) * np.sqrt(np.sum(terms**2))
    assert_within(problem, got, expected)


def test_both_policies_repeat_to_the_bit():
    case = make_case(tokens=70, heads=1, width_k=128, width_v=128, dtype="bfloat16")
    policies = ("save", "rematerialize")
    first, *others = (
        results(case, implementation="pallas", residuals=policy) for policy in policies * 2
    )
    for name, x in first.items():
        for other in others:
            np.testing.assert_array_equal(x, other[name], err_msg=name)
