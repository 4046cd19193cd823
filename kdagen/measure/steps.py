"""A training step of a candidate: its two programs, their modelled time, and the memory they take.

The forward pass is one program and the gradient another. With the policy "rematerialize" the
gradient runs the forward that keeps the residuals first, and its time counts for the gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from kdagen.chips import Chip, get_chip
from kdagen.compiler import aot
from kdagen.compiler.schedule import Schedule, read_schedules
from kdagen.generate import load
from kdagen.gradient import shapes, source
from kdagen.gradient.step import Step, keeping, of_first
from kdagen.gradient.variant import BackwardVariant, Request, states_dtype
from kdagen.measure import offline, operands
from kdagen.problem import Problem

_SUMMED = ("modelled_seconds", "dma_in_bytes", "dma_out_bytes", "floor_bytes", "floor_seconds")

RESIDUALS = ("states", "inverse", "corrected")
BY_CUTS = ("states", "inverse")
"""Residuals whose shape depends on the cuts of the forward that kept them."""
"""What a forward keeps and a backward takes, by its name in both."""

Function = Callable[..., Any]


def run(chip: str, problem: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    """The task of a worker: the fields of ``kdagen.store.rows.Result`` that the compiler tells.

    ``seconds`` is the modelled time of a step on one device, ``forward_seconds`` and
    ``backward_seconds`` its parts. Bytes moved are those of all kernels; the bundles and spills
    are those of the largest loop, the VMEM that of the kernel which leaves the least.

    Raises:
      Rejected: the compiler refused a kernel, with status "vmem" or "compile_failed".
    """
    asked, step, target = Problem.from_dict(problem), Step.from_dict(variant), get_chip(chip)
    forward = _forward(chip, of_first(asked, step).to_json(), step.first.to_json())
    gradient = [_backward(target, asked, step.backward)]
    if step.residuals == "rematerialize":
        gradient.append(_forward(chip, keeping(asked).to_json(), step.forward.to_json()))
    kernels = [forward, *gradient]
    largest = max(kernels, key=lambda one: one["loop_bundles"])
    fullest = min(kernels, key=lambda one: one["vmem_limit_bytes"] - one["vmem_used_bytes"])
    backward_seconds = sum(one["seconds"] for one in gradient)
    return {
        **{name: sum(one[name] for one in kernels) for name in _SUMMED},
        **{name: largest[name] for name in ("loop_bundles", "spills", "model_error")},
        **{name: fullest[name] for name in ("vmem_used_bytes", "vmem_limit_bytes")},
        "seconds": forward["seconds"] + backward_seconds,
        "forward_seconds": forward["seconds"],
        "backward_seconds": backward_seconds,
        "residual_bytes": residual_bytes(asked, step),
    }


# Candidates share kernels, and a compile takes seconds.
@functools.lru_cache(maxsize=256)
def _forward(chip: str, problem: str, variant: str) -> dict[str, Any]:
    return offline.run(chip, json.loads(problem), json.loads(variant))


@functools.lru_cache(maxsize=256)
def _backward(chip: Chip, problem: Problem, variant: BackwardVariant) -> dict[str, Any]:
    short = offline.shortened(problem, variant.block_tokens)

    def compiled() -> list[Schedule]:
        function, structs = backward_of(short, variant, chip)
        made = aot.compile_for(chip, function, list(structs.values()), keep_in_hbm=True)
        assert made.dump_dir is not None
        return read_schedules(made.dump_dir, chip)

    return offline.figures(
        compiled,
        missing=offline.missing_blocks(problem, variant.block_tokens),
        floor=backward_floor_bytes(problem, variant),
        numbers=operands.numbers(short, variant.block_tokens),
    )


def backward_of(
    problem: Problem,
    variant: BackwardVariant,
    chip: Chip,
    kept: Mapping[str, Any] | None = None,
) -> tuple[Function, dict[str, Any]]:
    """The generated ``backward`` of the array operands alone, and their structs by name.

    In layout "BTHD" operands and gradients have heads side by side, as ``operands.projected``.
    ``kept`` are the structs of ``BY_CUTS`` as a forward keeps them, None those of its own cuts.
    """
    import jax

    request = Request.everything(problem)
    module = load(source.generate(problem, request, variant, chip))
    given = _backward_inputs(problem, variant)
    flat = operands.side_by_side(problem, given)
    wanted = operands.projected(problem)
    constants = operands.scalars(problem)

    def backward(*arguments: Any) -> dict[str, Any]:
        # what lies as a program of the forward made it is the kernel's to cut
        shaped = [
            x if x is None or of is None or name in BY_CUTS else x.reshape(of[0])
            for x, (name, of) in zip(arguments, given.items(), strict=True)
        ]
        found = module.backward(*shaped, **constants)
        return {name: x.reshape(wanted[name][0]) for name, x in found.items()}  # type: ignore[index]

    structs = {n: None if of is None else jax.ShapeDtypeStruct(*of) for n, of in flat.items()}
    if kept is not None:
        structs |= {name: kept[name] for name in BY_CUTS}
    return backward, structs


def forward_program(problem: Problem, step: Step, chip: Chip) -> tuple[Function, dict[str, Any]]:
    """The forward pass of ``operands.projected``, and the structs of those by name."""
    import jax

    given = operands.projected(problem)
    structs = {n: None if of is None else jax.ShapeDtypeStruct(*of) for n, of in given.items()}
    return offline.forward_of(of_first(problem, step), step.first, chip), structs


def gradient_program(problem: Problem, step: Step, chip: Chip) -> tuple[Function, dict[str, Any]]:
    """The gradient, and the structs of its operands by name: those of the backward kernel, or with
    the policy "rematerialize" those of the forward and the cotangents."""
    import jax

    forward, given = forward_program(problem, dataclasses.replace(step, residuals="save"), chip)
    kept = jax.eval_shape(forward, *given.values())._asdict()
    backward, structs = backward_of(problem, step.backward, chip, kept)
    if step.residuals == "save":
        return backward, structs
    names = list(structs)

    def gradient(*arguments: Any) -> dict[str, Any]:
        values = dict(zip(taken, arguments, strict=True))
        kept = forward(*(values[name] for name in given))._asdict()
        values |= {name: kept[name] for name in RESIDUALS}
        return backward(*(values[name] for name in names))

    taken = given | {name: structs[name] for name in ("d_output", "d_final")}
    return gradient, taken


def temporary_bytes(problem: Problem, step: Step, chip: Chip) -> int:
    """HBM that a step takes beside operands, results and what is kept between its two programs: the
    larger of their temporaries, by the compiler's memory analysis at the problem's own length."""
    programs = (forward_program(problem, step, chip), gradient_program(problem, step, chip))
    return max(
        aot.compile_for(chip, function, list(structs.values())).temporary_bytes
        for function, structs in programs
    )


def residual_bytes(problem: Problem, step: Step) -> int:
    """HBM bytes that are kept between the forward pass and the gradient, beside the operands."""
    return operands.residual_bytes(problem, step.first)


def backward_floor_bytes(problem: Problem, variant: BackwardVariant) -> int:
    """HBM bytes of a gradient that reads each operand once and writes each result once; a gradient
    has the shape and dtype of its operand."""
    request = Request.everything(problem)
    given = operands.inputs(problem)
    arrays = [*_backward_inputs(problem, variant).values(), *(given[n] for n in request.wanted)]
    return sum(prod(shape) * operands.BYTES[dtype] for shape, dtype in filter(None, arrays))


def _backward_inputs(problem: Problem, variant: BackwardVariant) -> dict[str, operands.Given]:
    request = Request.everything(problem)
    return shapes.inputs(problem, variant, request, states=states_dtype(problem))
