"""The training step of both sides: a forward and the gradient of all that can be trained."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from programs import Program, read_program

# What is asked of kdagen's step, as shares of tokamax's.
TIME_SHARE = 0.35
PACKED_SHARE = 0.2
TEMPORARY_SHARE = 1 / 3


def step_of(
    forward: Callable[..., Any], args: list, held: list | None = None
) -> tuple[Callable[..., Any], list]:
    """The output of ``forward(*args, *held)`` and its gradients with respect to every operand but
    those held, for a cotangent of the output that is one more operand; and the operands."""
    held = held or []

    def step(*arrays):
        import jax

        moving, cotangent, rest = arrays[: len(args)], arrays[len(args)], arrays[len(args) + 1 :]
        output, pull = jax.vjp(lambda *xs: forward(*xs, *rest), *moving)
        return output, pull(cotangent)

    # the output is shaped as value, the third
    return step, [*args, args[2], *held]


def public_forward(problem: Any) -> Callable[..., Any]:
    """kdagen's operator as a user calls it; operands as in ``compare.tokamax_forward``, and behind
    them segment ids if there are segments."""
    from kdagen.runtime.kda import kimi_delta_attention

    def forward(query, key, value, gate, beta, a_log, bias, segment_ids=None):
        output, _ = kimi_delta_attention(
            *(query, key, value, gate, beta),
            a_log=a_log,
            delta_time_bias=bias,
            lower_bound=problem.lower_bound,
            use_gate_in_kernel=True,
            use_qk_l2norm=problem.qk_l2norm,
            segment_ids=segment_ids,
            max_num_segments=None if segment_ids is None else problem.slots,
            implementation="pallas",
        )
        return output

    return forward


def dispatched(problem: Any, chip: Any, table: Path | None) -> tuple[Any, str]:
    """Makes ``table`` the first that calls look into; the step that the operator then runs, and
    where it comes from."""
    from kdagen.problem import TUNED
    from kdagen.runtime import dispatch

    dispatch.configure(db=table)
    trained = dataclasses.replace(problem, residuals=TUNED)
    choice = dispatch.find(trained, chip, dispatch.tables_in_use())
    if choice.table is not None:
        return choice.variant, f"winner of {choice.table.name}"
    return choice.variant, f"{choice.origin} step: {choice.note}"


def kdagen_step(
    problem: Any, chip: Any, args: list, table: Path | None, held: list | None = None
) -> tuple[Program, Any, str]:
    """kdagen's step compiled and read, with what ``dispatched`` returns.

    Raises:
      RuntimeError: the program has other kernels than those of that step.
    """
    from kdagen.measure import operands
    from kdagen.runtime.target import KdagenWarning

    step, origin = dispatched(problem, chip, table)
    function, given = step_of(public_forward(problem), args, held)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KdagenWarning)  # the origin says the same
        # of the block of either kernel: which blocks hold padding is all that is told
        told = operands.numbers(problem, step.backward.block_tokens)
        program = read_program(chip, function, given, {}, told)
    wanted, compiled = kernel_names(problem, step, chip), {n.split(".")[0] for n in program.kernels}
    if compiled != wanted:
        raise RuntimeError(f"expected the kernels {sorted(wanted)}, compiled {sorted(compiled)}")
    return program, step, origin


def kernel_names(problem: Any, step: Any, chip: Any) -> set[str]:
    """Names of the kernels of a step that asks for every gradient."""
    from kdagen.generate import variant_id as forward_id
    from kdagen.gradient.source import variant_id as backward_id
    from kdagen.gradient.step import keeping, of_first
    from kdagen.gradient.variant import Request

    kept, everything = keeping(problem), Request.everything(problem)
    identities = {
        f"kda_forward_{forward_id(of_first(problem, step), step.first, chip)[:12]}",
        f"kda_backward_{backward_id(kept, everything, step.backward, chip)[:12]}",
    }
    if step.residuals == "rematerialize":
        identities.add(f"kda_forward_{forward_id(kept, step.forward, chip)[:12]}")
    return identities


def demands(
    ours: Program,
    theirs: Program,
    *,
    time_share: float = TIME_SHARE,
    temporary_share: float | None = TEMPORARY_SHARE,
) -> list[str]:
    """Lines that hold the step to what is asked of it: shares of the other's, None for no limit."""
    # What has no time makes a side's time a lower bound.
    at_least, at_most = bool(ours.uncounted), bool(theirs.uncounted)
    kernels = ours.kernel_seconds / theirs.kernel_seconds
    whole = ours.all_seconds / theirs.all_seconds
    memory = ours.temporary_bytes / theirs.temporary_bytes
    time = [judged(share, time_share, at_least, at_most) for share in (kernels, whole)]
    lines = [
        f"  of tokamax's   kernels {time[0]}, whole step {time[1]}; asked: at most {time_share:.0%}"
    ]
    if temporary_share is None:
        return [*lines, f"  of tokamax's   temporaries {memory:.1%}"]
    verdict = judged(memory, temporary_share)
    return [*lines, f"  of tokamax's   temporaries {verdict}; asked: at most {temporary_share:.0%}"]


def judged(share: float, limit: float, at_least: bool = False, at_most: bool = False) -> str:
    """A share in per cent, and whether it keeps to a limit, which is open where the share is only a
    bound that does not tell."""
    words = "about " if at_least and at_most else "at least " * at_least + "at most " * at_most
    met = share <= limit
    sure = not (at_least if met else at_most)
    verdict = ("met" if met else "missed") if sure else "open"
    return f"{words}{share:.1%} ({verdict})"
