"""The generated forward kernel in interpret mode against the token recurrence in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from kdagen.measure import operands
from kdagen.problem import Problem
from kdagen.variant import Variant
from tests.kernels.calls import (
    BOUND,
    assert_close,
    call,
    compiled,
    draw,
    errors,
    kinds,
    reference,
    relative_error,
    traceable,
)

# Nearly parallel keys, strong writes and slow decay: the inverse has a large norm.
BOUND_ILL_CONDITIONED = 2e-2
LENGTHS = (1, 2, 7, 16, 63, 64, 65, 127, 128, 129, 191, 200)

# One pack, which compiles for the CPU in seconds, in blocks of two chunks.
SMALL = Variant(heads=1, chunks=2)
SMALL_UNBOUNDED = dataclasses.replace(SMALL, decay="unbounded", sub_block=8)

LOG_DECAY = Problem(tokens=200, heads=3, initial_state=True, final_state=True)
SOFTPLUS = dataclasses.replace(LOG_DECAY, gate="softplus", qk_l2norm=True)
BOUNDED = dataclasses.replace(SOFTPLUS, gate="bounded", lower_bound=-5.0)
SMALL_CALLS = ((LOG_DECAY, SMALL_UNBOUNDED), (SOFTPLUS, SMALL_UNBOUNDED), (BOUNDED, SMALL))
# log decays and the two raw kinds take turns
SWEEP = [(t, *SMALL_CALLS[i % 2 * (1 + i // 2 % 2)]) for i, t in enumerate(LENGTHS)]


def gate_of(argument: object) -> str:
    """The name of a parametrized argument in the name of its test."""
    return getattr(argument, "gate", "") or ("" if isinstance(argument, Variant) else str(argument))


def test_the_interpreter_fills_what_nobody_wrote_with_nan():
    """What makes the tests below see a row left out, and one read past the end."""

    def kernel(x, first, last):
        first[...] = x[...]  # the block hangs over the end of x
        last[0:1] = x[0:1]

    block = pl.BlockSpec((8, 128), lambda: (0, 0))
    whole = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    call = pl.pallas_call(
        kernel, in_specs=[block], out_specs=[block] * 2, out_shape=[whole] * 2, interpret=True
    )
    first, last = (np.asarray(x) for x in call(jnp.ones((5, 128))))
    assert (first[:5] == 1).all() and np.isnan(first[5:]).all()
    assert (last[:1] == 1).all() and np.isnan(last[1:]).all()


@pytest.mark.parametrize(("tokens", "problem", "variant"), SWEEP, ids=gate_of)
def test_every_length_at_every_gate(tokens, problem, variant):
    problem = dataclasses.replace(problem, tokens=tokens)
    assert_close(
        {kind: errors(problem, variant, draw(problem, kind, tokens)) for kind in kinds(problem)}
    )


@pytest.mark.parametrize(("problem", "variant"), SMALL_CALLS, ids=gate_of)
def test_every_gate_over_several_blocks(problem, variant):
    assert_close({kind: errors(problem, variant, draw(problem, kind)) for kind in kinds(problem)})


@pytest.mark.parametrize(("problem", "variant"), SMALL_CALLS, ids=gate_of)
def test_the_same_call_twice_gives_the_same_bits(problem, variant):
    values = draw(problem, kinds(problem)[0])
    first, second = (call(problem, variant, values) for _ in range(2))
    for name, x in first.items():
        assert np.array_equal(np.asarray(x).view(np.uint8), np.asarray(second[name]).view(np.uint8))


@pytest.mark.parametrize("reset", [1, 63, 64, 100, 128, 135, 199])
def test_nothing_leaks_through_a_reset(reset):
    values = draw(LOG_DECAY, "0.05", reset)
    gate = np.asarray(values["gate"]).copy()
    gate[:, :, reset] = -1e4
    large = np.asarray(values["value"]).copy()
    large[:, :, :reset] *= 1000
    values |= {"gate": jnp.asarray(gate), "value": jnp.asarray(large)}
    values["initial_state"] = 1000 * values["initial_state"]
    got = call(LOG_DECAY, SMALL_UNBOUNDED, values)
    expected = reference(LOG_DECAY, values)
    after = {"output": (slice(None), slice(None), slice(reset, None)), "final_state": ()}
    assert_close(
        {
            "": {
                name: relative_error(got[name][at], expected[name][at])
                for name, at in after.items()
            }
        }
    )


def test_a_slow_channel_beside_a_fast_one_keeps_its_state():
    """Held channel by channel: the error of the whole would not show the fast ones, which hold
    hardly any of the state."""
    problem = BOUNDED
    values = draw(problem, "fast and slow channels")
    expected = reference(problem, values)["final_state"]
    slow = np.asarray(values["delta_time_bias"]) < 0
    got = np.asarray(call(problem, SMALL, values)["final_state"])
    for head, channels in enumerate(slow):
        mine = (slice(None), slice(None), head, channels)
        other = (slice(None), slice(None), head, ~channels)
        assert relative_error(got[mine], expected[mine]) <= BOUND
        assert relative_error(got[other], expected[other]) <= BOUND


@pytest.mark.parametrize(("problem", "variant"), SMALL_CALLS, ids=gate_of)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_parallel_keys_that_are_written_hard(problem, variant, noise):
    rng = np.random.default_rng(3)
    values = draw(problem, "0.001" if problem.gate == "log_decay" else "slow")
    shape = values["key"].shape
    key = rng.standard_normal((*shape[:2], 1, shape[3])) + noise * rng.standard_normal(shape)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    values["key"] = jnp.asarray(key, "bfloat16")
    values["beta"] = jnp.asarray(rng.uniform(0.9, 1.0, values["beta"].shape), "bfloat16")
    assert_close({"": errors(problem, variant, values)}, BOUND_ILL_CONDITIONED)


@pytest.mark.parametrize(("problem", "variant"), SMALL_CALLS, ids=gate_of)
def test_tokens_that_are_all_the_same(problem, variant):
    values = draw(problem, kinds(problem)[0])
    for name in ("query", "key", "value", "gate", "beta"):
        first = values[name][:, :, :1]
        values[name] = jnp.broadcast_to(first, values[name].shape)
    assert_close({"": errors(problem, variant, values)})


def test_a_rate_of_one_and_no_bias_where_neither_is_given():
    values = draw(BOUNDED, "moderate")
    del values["a_log"], values["delta_time_bias"]
    arguments = [values.get(name) for name in operands.inputs(BOUNDED)]
    got = compiled(BOUNDED, SMALL)(*arguments)
    for x, expected in zip(got, reference(BOUNDED, values).values(), strict=True):
        assert relative_error(x, expected) <= BOUND


@functools.cache
def _products(problem: Problem, variant: Variant) -> list[tuple[str, str, str]]:
    """Types of both operands and of the result of every matrix product in the traced kernel."""
    arguments = [
        None if given is None else jax.ShapeDtypeStruct(*given)
        for given in operands.inputs(problem).values()
    ]
    found, waiting = [], [jax.make_jaxpr(traceable(problem, variant))(*arguments).jaxpr]
    while waiting:
        for equation in waiting.pop().eqns:
            if equation.primitive.name == "dot_general":
                types = [x.aval.dtype.name for x in (*equation.invars, *equation.outvars)]
                found.append(tuple(types))
            for parameter in equation.params.values():
                for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        waiting.append(inner)
    return found


@pytest.mark.parametrize(("problem", "variant"), SMALL_CALLS, ids=gate_of)
def test_products_say_what_they_round_to(problem, variant):
    """On a TPU an f32 product without a stated precision would run in bf16 unseen."""
    found = _products(problem, variant)
    assert found and set(found) == {("bfloat16", "bfloat16", "float32")}
