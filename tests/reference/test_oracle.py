"""The oracle against finite differences, against hand-made numbers, and against separate runs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdagen.reference.options import Options
from kdagen.reference.oracle import recurrent_float64, recurrent_float64_vjp
from kdagen.reference.recurrent import recurrent
from tests.reference.cases import make_case, relative_error

SMALL = dict(tokens=40, width_k=5, width_v=4, heads=2, value_heads=4)


def test_one_token_by_hand():
    one = lambda x: np.full((1, 1, 1, 1), x)  # noqa: E731
    output, state = recurrent_float64(
        one(3.0), one(2.0), one(7.0), one(np.log(0.5)), np.full((1, 1, 1), 0.25),
        scale=10.0, initial_state=np.full((1, 1, 1, 1, 1), 8.0),
    )  # fmt: skip
    # S = 0.5 * 8 = 4; e = 7 - 4 * 2 = -1; S = 4 + 0.25 * 2 * -1 = 3.5; out = 3.5 * 30
    assert state.item() == pytest.approx(3.5)
    assert output.item() == pytest.approx(105.0)


@pytest.mark.parametrize(
    "gate",
    [dict(gate="-1"), dict(raw=True), dict(raw=True, lower_bound=-5.0)],
    ids=["log decay", "softplus", "bounded"],
)
def test_gradients_are_finite_differences(gate):
    case = make_case(**gate, **SMALL, boundaries=[[0, 7, 7, 39]])
    reference = case.reference()
    rng = np.random.RandomState(1)
    operands = {name: np.asarray(x, np.float64) for name, x in case.operands.items()}

    def loss(moved):
        output, state = recurrent_float64(**moved, **case.static, boundaries=case.boundaries)
        return np.sum(output * np.asarray(case.d_output)) + np.sum(state * np.asarray(case.d_state))

    step = 1e-6
    for name, x in operands.items():
        direction = rng.randn(*x.shape)
        ahead, behind = (loss({**operands, name: x + sign * step * direction}) for sign in (1, -1))
        slope = np.sum(reference[name] * direction)
        assert (ahead - behind) / (2 * step) == pytest.approx(slope, rel=1e-6), name


def test_segments_are_separate_runs():
    case = make_case(batch=2, boundaries=[[0, 9, 9, 30], [0, 1, 20, 40]], **SMALL)
    together = case.reference()
    for row, edges in enumerate(case.boundaries):
        for slot, (start, end) in enumerate(itertools.pairwise(edges)):
            if start == end:
                state = case.operands["initial_state"][row, slot]
                np.testing.assert_array_equal(together["final_state"][row, slot], state)
                continue
            part = {name: x[:, row : row + 1, start:end] for name, x in case.operands.items()}
            part["initial_state"] = case.operands["initial_state"][row, slot][None, None]
            output, state = recurrent_float64(**part, **case.static)
            np.testing.assert_array_equal(together["output"][:, row, start:end], output[:, 0])
            np.testing.assert_array_equal(together["final_state"][row, slot], state[0, 0])
    assert not together["output"][:, 0, 30:].any()


def test_gates_saturate():
    tokens = np.zeros((1, 1, 3, 1))
    gate = np.array([0.5, -2e4, -1.0]).reshape(1, 1, 3, 1)
    ones, beta = tokens + 1, np.ones((1, 1, 3))
    _, _, grads = recurrent_float64_vjp(
        ones, ones, ones, gate, beta, state_cotangent=np.ones((1, 1, 1, 1, 1)),
        initial_state=np.ones((1, 1, 1, 1, 1)),
    )  # fmt: skip
    assert grads["gate"][0, 0, 0, 0] == 0 and grads["gate"][0, 0, 1, 0] == 0
    # softplus(50) * e^88 is far below -1e4: counted as -1e4, with no gradient
    _, _, grads = recurrent_float64_vjp(
        ones, ones, ones, tokens + 50, beta, use_gate_in_kernel=True, a_log=np.array([100.0]),
        output_cotangent=ones,
    )  # fmt: skip
    assert not grads["gate"].any() and not grads["a_log"].any()


@pytest.mark.parametrize("raw", [False, True])
def test_agrees_with_the_recurrence_differentiated_by_jax_in_float64(raw):
    with jax.enable_x64(True):
        case = make_case(raw=raw, batch=2, boundaries=[[0, 9, 9, 30], [0, 1, 20, 40]], **SMALL)
        options = Options(scale=SMALL["width_k"] ** -0.5, **case.static)
        wide = {name: x.astype(jnp.float64) for name, x in case.operands.items()}

        def run(operands):
            return recurrent(operands, jnp.asarray(case.boundaries), options, dtype=jnp.float64)

        (output, state), pull = jax.jit(lambda x: jax.vjp(run, x))(wide)
        grads = pull((case.d_output.astype(jnp.float64), case.d_state.astype(jnp.float64)))[0]
        for name, x in {"output": output, "final_state": state, **grads}.items():
            assert relative_error(x, case.reference()[name]) < 1e-12, name
