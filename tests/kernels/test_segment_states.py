"""States of segments in kernels of several heads, rows and chunks a program, against float64."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kdagen.chips import get_chip
from kdagen.gradient.step import Step, check_step
from kdagen.gradient.variant import BackwardVariant, Request
from kdagen.measure import accuracy, kinds, verify, verify_steps
from kdagen.problem import Problem
from kdagen.reference.oracle import recurrent_float64_vjp
from kdagen.reference.packing import Packing
from kdagen.variant import Variant

CHIP = get_chip("v6e")
STATES = {"initial_state": True, "final_state": True}
KEPT = {"states": "bfloat16", "keep_corrected": True, "keep_inverse": True}
EXACT = {"dtype": "float32", "gate_dtype": "float32", "beta_dtype": "float32"}
WIDE = {"inverse_dtype": "float32", "inverse_block": 4}

# Problem, forward, backward. Three blocks of two chunks of 64, the last of them not full.
BOUNDED = Problem(
    tokens=300, heads=3, batch=2, gate="bounded", lower_bound=-5.0, qk_l2norm=True,
    layout="BTHD", segments=7, **STATES,
)  # fmt: skip
CASES = {
    "heads one by one, side by side": (
        BOUNDED,
        Variant(heads=3, chunks=2, sub_block=16, **KEPT),
        BackwardVariant(heads=3, chunks=2, keep_corrected=True, keep_inverse=True),
    ),
    "rows of one program, in float32": (
        dataclasses.replace(
            BOUNDED, heads=1, value_heads=1, gate="log_decay", lower_bound=None, layout="HBTD",
            key_dim=40, value_dim=24, **EXACT,
        ),
        Variant(
            heads=1, rows=2, chunks=2, decay="tree", sub_block=1,
            **WIDE, states="float32", keep_corrected=True,
        ),
        BackwardVariant(heads=1, rows=2, chunks=2, sub_block=1, **WIDE, keep_corrected=True),
    ),
}  # fmt: skip
# Rows of a program are each in another place of theirs: where one has a boundary, the other has
# none.
BOUNDARIES = np.array(
    [[0, 0, 30, 64, 190, 191, 256, 256], [0, 128, 128, 128, 140, 150, 300, 300]], np.int32
)


@pytest.mark.parametrize("name", CASES)
def test_states_of_segments_and_their_gradients(name):
    problem, forward, backward = CASES[name]
    step = Step(forward, backward)
    assert check_step(step, dataclasses.replace(problem, residuals="save"), CHIP) is None
    slow = kinds.SLOW[problem.gate]
    values = kinds.draw(problem, (kinds.Kind(slow),), seed=3)
    packing = Packing.of(BOUNDARIES, problem.tokens)
    values |= {"spans": jnp.asarray(packing.spans), "boundaries": jnp.asarray(BOUNDARIES)}
    given = verify_steps.cotangents(problem)
    found = verify_steps.call(problem, step, CHIP, values, given)
    output, state, grads = recurrent_float64_vjp(
        **{**verify.told(problem, values), "boundaries": BOUNDARIES},
        output_cotangent=given["d_output"],
        state_cotangent=given["d_final"],
    )
    expected = {"output": output, "final_state": state, **grads}
    assert found.keys() == {"output", "final_state", *Request.everything(problem).wanted}
    for tensor, x in found.items():
        error = accuracy.relative_error(x, expected[tensor])
        assert error <= accuracy.bound(tensor, problem.dtype), (tensor, error)
    for row, slot in np.argwhere(np.diff(BOUNDARIES) == 0):
        np.testing.assert_array_equal(
            found["final_state"][row, slot], values["initial_state"][row, slot]
        )
        np.testing.assert_array_equal(
            found["initial_state"][row, slot], given["d_final"][row, slot]
        )
