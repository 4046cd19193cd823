"""Output, states and gradients of the plain JAX implementations against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdagen.measure import kinds, operands, verify
from kdagen.problem import DTYPES, GATES, Problem
from tests.reference.cases import Case, assert_close, make_case
from tests.runtime.run import results

PACKED = dict(batch=2, heads=2, value_heads=4, tokens=70, width_k=24, width_v=20)
PACKING = [[0, 3, 3, 40, 60], [0, 0, 64, 65, 70]]
RAW = [dict(raw=True), dict(raw=True, lower_bound=-5.0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES)
def test_data_of_every_kind(gate, dtype):
    problem = Problem(
        tokens=150, heads=1, key_dim=48, value_dim=40, dtype=dtype, gate=gate,
        lower_bound=-5.0 if gate == "bounded" else None, qk_l2norm=True, initial_state=True,
        final_state=True, precision="high",
    )  # fmt: skip
    every = kinds.every(problem)
    problem = kinds.with_heads(problem, every)
    values, rng = kinds.draw(problem, every), np.random.RandomState(0)
    d_output, d_state = (
        jnp.asarray(rng.randn(*shape), dtype) for shape, dtype in operands.outputs(problem).values()
    )
    case = Case(values, verify.static_arguments(problem), d_output, 0.1 * d_state)
    found = results(case, implementation="xla_chunked")
    wrong = kinds.outside(problem, kinds.errors(problem, every, found, case.reference()))
    assert not wrong, f"error and bound: {wrong}"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(RAW[0], "float32"), (RAW[1], "float32"), (RAW[1], "bfloat16")],
    ids=["softplus", "bounded", "bounded in bfloat16"],
)
def test_raw_gates_packed_and_grouped(kind, dtype):
    case = make_case(**kind, dtype=dtype, boundaries=PACKING, **PACKED)
    assert_close(results(case, implementation="xla_chunked"), case)


@pytest.mark.parametrize("a_log", [20.0, 88.0, 100.0])
@pytest.mark.parametrize("kind", RAW, ids=["softplus", "bounded"])
def test_saturated_gates(kind, a_log):
    case = make_case(**kind, a_log=a_log, boundaries=PACKING, **PACKED)
    raw = np.asarray(case.operands["gate"])
    # No float32 holds the gradient where |a * x| < 1, the bias included.
    raw = np.where(np.abs(raw) < 0.1, 0.1, raw)
    case.operands["gate"] = jnp.asarray(raw)
    case.operands["delta_time_bias"] = jnp.zeros_like(case.operands["delta_time_bias"])
    assert_close(results(case, implementation="xla_chunked"), case)


@pytest.mark.parametrize("kind", [dict(), RAW[0]], ids=["log decay", "softplus"])
def test_recurrent(kind):
    case = make_case(**kind, boundaries=PACKING, **PACKED)
    assert_close(results(case, implementation="recurrent"), case)


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 63, 64, 65, 127, 128, 129, 191, 200])
def test_any_length(tokens):
    case = make_case(tokens=tokens, heads=3, width_k=20, width_v=12)
    assert_close(results(case, implementation="xla_chunked", gradients=False), case)


@pytest.mark.parametrize("widths", [(256, 129), (2, 1)])
def test_extreme_widths(widths):
    case = make_case(tokens=1, heads=1, width_k=widths[0], width_v=widths[1])
    assert_close(results(case, implementation="xla_chunked"), case)


def test_no_decay_over_4096_tokens():
    case = make_case(gate="0", tokens=4096, heads=1, width_k=16, width_v=16)
    assert_close(results(case, implementation="xla_chunked", gradients=False), case)


@st.composite
def packings(draw):
    edges = st.lists(st.integers(0, 70), min_size=4, max_size=4)
    return [[0, *sorted(draw(edges))] for _ in range(2)]


@settings(max_examples=6, deadline=None)
@given(packings(), st.integers(0, 100))
def test_any_packing(boundaries, seed):
    case = make_case(raw=True, boundaries=boundaries, seed=seed, **PACKED)
    case.operands["a_log"] += 2
    assert_close(results(case, implementation="xla_chunked"), case)


def test_many_segments_of_one_token():
    boundaries = [[0, *range(1, 27), 29]]
    case = make_case(gate="resets", tokens=30, boundaries=boundaries, width_k=8, width_v=8)
    assert_close(results(case, implementation="xla_chunked"), case)


@pytest.mark.parametrize("implementation", ["xla_chunked", "recurrent"])
@pytest.mark.parametrize("junk", [np.nan, np.inf])
def test_padding_may_hold_anything(junk, implementation):
    boundaries = [[0, 3, 3, 40, 60], [0, 0, 64, 65, 65]]
    case = make_case(raw=True, boundaries=boundaries, **PACKED)
    clean = results(case, implementation=implementation)
    padding = np.arange(PACKED["tokens"]) >= np.array(boundaries)[:, -1:]
    for name in ("query", "key", "value", "gate", "beta"):
        x = case.operands[name]
        mask = padding.reshape(1, *padding.shape, *[1] * (x.ndim - 3))
        case.operands[name] = jnp.where(mask, junk, x)
    dirty = results(case, implementation=implementation)
    for name, x in clean.items():
        np.testing.assert_array_equal(x, dirty[name], err_msg=name)
    assert not np.asarray(clean["output"])[:, padding].any()


def test_policies_agree_and_repeat():
    case = make_case(gate="random")
    saved = results(case, implementation="xla_chunked")
    again = results(case, implementation="xla_chunked")
    rebuilt = results(case, implementation="xla_chunked", residuals="rematerialize")
    for name, x in saved.items():
        np.testing.assert_array_equal(x, again[name], err_msg=name)
        np.testing.assert_allclose(x, rebuilt[name], rtol=1e-5, atol=1e-5, err_msg=name)
