"""What a forward kernel keeps for a backward, against the token recurrence in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kdagen.kernels.numerics import LOG_DECAY_FLOOR, TOKEN_FLOOR
from kdagen.kernels.tiling import LANES
from kdagen.measure import operands
from kdagen.measure.accuracy import relative_error
from kdagen.problem import Problem
from kdagen.variant import Variant
from tests.kernels.calls import call

KEPT = {"states": "float32", "keep_inverse": True, "keep_corrected": True, "keep_gate": True}
BOUNDED = Problem(
    tokens=3 * 64 + 5, heads=2, gate="bounded", lower_bound=-5.0, qk_l2norm=True, residuals="save"
)
# the log decay of a token is kept as the factorisation takes it
FLOOR = {"bounded": np.inf, "unbounded": TOKEN_FLOOR, "tree": LOG_DECAY_FLOOR}
CASES = {
    "bounded": (BOUNDED, Variant(heads=2, **KEPT)),
    "bfloat16 states": (
        dataclasses.replace(BOUNDED, initial_state=True),
        Variant(heads=2, **KEPT | {"states": "bfloat16"}),
    ),
    "narrow rows": (
        dataclasses.replace(BOUNDED, key_dim=72, value_dim=48, batch=2, layout="BTHD"),
        Variant(chunk=32, heads=2, rows=2, **KEPT),
    ),
    "log decay": (
        Problem(tokens=3 * 64, heads=1, value_heads=2, residuals="save", initial_state=True),
        Variant(chunk=64, heads=1, chunks=2, decay="unbounded", sub_block=8, **KEPT),
    ),
    "float32": (
        Problem(tokens=70, heads=2, gate="softplus", dtype="float32", residuals="save"),
        Variant(
            heads=2, decay="tree", sub_block=1, inverse_block=4, inverse_dtype="float32", **KEPT
        ),
    ),
}


def _double(x):
    return np.asarray(x).astype(np.float64)


class Sequence:
    """Decay, errors and states of one value head of one batch row, token by token."""

    def __init__(self, problem: Problem, values, row: int, head: int):
        of_key = head // (problem.value_heads // problem.heads)
        key = _double(values["key"])[of_key, row]
        if problem.qk_l2norm:
            key = key / np.sqrt((key**2).sum(-1, keepdims=True) + 1e-6)
        self.key, self.beta = key, _double(values["beta"])[head, row]
        value = _double(values["value"])[head, row]
        self.decay = _log2_decay(problem, values, row, head)
        state = np.zeros((problem.key_dim, problem.value_dim))
        if problem.initial_state:
            state = _double(values["initial_state"])[row, 0, head]
        self.states, errors = [state], []
        for t in range(problem.tokens):
            state = np.exp2(self.decay[t])[:, None] * state
            errors.append(value[t] - state.T @ key[t])
            state = state + self.beta[t] * np.outer(key[t], errors[-1])
            self.states.append(state)
        self.errors = np.array(errors)

    def inverse(self, start: int, chunk: int) -> np.ndarray:
        """(I + N diag(b))^-1 of the chunk from ``start`` on; tokens that are not there are 0."""
        there = min(chunk, len(self.key) - start)
        matrix = np.eye(chunk)
        for t in range(there):
            between = np.zeros(self.key.shape[1])
            for j in range(t - 1, -1, -1):
                between = between + self.decay[start + j + 1]
                product = self.key[start + t] * self.key[start + j] * np.exp2(between)
                matrix[t, j] = product.sum() * self.beta[start + j]
        return np.linalg.inv(matrix)


def _log2_decay(problem: Problem, values, row: int, head: int) -> np.ndarray:
    gate = _double(values["gate"])[head, row]
    if problem.gate == "log_decay":
        natural = np.clip(gate, -1e4, 0.0)
    else:
        x = gate + _double(values["delta_time_bias"])[head]
        rate = np.exp(_double(values["a_log"])[head])
        if problem.gate == "softplus":
            natural = -rate * np.logaddexp(x, 0.0)
        else:
            natural = problem.lower_bound / (1.0 + np.exp(-rate * x))
    return natural / np.log(2.0)


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_is_right(name):
    problem, variant = CASES[name]
    values = operands.draw(problem, seed=1)
    kept = call(problem, variant, values)
    chunk, block, tokens = variant.chunk, variant.block_tokens, problem.tokens
    chunks = -(-tokens // chunk)
    wanted = {"states": [], "corrected": [], "gate": [], "inverse": []}
    got = {"states": [], "corrected": [], "gate": [], "inverse": []}
    sub_block = variant.sub_block
    for row in range(problem.batch):
        for head in range(problem.value_heads):
            sequence = Sequence(problem, values, row, head)
            for n in range(chunks):
                wanted["states"].append(sequence.states[n * chunk])
                state = _double(kept["states"])[row, head, n]
                got["states"].append(state[: problem.key_dim, : problem.value_dim])
                assert not state[problem.key_dim :].any()
                assert not state[:, problem.value_dim :].any()
                wanted["inverse"].append(sequence.inverse(n * chunk, chunk))
                step, of_block = divmod(n, block // chunk)
                item = (of_block * variant.rows + row % variant.rows) * variant.heads
                item += head % variant.heads
                pack, x = divmod(item, LANES // chunk)
                packed = kept["inverse"][row // variant.rows, head // variant.heads, step, pack]
                got["inverse"].append(_double(packed)[:, x * chunk : (x + 1) * chunk])
            wanted["corrected"].append(sequence.errors)
            got["corrected"].append(_double(kept["corrected"])[head, row])
            floored = np.maximum(sequence.decay, -FLOOR[variant.decay] / np.log(2.0))
            pieces = np.split(floored, range(sub_block, tokens, sub_block))
            wanted["gate"].append(np.concatenate([piece.cumsum(0) for piece in pieces]))
            got["gate"].append(_double(kept["gate"])[head, row])
    bounds = dict.fromkeys(wanted, 2e-5 if problem.dtype == "float32" else 5e-3)
    bounds["gate"] = 1e-5 if problem.dtype == "float32" else 3e-4
    errors = {key: relative_error(np.array(got[key]), np.array(wanted[key])) for key in wanted}
    assert all(errors[key] <= bounds[key] for key in errors), errors


def test_nothing_is_kept_unasked():
    problem = dataclasses.replace(BOUNDED, residuals=None)
    kept = call(problem, Variant(heads=2), operands.draw(problem, seed=0))
    assert kept.keys() == {"output"}
