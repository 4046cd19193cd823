"""Operands of a call: shapes, bytes, values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kdagen.chips import get_chip
from kdagen.measure import offline, operands
from kdagen.problem import Problem
from kdagen.variant import Variant, check

TRAIN = Problem(tokens=8192, heads=32, gate="bounded", lower_bound=-5.0, qk_l2norm=True)


def test_shapes_are_those_of_the_operator() -> None:
    problem = Problem(
        tokens=7, heads=2, value_heads=4, batch=3, key_dim=64, value_dim=32, gate="softplus",
        beta_dtype="float32", initial_state=True, final_state=True,
    )  # fmt: skip
    assert operands.inputs(problem) == {
        "query": ((2, 3, 7, 64), "bfloat16"),
        "key": ((2, 3, 7, 64), "bfloat16"),
        "value": ((4, 3, 7, 32), "bfloat16"),
        "gate": ((4, 3, 7, 64), "bfloat16"),
        "beta": ((4, 3, 7), "float32"),
        "a_log": ((4,), "float32"),
        "delta_time_bias": ((4, 64), "float32"),
        "initial_state": ((3, 1, 4, 64, 32), "float32"),
        "spans": None,
        "boundaries": None,
    }
    assert operands.outputs(problem) == {
        "output": ((4, 3, 7, 32), "bfloat16"),
        "final_state": ((3, 1, 4, 64, 32), "float32"),
    }
    plain = operands.inputs(Problem(tokens=7, heads=2))
    assert [name for name, given in plain.items() if given is None] == [
        "a_log",
        "delta_time_bias",
        "initial_state",
        "spans",
        "boundaries",
    ]


@pytest.mark.parametrize("segments", [5, (3, 0, 2, 1, 0)])
def test_shapes_of_a_packed_call_with_states(segments) -> None:
    problem = Problem(
        tokens=7, heads=2, batch=3, segments=segments, initial_state=True, final_state=True
    )
    given = operands.inputs(problem)
    state = ((3, 5, 2, 128, 128), "float32")
    assert given["initial_state"] == operands.outputs(problem)["final_state"] == state
    assert given["spans"] == ((3, 2, 7), "int32")
    assert given["boundaries"] == ((3, 6), "int32")
    drawn = operands.draw(problem, 0)
    for name in ("initial_state", "spans", "boundaries"):
        assert (drawn[name].shape, drawn[name].dtype.name) == given[name]


def test_kernels_are_told_of_padding_and_with_states_of_every_segment() -> None:
    packed = Problem(tokens=200, heads=2, batch=2, segments=(70, 0, 100))
    assert operands.numbers(dataclasses.replace(packed, segments=None), 64) == []
    assert operands.numbers(packed, 64) == [[170, 170]]
    for states in ({"initial_state": True}, {"final_state": True}):
        lengths, table = operands.numbers(dataclasses.replace(packed, **states), 64)
        row = [
            *(0, 70, 70, 170),  # boundaries
            *(0, 0, 2, 2),  # by block: the first segment with a token there
            *(1, 3, 3, 3),  # the first one behind it
            *(1, 2, 0, 0),  # how many begin in it
            *(0, 0, 2, 3),  # the first one that ends in it
            *(0, 2, 1, 0),  # how many do
        ]
        assert (lengths, table) == ([170, 170], row * 2)


def test_floor_is_each_operand_once() -> None:
    per_token_head = (4 * 128 + 128) * 2 + 2
    rest = 32 * 4 + 32 * 128 * 4
    assert operands.floor_bytes(TRAIN) == 8192 * 32 * per_token_head + rest


def test_projections_lay_heads_side_by_side() -> None:
    problem = Problem(tokens=7, heads=2, value_heads=4, key_dim=64, value_dim=32, layout="BTHD")
    given = operands.projected(problem)
    assert [given[name] for name in ("query", "value", "gate", "beta")] == [
        ((1, 7, 2 * 64), "bfloat16"),
        ((1, 7, 4 * 32), "bfloat16"),
        ((1, 7, 4 * 64), "bfloat16"),
        ((1, 7, 4), "bfloat16"),
    ]
    heads_first = dataclasses.replace(problem, layout="HBTD")
    assert operands.projected(heads_first) == operands.inputs(heads_first)


@pytest.mark.parametrize("layout", ["HBTD", "BTHD"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_residual_bytes_are_those_of_what_is_kept(layout: str, dtype: str) -> None:
    import jax

    problem = Problem(
        tokens=300, heads=1, value_heads=2, batch=2, key_dim=64, value_dim=129, dtype=dtype,
        layout=layout, residuals="save",
    )  # fmt: skip
    variant = Variant(
        heads=2, chunks=2, decay="tree", sub_block=1, inverse_block=4, inverse_dtype="float32",
        states="bfloat16", keep_inverse=True, keep_corrected=True, keep_gate=True,
    )  # fmt: skip
    chip = get_chip("v6e")
    assert check(variant, problem, chip) is None
    structs = [
        given and jax.ShapeDtypeStruct(*given) for given in operands.projected(problem).values()
    ]
    made = jax.eval_shape(offline.forward_of(problem, variant, chip), *structs)
    kept = jax.tree.leaves(made._replace(output=None, final_state=None))
    assert len(kept) == 4
    expected = sum(x.size * x.dtype.itemsize for x in kept)
    assert operands.residual_bytes(problem, variant) == expected
    assert (
        operands.residual_bytes(problem, dataclasses.replace(variant, keep_gate=False)) < expected
    )
    assert operands.residual_bytes(problem, Variant()) == 0


@pytest.mark.parametrize("gate", ["bounded", "softplus", "log_decay"])
def test_values_span_what_the_gate_allows(gate: str) -> None:
    bound = -5.0 if gate == "bounded" else None
    problem = Problem(tokens=512, heads=4, gate=gate, lower_bound=bound)
    values = operands.draw(problem, seed=0)
    wanted = {name: given for name, given in operands.inputs(problem).items() if given}
    assert {n: (x.shape, x.dtype.name) for n, x in values.items()} == wanted
    double = {name: np.asarray(x).astype(np.float64) for name, x in values.items()}
    np.testing.assert_allclose(np.linalg.norm(double["key"], axis=-1), 1.0, atol=1e-2)
    assert 0 < double["beta"].min() < 0.2 < 0.8 < double["beta"].max() < 1
    decay = double["gate"]
    if gate != "log_decay":
        x = decay + double["delta_time_bias"][:, None, None]
        a = np.exp(double["a_log"])[:, None, None, None]
        decay = -5.0 / (1 + np.exp(-a * x)) if gate == "bounded" else -a * np.logaddexp(0, x)
    assert decay.max() > -0.01
    assert decay.min() < (-4.99 if gate == "bounded" else -20)
    if gate == "log_decay":
        assert decay.min() < -9e3


def test_a_seed_decides_the_values() -> None:
    problem = Problem(tokens=8, heads=1)
    one, same, other = (operands.draw(problem, seed)["query"] for seed in (1, 1, 2))
    assert (one == same).all()
    assert not (one == other).all()
