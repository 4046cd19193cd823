"""The generated forward kernel in interpret mode against the token recurrence in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from kdagen.generate import generate
from kdagen.measure import kinds, operands, verify
from kdagen.measure.accuracy import relative_error
from kdagen.measure.kinds import Kind
from kdagen.problem import Problem
from kdagen.space import default_variant
from kdagen.variant import Variant
from tests.kernels.calls import CHIP, assert_close, assert_within, call

LENGTHS = (1, 2, 7, 63, 64, 65, 128, 129, 199)

# One pack, which compiles for the CPU in seconds, in blocks of two chunks.
SMALL = Variant(heads=1, chunks=2)
SMALL_UNBOUNDED = dataclasses.replace(SMALL, decay="unbounded", sub_block=8)

_PLAIN = Problem(tokens=200, heads=1, initial_state=True, final_state=True)
_RAW = dataclasses.replace(_PLAIN, gate="softplus", qk_l2norm=True)
# a head for every kind of data: kernels of one shape, compiled once for most tests
LOG_DECAY, SOFTPLUS, BOUNDED = (
    kinds.with_heads(problem, kinds.every(problem))
    for problem in (_PLAIN, _RAW, dataclasses.replace(_RAW, gate="bounded", lower_bound=-5.0))
)
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
def test_every_length(tokens, problem, variant):
    """On four heads a kind of data: one of a few tokens may be unlucky in all its roundings."""
    problem = dataclasses.replace(problem, tokens=tokens)
    assert_close(problem, variant, kinds.telling(problem) * 4, tokens)


@pytest.mark.parametrize(("problem", "variant"), SMALL_CALLS, ids=gate_of)
def test_data_of_every_kind_over_several_blocks(problem, variant):
    assert_close(problem, variant, kinds.every(problem))


@pytest.mark.parametrize("key_dim", [32, 48, 64, 100])
def test_the_default_holds_narrow_keys_of_hardly_any_decay(key_dim):
    given = (Kind("-0.001"), Kind("-0.001", "random", True))
    problem = dataclasses.replace(_PLAIN, tokens=300, key_dim=key_dim, value_dim=60)
    chosen = default_variant(problem, CHIP)
    small = dataclasses.replace(chosen, heads=1, chunks=128 // chosen.chunk)
    assert_close(kinds.with_heads(problem, given), small, given)


@pytest.mark.parametrize(("problem", "variant"), SMALL_CALLS, ids=gate_of)
def test_the_same_call_twice_gives_the_same_bits(problem, variant):
    values = kinds.draw(problem, kinds.telling(problem))
    first, second = (call(problem, variant, values) for _ in range(2))
    for name, x in first.items():
        assert np.array_equal(np.asarray(x).view(np.uint8), np.asarray(second[name]).view(np.uint8))


def test_nothing_leaks_through_a_reset_wherever_it_falls():
    resets = [1, 63, 64, 100, 128, 135, 199]
    given = [Kind("-0.05")] * len(resets)
    problem = LOG_DECAY
    values = kinds.draw(problem, given)
    gate, value, state = (np.array(values[name]) for name in ("gate", "value", "initial_state"))
    for head, reset in enumerate(resets):
        gate[head, :, reset] = -1e4
        value[head, :, :reset] *= kinds.LEAK
        state[:, :, head] *= kinds.LEAK
    values |= {
        "gate": jnp.asarray(gate), "value": jnp.asarray(value), "initial_state": jnp.asarray(state),
    }  # fmt: skip
    got = call(problem, SMALL_UNBOUNDED, values)
    expected = verify.reference(problem, values)
    for head, reset in enumerate(resets):
        after = relative_error(got["output"][head, :, reset:], expected["output"][head, :, reset:])
        state = relative_error(got["final_state"][:, :, head], expected["final_state"][:, :, head])
        assert max(after, state) <= given[head].bound("output", problem), reset


def test_a_slow_channel_beside_a_fast_one_keeps_its_state():
    """Held channel by channel: the error of the whole would not show the fast ones, which hold
    hardly any of the state."""
    given = [Kind("fast and slow channels")]
    problem = BOUNDED
    values = kinds.draw(problem, given)
    expected = verify.reference(problem, values)["final_state"]
    slow = np.asarray(values["delta_time_bias"]) < 0
    got = np.asarray(call(problem, SMALL, values)["final_state"])
    for head, channels in enumerate(slow):
        for mine in (channels, ~channels):
            at = (slice(None), slice(None), head, mine)
            assert relative_error(got[at], expected[at]) <= given[0].bound("final_state", problem)


@pytest.mark.parametrize(("problem", "variant"), SMALL_CALLS, ids=gate_of)
def test_tokens_that_are_all_the_same(problem, variant):
    given = kinds.telling(problem)[:1]
    values = kinds.draw(problem, given)
    for name in ("query", "key", "value", "gate", "beta"):
        first = values[name][:, :, :1]
        values[name] = jnp.broadcast_to(first, values[name].shape)
    got, expected = call(problem, variant, values), verify.reference(problem, values)
    # all keys are one key
    repeated = given[0]._replace(key="repeated")
    for name, x in expected.items():
        assert relative_error(got[name], x) <= repeated.bound(name, problem), name


def test_a_rate_of_one_and_no_bias_where_neither_is_given():
    given = [Kind("moderate")]
    values = kinds.draw(BOUNDED, given)
    del values["a_log"], values["delta_time_bias"]
    assert_within(BOUNDED, given, call(BOUNDED, SMALL, values), verify.reference(BOUNDED, values))


@functools.cache
def _products(problem: Problem, variant: Variant) -> list[tuple[str, str, str]]:
    """Types of both operands and of the result of every matrix product in the traced kernel."""
    arguments = [
        None if given is None else jax.ShapeDtypeStruct(*given)
        for given in operands.inputs(problem).values()
    ]
    traced = jax.make_jaxpr(verify.traceable(generate(problem, variant, CHIP), problem))(*arguments)
    found, waiting = [], [traced.jaxpr]
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
