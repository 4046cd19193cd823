"""The numerical error of a candidate, in interpret mode against the float64 recurrence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from math import isfinite, lcm
from typing import Any

import numpy as np

from kdagen.chips import Chip, get_chip
from kdagen.generate import Generated, generate, load
from kdagen.measure import kinds, operands
from kdagen.problem import Problem
from kdagen.reference.oracle import recurrent_float64
from kdagen.variant import Variant

_SEED = 20250


def run(chip: str, problem: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    """The task of a worker: ``{"errors": {tensor: {"error": ..., "bound": ...}}}``.

    Of all kinds of data the one whose error is the largest share of its bound; None where the
    tensor is not finite.
    """
    asked, how = Problem.from_dict(problem), Variant.from_dict(variant)
    small = reduced(asked, how, len(kinds.telling(asked)))
    return {"errors": worst(small, relative_errors(small, how, chip))}


def worst(
    problem: Problem, found: dict[tuple[kinds.Kind, str], float]
) -> dict[str, dict[str, float | None]]:
    """Error and bound of every tensor of ``kinds.errors``, of the kind nearest to its bound."""
    chosen: dict[str, tuple[float, float]] = {}
    for (kind, name), error in found.items():
        limit = kind.bound(name, problem)
        if name not in chosen or error / limit > chosen[name][0] / chosen[name][1]:
            chosen[name] = error, limit
    return {
        name: {"error": error if isfinite(error) else None, "bound": limit}
        for name, (error, limit) in chosen.items()
    }


def reduced(problem: Problem, variant: Variant, least_heads: int = 1) -> Problem:
    """The smallest problem that takes a variant's kernel through everything it does.

    Its code depends on the problem through ``Problem.key`` and the variant alone, and not on how
    many groups of heads there are. Four blocks, the last of them not full, let the two slots of a
    pipeline change hands; two rows of the batch and two groups of heads let a program follow
    another one.

    Args:
      least_heads: query heads that it has to have at least.
    """
    group = problem.value_heads // problem.heads
    program = lcm(variant.heads, group)
    programs = max(2, -(-least_heads * group // program))
    tokens = 3 * variant.block_tokens + variant.chunk // 2 + 5
    return dataclasses.replace(
        problem,
        tokens=tokens,
        segments=None if problem.segments is None else _segments(tokens, variant.chunk),
        batch=2 * variant.rows,
        heads=programs * program // group,
        value_heads=programs * program,
    )


def _segments(tokens: int, chunk: int) -> tuple[int, ...]:
    """Lengths that tell: several segments within a chunk, none and single tokens among them, one
    that ends where a chunk does, a whole chunk, and one of several; and a little padding."""
    first = (chunk // 2 + 3, 1, 0, 1, chunk // 2 - 5, chunk)
    return (*first, tokens - sum(first) - 3)


def relative_errors(
    problem: Problem, variant: Variant, chip: str
) -> dict[tuple[kinds.Kind, str], float]:
    """``kinds.errors`` of a problem on the kinds of data that tell.

    Interpret mode fills outputs and scratch with NaN before the kernel writes to them, so that a
    row it leaves out is seen.
    """
    telling = kinds.telling(problem)
    values = kinds.draw(problem, telling, _SEED)
    got = call(problem, variant, get_chip(chip), values)
    return kinds.errors(problem, telling, got, reference(problem, values))


def traceable(generated: Generated, problem: Problem) -> Callable[..., Any]:
    """``forward`` of the operands in the order of ``operands.inputs``, for the interpreter."""
    constants = operands.scalars(problem)
    return functools.partial(load(generated).forward, **constants, interpret=True)


@functools.lru_cache(maxsize=64)
def interpreted(generated: Generated, problem: Problem) -> Callable[..., Any]:
    """``traceable``, compiled for the CPU: hardly optimised, since it runs for a moment."""
    import jax

    options = {"xla_backend_optimization_level": 0}
    return jax.jit(traceable(generated, problem), compiler_options=options)


def call(problem: Problem, variant: Variant, chip: Chip, values: dict[str, Any]) -> dict[str, Any]:
    """What a variant returns in interpret mode, by name.

    ``values`` and results are in layout "HBTD", whatever that of the problem is.
    """
    results = operands.from_layout(raw(problem, variant, chip, values), problem)
    return {name: x for name, x in results.items() if x is not None}


def raw(problem: Problem, variant: Variant, chip: Chip, values: dict[str, Any]) -> dict[str, Any]:
    """As ``call``, with the results as the kernel gives them, None those that it does not."""
    run = interpreted(generate(problem, variant, chip), problem)
    given = operands.in_layout(values, problem)
    return run(*(given.get(name) for name in operands.inputs(problem)))._asdict()


def static_arguments(problem: Problem) -> dict[str, Any]:
    """What the operator is told of a problem beside its arrays."""
    return {
        "lower_bound": problem.lower_bound,
        "use_gate_in_kernel": problem.gate != "log_decay",
        "use_qk_l2norm": problem.qk_l2norm,
    }


def told(problem: Problem, values: dict[str, Any]) -> dict[str, Any]:
    """What the recurrence in float64 is told of a problem and its operands."""
    arrays = {name: x for name, x in values.items() if name not in operands.packing_inputs(problem)}
    return {**arrays, **static_arguments(problem), "boundaries": operands.boundaries(problem)}


def reference(problem: Problem, values: dict[str, Any]) -> dict[str, np.ndarray]:
    """Output, and final state where the problem asks for it, in float64."""
    output, state = recurrent_float64(**told(problem, values))
    return {"output": output, "final_state": state} if problem.final_state else {"output": output}
