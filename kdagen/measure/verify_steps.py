"""The numerical error of a training step, gradients included, in interpret mode against float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from math import lcm
from typing import Any

import numpy as np

from kdagen.chips import Chip, get_chip
from kdagen.generate import Generated, load
from kdagen.gradient import source
from kdagen.gradient.step import Step, keeping, of_first
from kdagen.gradient.variant import Request
from kdagen.measure import accuracy, kinds, operands, steps, verify
from kdagen.problem import Problem
from kdagen.reference.oracle import recurrent_float64_vjp

_SEED = 20251

# Heads of each kind of data where there is an a_log: its gradient is one number a head.
_COPIES = 4


def run(chip: str, problem: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    """The task of a worker: ``{"errors": ..., "temporary_bytes": ...}``.

    Errors are as ``verify.run`` has them, of the output, the final state and every gradient, by the
    name of its operand; the bytes are those of ``steps.temporary_bytes``.
    """
    asked, step = Problem.from_dict(problem), Step.from_dict(variant)
    copies = 1 if asked.gate == "log_decay" else _COPIES
    small = reduced(asked, step, copies * len(kinds.telling(asked)))
    errors = verify.worst(small, relative_errors(small, step, chip))
    return {
        "errors": errors,
        "temporary_bytes": steps.temporary_bytes(asked, step, get_chip(chip)),
    }


def reduced(problem: Problem, step: Step, least_heads: int = 1) -> Problem:
    """``verify.reduced`` for both kernels of a step: whole programs of either, and no second group
    of heads where the problem has none, which would cost as much again."""
    forward, backward = step.forward, step.backward
    either = dataclasses.replace(
        forward,
        heads=lcm(forward.heads, backward.heads),
        rows=lcm(forward.rows, backward.rows),
        chunks=max(forward.chunks, backward.chunks),
    )
    small = verify.reduced(problem, either, least_heads)
    if problem.value_heads == either.heads and problem.heads >= least_heads:
        return dataclasses.replace(small, heads=problem.heads, value_heads=problem.value_heads)
    return small


def relative_errors(problem: Problem, step: Step, chip: str) -> dict[tuple[kinds.Kind, str], float]:
    """``kinds.step_errors`` on the kinds of data that tell, with random cotangents."""
    telling = kinds.telling(problem)
    values = kinds.draw(problem, telling, _SEED)
    given = cotangents(problem)
    got = call(problem, step, get_chip(chip), values, given)
    expected = reference(problem, values, given)
    return kinds.step_errors(problem, telling, got, expected)


def cotangents(problem: Problem, seed: int = _SEED) -> dict[str, Any]:
    """Random cotangents in layout "HBTD": d_output, and d_final where there is a final state."""
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)
    output = (problem.value_heads, problem.batch, problem.tokens, problem.value_dim)
    given = {"d_output": jnp.asarray(rng.standard_normal(output), problem.dtype)}
    if problem.final_state:
        shape, dtype = operands.outputs(problem)["final_state"]
        # of the size of what one token adds to it, so that neither hides the errors of the other
        drawn = problem.key_dim**-0.5 * rng.standard_normal(shape)
        given["d_final"] = jnp.asarray(drawn, dtype)
    return given


def call(
    problem: Problem, step: Step, chip: Chip, values: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Output, final state and gradients, by the name of their operand, in interpret mode.

    ``values``, cotangents and results are in layout "HBTD", whatever that of the problem is. The
    results are those of what the forward pass runs.
    """
    first = verify.call(of_first(problem, step), step.first, chip, values)
    moved = operands.in_layout({**values, **given}, problem)
    kept_problem, request = keeping(problem), Request.everything(problem)
    kept = verify.raw(kept_problem, step.forward, chip, values)
    made = source.generate(kept_problem, request, step.backward, chip)
    run = _interpreted(made, kept_problem)
    names = [name for name in operands.inputs(problem) if name != "initial_state"]
    names += ["initial_state", *steps.RESIDUALS, "d_output", "d_final"]
    known = {**moved, **{name: kept.get(name) for name in steps.RESIDUALS}}
    found = run(*(known.get(name) for name in names))
    grads = operands.from_layout(dict(found), problem)
    outputs = {name: first[name] for name in accuracy.OUTPUTS if name in first}
    return {**outputs, **grads}


@functools.lru_cache(maxsize=16)
def _interpreted(generated: Generated, problem: Problem) -> Callable[..., Any]:
    """``backward``, compiled for the CPU: hardly optimised, since it runs for a moment."""
    import jax

    backward = functools.partial(
        load(generated).backward, **operands.scalars(problem), interpret=True
    )
    return jax.jit(backward, compiler_options={"xla_backend_optimization_level": 0})


def reference(
    problem: Problem, values: dict[str, Any], given: dict[str, Any]
) -> dict[str, np.ndarray]:
    """The same in float64."""
    output, state, grads = recurrent_float64_vjp(
        **verify.told(problem, values),
        output_cotangent=given["d_output"],
        state_cotangent=given.get("d_final"),
    )
    outputs = (
        {"output": output, "final_state": state} if problem.final_state else {"output": output}
    )
    return {**outputs, **{name: grads[name] for name in Request.everything(problem).wanted}}
