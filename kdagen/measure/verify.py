"""The numerical error of a candidate, in interpret mode against the float64 recurrence."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kdagen.chips import get_chip
from kdagen.generate import generate, load
from kdagen.measure import operands
from kdagen.problem import Problem
from kdagen.reference.oracle import recurrent_float64
from kdagen.variant import Variant

# Largest rms(x - reference) / rms(reference) of the output and the final state.
BOUNDS = {"bfloat16": 5e-3, "float32": 2e-5}

_SEED = 20250


def run(chip: str, problem: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    """The task of a worker: ``{"errors": {tensor: {"error": ..., "bound": ...}}}``.

    An error is None where the tensor is not finite.
    """
    errors = relative_errors(Problem.from_dict(problem), Variant.from_dict(variant), chip)
    bound = BOUNDS[problem["dtype"]]
    return {"errors": {name: {"error": error, "bound": bound} for name, error in errors.items()}}


def reduced(problem: Problem, variant: Variant) -> Problem:
    """The smallest problem that takes a variant's kernel through everything it does.

    Its code depends on the problem through ``Problem.key`` and the variant alone. Four blocks, the
    last of them not full, let the two slots of a pipeline change hands; two rows of the batch, and
    two groups of heads where the problem has them, let a program follow another one.
    """
    group = problem.value_heads // problem.heads
    value_heads = min(problem.value_heads, 2 * max(variant.heads, group))
    return dataclasses.replace(
        problem,
        tokens=3 * variant.block_tokens + variant.chunk // 2 + 5,
        batch=2,
        heads=value_heads // group,
        value_heads=value_heads,
    )


def relative_errors(problem: Problem, variant: Variant, chip: str) -> dict[str, float | None]:
    """rms(x - reference) / rms(reference) of each output of the ``reduced`` problem.

    Interpret mode fills outputs and scratch with NaN before the kernel writes to them, so that a
    row it leaves out is seen. None where a tensor is not finite.
    """
    small = reduced(problem, variant)
    module = load(generate(small, variant, get_chip(chip)))
    values = operands.draw(small, _SEED)
    arguments = [values.get(name) for name in operands.inputs(small)]
    got = module.forward(*arguments, **operands.scalars(small), interpret=True)
    expected = recurrent_float64(
        **values,
        lower_bound=small.lower_bound,
        use_gate_in_kernel=small.gate != "log_decay",
        use_qk_l2norm=small.qk_l2norm,
    )
    pairs = zip(("output", "final_state"), got, expected, strict=True)
    return {name: _error(x, reference) for name, x, reference in pairs if x is not None}


def _error(x: Any, reference: np.ndarray) -> float | None:
    x = np.asarray(x).astype(np.float64)
    if x.shape != reference.shape or not np.isfinite(x).all():
        return None
    return float(np.sqrt(np.mean((x - reference) ** 2)) / np.sqrt(np.mean(reference**2)))
