"""The modelled time of a candidate: compile it for the chip, read the schedule, predict.

The kernel is compiled at a length of a few blocks, since the length changes only the trip count of
its loop, and the time of the real length is extended from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdagen.chips import Chip, get_chip
from kdagen.compiler import aot, model
from kdagen.compiler.decode import WalkError
from kdagen.compiler.schedule import Schedule, read_schedules
from kdagen.generate import generate, load
from kdagen.measure import operands
from kdagen.measure.rejected import Rejected
from kdagen.problem import Problem
from kdagen.variant import Variant

Numbers = Sequence[Sequence[int]]

# Blocks that are compiled: enough for the model to see a steady state between the ends.
_BLOCKS = model.MIN_STEPS


def run(chip: str, problem: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    """The task of a worker: the fields of ``kdagen.store.rows.Result`` that the compiler tells.

    ``seconds`` is the modelled time of one call on one device: of the kernel at its real length,
    and of the few operations that XLA puts before it at the length that was compiled, where they
    are as good as all overhead. One of them that cannot be followed is left out.

    Raises:
      Rejected: the compiler refused, with status "vmem" or "compile_failed".
    """
    asked, how, target = Problem.from_dict(problem), Variant.from_dict(variant), get_chip(chip)
    short = shortened(asked, how.block_tokens)
    return figures(
        lambda: compiled(short, how, target),
        missing=missing_blocks(asked, how.block_tokens),
        floor=operands.floor_bytes(asked) + operands.residual_bytes(asked, how),
        numbers=operands.numbers(short, how.block_tokens),
    )


def figures(
    compiled: Callable[[], list[Schedule]], *, missing: int, floor: int, numbers: Numbers = ()
) -> dict[str, Any]:
    """What ``run`` returns, of a program with one kernel.

    Args:
      compiled: gives the schedules of the program.
      missing: blocks by which it is shorter than the real one.
      floor: bytes of operands and results at the real length.
      numbers: those of ``operands.numbers``, as it was compiled.

    Raises:
      Rejected: the compiler refused, or the kernel is not the only one.
    """
    try:
        schedules = compiled()
    except aot.CompileError as error:
        status = "vmem" if error.kind == "vmem" else "compile_failed"
        raise Rejected(status, error.message) from error
    kernels = [s for s in schedules if s.is_kernel]
    if len(kernels) != 1:
        raise Rejected("compile_failed", f"{len(kernels)} kernels in the program, one expected")
    (kernel,) = kernels
    around = sum(_seconds_around(s) for s in schedules if not s.is_kernel)
    # length of the last grid axis at the real length; None where that was compiled
    steps = kernel.steps + missing if missing and kernel.steps else None
    scalars = told(kernel, numbers)
    predicted = model.predict(kernel, steps=steps, scalars=scalars)
    report = kernel.report(scalars)
    bytes_in, bytes_out = _moved(kernel, steps, scalars)
    loop = report.main_loop
    rounds = loop.rounds + 1 if loop else 1
    return {
        "seconds": predicted.seconds + around,
        "modelled_seconds": predicted.seconds + around,
        "model_error": predicted.known_error,
        "loop_bundles": loop.bundles if loop else report.static_bundles,
        "spills": round((report.spill_stores + report.spill_loads) / rounds),
        "dma_in_bytes": bytes_in,
        "dma_out_bytes": bytes_out,
        "floor_bytes": floor,
        "floor_seconds": model.hbm_floor_seconds(kernel.chip, floor / kernel.cores),
        "vmem_used_bytes": report.vmem_bytes,
        "vmem_limit_bytes": report.vmem_limit_bytes,
    }


def forward_of(problem: Problem, variant: Variant, chip: Chip) -> Callable[..., Any]:
    """The generated ``forward`` of the array operands alone, its constants bound.

    It takes ``operands.projected``. In layout "BTHD" it gives heads side by side too, in the output
    as in residuals, since a backward takes them so.
    """
    module = load(generate(problem, variant, chip))
    constants = operands.scalars(problem)
    shapes = [given and given[0] for given in operands.inputs(problem).values()]

    def forward(*arguments: Any) -> Any:
        given = [x if x is None else x.reshape(s) for x, s in zip(arguments, shapes, strict=True)]
        results = module.forward(*given, **constants)
        if problem.layout == "HBTD":
            return results
        flat = {
            name: x.reshape(problem.batch, problem.tokens, -1)
            for name in ("output", "corrected", "gate")
            if (x := getattr(results, name)) is not None
        }
        return results._replace(**flat)

    return forward


def missing_blocks(problem: Problem, block_tokens: int) -> int:
    """Blocks of a grid step each that ``shortened`` leaves out.

    0 where segments have states: then the time is that of the blocks where they begin and end.
    """
    if problem.segment_states:
        return 0
    return max(-(-problem.tokens // block_tokens) - _BLOCKS, 0)


def shortened(problem: Problem, block_tokens: int) -> Problem:
    """The problem with fewer blocks and the same rest in the last one: its code is the same."""
    missing = missing_blocks(problem, block_tokens)
    if not missing:
        return problem
    tokens = problem.tokens - missing * block_tokens
    segments = problem.segments
    if segments is not None:
        # as much padding; where a segment begins does not change the time
        padding = problem.tokens - min(operands.lengths(problem))
        segments = (max(tokens - padding, 0),)
    return dataclasses.replace(problem, tokens=tokens, segments=segments)


def program(problem: Problem, variant: Variant, chip: Chip) -> aot.CompiledFor:
    """A call compiled at the problem's own length.

    Raises:
      CompileError: the compiler refused.
    """
    import jax

    structs = [
        None if given is None else jax.ShapeDtypeStruct(*given)
        for given in operands.projected(problem).values()
    ]
    forward = forward_of(problem, variant, chip)
    return aot.compile_for(chip, forward, structs, keep_in_hbm=True)


def compiled(problem: Problem, variant: Variant, chip: Chip) -> list[Schedule]:
    """The schedules of the operations of ``program``.

    Raises:
      CompileError: the compiler refused.
    """
    made = program(problem, variant, chip)
    assert made.dump_dir is not None
    return read_schedules(made.dump_dir, chip)


def _seconds_around(schedule: Schedule) -> float:
    """Modelled time of what XLA runs beside the kernel, 0 where its code cannot be followed.

    On a megacore it may split a reduction of a few numbers between cores that wait for each other.
    """
    try:
        return model.predict(schedule).seconds
    except WalkError:
        return 0.0


def told(kernel: Schedule, numbers: Numbers) -> dict[int, Sequence[int]] | None:
    """Vectors of ``operands.numbers`` by the operand of a kernel that they are, for its walk: its
    control depends on them."""
    by_shape = {x.shape: x.index for x in kernel.listing.operands if x.kind == "input"}
    shapes = [f"s32[{len(vector)}]" for vector in numbers]
    found = zip(shapes, numbers, strict=True)
    return {by_shape[shape]: vector for shape, vector in found if shape in by_shape} or None


def _moved(
    kernel: Schedule, steps: int | None, scalars: dict[int, Sequence[int]] | None
) -> tuple[int, int]:
    """Bytes from and to HBM at the real length, of all cores."""
    walks = [kernel.walk(scalars, core=core) for core in range(kernel.cores)]
    totals = [w.totals if steps is None else model.extend(kernel, w, steps) for w in walks]
    return round(sum(t.bytes_in for t in totals)), round(sum(t.bytes_out for t in totals))
