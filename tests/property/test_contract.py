"""What every implementation promises of any call, on calls drawn at random."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kdagen.measure import kinds, operands, verify
from kdagen.measure.accuracy import relative_error
from kdagen.measure.kinds import Kind
from kdagen.problem import DTYPES, GATES, LAYOUTS, Problem
from kdagen.runtime.kda import kimi_delta_attention

PER_TOKEN = ("query", "key", "value", "gate", "beta")
# A call compiles for as long as a second, a kernel in the interpreter for several.
EXAMPLES = {"xla_chunked": 5, "recurrent": 6, "pallas": 3}

Values = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A problem, the kind of data it is given, and what tells its numbers."""

    problem: Problem
    kind: Kind
    seed: int

    @functools.cached_property
    def values(self) -> Values:
        return kinds.draw(self.problem, [self.kind], self.seed)

    def bound(self, name: str) -> float:
        """The usual one, and twice that in bfloat16: a tensor of a few numbers may be unlucky in
        all their roundings."""
        factor = 2 if self.problem.dtype == "bfloat16" else 1
        return factor * self.kind.bound(name, self.problem)


@st.composite
def calls(draw, least_tokens: int = 1) -> Call:
    """At least four rows of heads and batch, so that not all products of one happen to cancel."""
    gate = draw(st.sampled_from(GATES))
    heads, group = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    width = st.sampled_from([1, 2, 7, 16, 20, 33])
    problem = Problem(
        tokens=draw(st.integers(least_tokens, 140)),
        heads=heads,
        batch=2,
        value_heads=heads * group,
        key_dim=draw(width),
        value_dim=draw(width),
        dtype=draw(st.sampled_from(DTYPES)),
        gate=gate,
        lower_bound=draw(st.sampled_from([-5.0, -1.0])) if gate == "bounded" else None,
        gate_dtype=draw(st.sampled_from(DTYPES)),
        beta_dtype=draw(st.sampled_from(DTYPES)),
        qk_l2norm=draw(st.booleans()),
        initial_state=draw(st.booleans()),
        final_state=True,
        layout=draw(st.sampled_from(LAYOUTS)),
        precision="high",
    )
    return Call(problem, draw(st.sampled_from(kinds.every(problem))), draw(st.integers(0, 99)))


def examples(implementation: str, share: int = 1) -> Any:
    """The same few calls in every run; none is made smaller, which would take minutes."""
    return settings(
        max_examples=-(-EXAMPLES[implementation] // share),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@functools.lru_cache(maxsize=16)
def compiled(implementation: str, problem: Problem, scale: float | None) -> Any:
    """Output and final state of values in layout "HBTD"; hardly optimised, it runs for a moment."""

    def run(values: Values) -> Values:
        rest = {name: x for name, x in values.items() if name not in PER_TOKEN}
        with jax.default_matmul_precision(problem.precision):
            output, state = kimi_delta_attention(
                **operands.in_layout({name: values[name] for name in PER_TOKEN}, problem),
                **rest,
                **verify.static_arguments(problem),
                scale=scale,
                output_final_state=True,
                layout=problem.layout,
                implementation=implementation,
            )
        output = jnp.moveaxis(output, 2, 0) if problem.layout == "BTHD" else output
        return {"output": output, "final_state": state}

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def results(
    implementation: str, call: Call, values: Values, scale: float | None = None
) -> dict[str, np.ndarray]:
    tokens = values["query"].shape[2]
    problem = dataclasses.replace(
        call.problem, tokens=tokens, initial_state="initial_state" in values
    )
    found = compiled(implementation, problem, scale)(values)
    return {name: np.asarray(x) for name, x in found.items()}


def assert_close(call: Call, found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, x in expected.items():
        error = relative_error(found[name], np.asarray(x).astype(np.float64))
        assert error <= call.bound(name), (name, error, call.bound(name))


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def tokens_of(values: Values, which: slice) -> Values:
    return {name: x[:, :, which] if name in PER_TOKEN else x for name, x in values.items()}


def shuffled(call: Call, values: Values, back: bool = False) -> Values:
    """Batch rows and key heads in the opposite order, the value heads of a key head with it."""
    group = call.problem.value_heads // call.problem.heads

    def reversed_heads(x: Any, axis: int) -> Any:
        heads = np.arange(x.shape[axis])
        if x.shape[axis] == call.problem.value_heads:
            heads = heads.reshape(-1, group)[::-1].ravel()
        else:
            heads = heads[::-1]
        return x.take(heads, axis=axis)

    found = {}
    for name, x in values.items():
        if name in ("initial_state", "final_state"):
            found[name] = reversed_heads(x, 2)[::-1]
        elif name in ("a_log", "delta_time_bias"):
            found[name] = reversed_heads(x, 0)
        else:
            found[name] = reversed_heads(x, 0)[:, ::-1]
    return found


@pytest.mark.parametrize("implementation", EXAMPLES)
def test_any_call_is_the_recurrence_and_causal_and_blind_to_order(implementation):
    @examples(implementation)
    @given(calls(), st.data())
    def holds(call, data):
        values = call.values
        found = results(implementation, call, values)
        expected = verify.reference(call.problem, values)
        if call.kind.key != "leak":
            assert_close(call, found, expected)
        at = kinds.reset_tokens(call.problem, [call.kind])[0]
        assert_close(call, {"output": found["output"][:, :, at:]}, {
            "output": expected["output"][:, :, at:]
        })  # fmt: skip
        assert_same_bits(results(implementation, call, values), found)

        other = dataclasses.replace(call, seed=call.seed + 100).values
        last = data.draw(st.integers(0, call.problem.tokens - 1), label="last token that stays")
        mixed = {
            name: jnp.concatenate([x[:, :, : last + 1], other[name][:, :, last + 1 :]], axis=2)
            if name in PER_TOKEN
            else x
            for name, x in values.items()
        }
        before = {"output": found["output"][:, :, : last + 1]}
        again = results(implementation, call, mixed)
        again = {"output": again["output"][:, :, : last + 1]}
        if implementation == "pallas":
            # a reference row of a kernel may lie after the token
            assert_close(call, again, before)
        else:
            assert_same_bits(again, before)

        assert_close(
            call, results(implementation, call, shuffled(call, values)), shuffled(call, found)
        )

    holds()


@pytest.mark.parametrize("implementation", EXAMPLES)
def test_a_sequence_may_be_cut_anywhere_and_its_state_handed_over(implementation):
    @examples(implementation, share=3)
    @given(calls(least_tokens=2), st.data())
    def holds(call, data):
        cut = data.draw(st.integers(1, call.problem.tokens - 1), label="cut")
        whole = results(implementation, call, call.values)
        first = results(implementation, call, tokens_of(call.values, slice(None, cut)))
        rest = tokens_of(call.values, slice(cut, None))
        second = results(
            implementation, call, rest | {"initial_state": jnp.asarray(first["final_state"])}
        )
        output = np.concatenate([first["output"], second["output"]], axis=2)
        assert_close(call, {"output": output, "final_state": second["final_state"]}, whole)

    holds()


@pytest.mark.parametrize("implementation", EXAMPLES)
def test_the_output_is_linear_in_the_scale(implementation):
    @examples(implementation, share=3)
    @given(calls(), st.sampled_from([-2.0, 0.25, 8.0]))
    def holds(call, factor):
        usual = call.problem.key_dim**-0.5
        found = results(implementation, call, call.values)
        scaled = results(implementation, call, call.values, scale=factor * usual)
        # powers of two round to nothing
        assert_same_bits(
            scaled, {"output": factor * found["output"], "final_state": found["final_state"]}
        )

    holds()
