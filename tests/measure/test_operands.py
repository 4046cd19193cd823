"""Operands of a call: shapes, bytes, values."""

from __future__ import annotations

import numpy as np
import pytest

from kdagen.measure import operands
from kdagen.problem import Problem

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
    ]


def test_floor_is_each_operand_once() -> None:
    per_token_head = (4 * 128 + 128) * 2 + 2
    rest = 32 * 4 + 32 * 128 * 4
    assert operands.floor_bytes(TRAIN) == 8192 * 32 * per_token_head + rest


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
