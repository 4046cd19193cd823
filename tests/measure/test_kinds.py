"""Data by kind: it is as hard as its name says, and errors are told apart by kind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kdagen.measure import kinds, operands
from kdagen.measure.kinds import Kind
from kdagen.problem import Problem

PLAIN = Problem(
    tokens=64, heads=1, dtype="float32", key_dim=32, value_dim=8, initial_state=True,
    final_state=True,
)  # fmt: skip
PROBLEMS = {
    "log_decay": PLAIN,
    "softplus": dataclasses.replace(PLAIN, gate="softplus"),
    "bounded": dataclasses.replace(PLAIN, gate="bounded", lower_bound=-5.0),
}


def drawn(gate: str, *given: Kind, **facts) -> dict[str, np.ndarray]:
    problem = dataclasses.replace(PROBLEMS[gate], heads=len(given), value_heads=len(given), **facts)
    return {
        name: np.asarray(x).astype(np.float64) for name, x in kinds.draw(problem, given).items()
    }


def log_decay(gate: str, values: dict[str, np.ndarray]) -> np.ndarray:
    if gate == "log_decay":
        return values["gate"]
    x = values["gate"] + values["delta_time_bias"][:, None, None]
    rate = np.exp(np.minimum(values["a_log"], 88))[:, None, None, None]
    with np.errstate(over="ignore"):
        return -5 / (1 + np.exp(-rate * x)) if gate == "bounded" else -rate * np.logaddexp(0, x)


@pytest.mark.parametrize("gate", PROBLEMS)
def test_every_kind_can_be_drawn_for_every_problem(gate):
    problem = dataclasses.replace(PROBLEMS[gate], heads=3, value_heads=6, batch=2, dtype="bfloat16")
    given = kinds.every(problem)
    assert len(set(given)) == len(given)
    assert {kind.gate for kind in given} == set(kinds.GATES[gate])
    assert set(kinds.telling(problem)) < set(given)
    wanted = {name: one for name, one in operands.inputs(problem).items() if one}
    for start in range(0, len(given), 3):
        values = kinds.draw(problem, given[start : start + 3])
        assert {n: (x.shape, x.dtype.name) for n, x in values.items()} == wanted
        assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in values.values())


def test_log_decays_are_what_they_are_called():
    given = [Kind(gate) for gate in kinds.LOG_DECAYS]
    gates = dict(zip(kinds.LOG_DECAYS, drawn("log_decay", *given)["gate"], strict=True))
    for name in ("0", "-0.001", "-0.05", "-1", "-5", "-6", "-20"):
        assert np.unique(gates[name]) == np.float32(name)
    reset = gates["resets"] == -1e4
    assert (reset.all(-1) == reset.any(-1)).all() and 0 < reset.mean() < 0.3
    entries = gates["entry resets"] == -1e4
    assert 0.05 < entries.mean() < 0.15 and not entries.all(-1).any()
    kept = np.where(gates["mixed"] > -1e4, gates["mixed"], 0).min(axis=(0, 1))
    assert kept.min() < -15 and kept.max() > -1e-2
    assert gates["above 0"].min() == 0 and gates["above 0"].max() > 0


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_raw_gates_are_what_they_are_called(gate):
    names = kinds.GATES[gate]
    values = drawn(gate, *(Kind(name) for name in names))
    decay = dict(zip(names, log_decay(gate, values), strict=True))
    assert decay["slow"].min() > -0.2
    assert np.median(decay["fast"]) < -4
    channels = decay["fast and slow channels"]
    assert channels.min() < -4 and channels.max() > -1e-2
    assert (channels.min(axis=(0, 1)) > -1e-2).any() and (channels.max(axis=(0, 1)) < -4).any()
    assert 0.2 < (decay["fast and slow tokens"] < -4).mean() < 0.8
    assert 88 <= values["a_log"][names.index("saturated")] <= 100
    saturated = decay["saturated"]
    ends = ((saturated == 0) | (saturated == -5)) if gate == "bounded" else (saturated < -1e4)
    assert ends.all()


def test_keys_and_write_strengths_are_what_they_are_called():
    given = [Kind("0", key, above) for key in kinds.KEYS for above in (False, True)]
    values = drawn("log_decay", *given)
    for kind, key, beta in zip(given, values["key"][:, 0], values["beta"], strict=True):
        np.testing.assert_allclose(np.linalg.norm(key, axis=-1), 1, rtol=1e-6)
        cosines = key @ key.T
        if kind.key == "parallel":
            assert 0.9 < cosines.min() < 0.999
        elif kind.key == "repeated":
            assert len(np.unique(key, axis=0)) == 3
        else:
            assert np.abs(cosines - np.eye(len(key))).max() < 0.9
        low, high = (1, 2) if kind.beta_above_one else (0.9 if kind.ill_conditioned else 0, 1)
        assert low <= beta.min() and beta.max() <= high
        assert kind.ill_conditioned == (kind.key != "random")


@pytest.mark.parametrize("gate", ["log_decay", "softplus"])
def test_a_leak_would_show_after_the_reset_only(gate):
    slow = next(kind.gate for kind in kinds.every(PROBLEMS[gate]) if kind.key == "leak")
    problem = dataclasses.replace(PROBLEMS[gate], heads=2, value_heads=2)
    given = [Kind(slow, "leak"), Kind(slow)]
    values = {n: np.asarray(x, np.float64) for n, x in kinds.draw(problem, given).items()}
    at, none = kinds.reset_tokens(problem, given)
    assert none == 0 < at < problem.tokens
    assert (log_decay(gate, values)[0][:, at] <= -1e4).all()
    sizes = np.abs(values["value"]).mean(axis=(1, 3))
    assert sizes[0, :at].min() > 100 * sizes[0, at:].max() and sizes[1].max() < 10
    expected = {"output": np.ones((2, 1, 64, 8))}
    got = {"output": expected["output"].copy()}
    got["output"][0, :, :at] = 7.0
    assert set(kinds.errors(problem, given, got, expected).values()) == {0.0}
    got["output"][0, :, at] = 2.0
    found = kinds.errors(problem, given, got, expected)
    assert found[given[0], "output"] > 0.1 and found[given[1], "output"] == 0


def test_errors_are_told_apart_by_kind():
    problem = dataclasses.replace(PLAIN, heads=3, value_heads=6, tokens=5)
    given = [Kind("0"), Kind("-1")]
    assert [kind.gate for kind in kinds.of_head(given, problem)] == ["0", "0", "-1", "-1", "0", "0"]
    shapes = {
        "output": (6, 1, 5, 8), "final_state": (1, 1, 6, 32, 8), "key": (3, 1, 5, 32),
        "gate": (6, 1, 5, 32), "beta": (6, 1, 5),
    }  # fmt: skip
    expected = {name: np.ones(shape) for name, shape in shapes.items()}
    got = {name: x.copy() for name, x in expected.items()}
    got["output"][3], got["final_state"][:, :, 2], got["key"][1] = 2.0, 1.5, 1.25
    found = kinds.errors(problem, given, got, expected)
    wrong = {at: error for at, error in found.items() if error}
    assert wrong == {
        (given[1], "output"): pytest.approx(2**-0.5),
        (given[1], "final_state"): pytest.approx(0.5 * 2**-0.5),
        (given[1], "key"): pytest.approx(0.25),
    }
    assert kinds.outside(problem, found).keys() == wrong.keys()


def test_a_kernel_in_bfloat16_need_not_hold_what_its_inverse_cannot_but_stays_finite():
    problem = dataclasses.replace(PLAIN, dtype="bfloat16")
    hard, usual = Kind("0", "parallel"), Kind("0")
    assert not kinds.outside(problem, {(hard, "output"): 0.3, (usual, "output"): 4e-3})
    broken = {(hard, "output"): float("inf"), (usual, "output"): 6e-3}
    assert kinds.outside(problem, broken).keys() == broken.keys()
    assert kinds.outside(PLAIN, {(hard, "output"): 2e-4}) == {
        (hard, "output"): (2e-4, pytest.approx(1e-4))
    }


def test_a_kind_that_the_gate_does_not_have_is_an_error():
    with pytest.raises(KeyError, match="bounded gate"):
        kinds.draw(PROBLEMS["bounded"], [Kind("-20")])


def test_a_seed_decides_the_values():
    given = kinds.telling(PLAIN)
    one, same, other = (kinds.draw(PLAIN, given, seed) for seed in (1, 1, 2))
    for name, x in one.items():
        assert (x == same[name]).all(), name
    assert not (one["query"] == other["query"]).all()
