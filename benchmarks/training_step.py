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
TEMPORARY_SHARE = 1 / 3


def step_of(forward: Callable[..., Any], args: list) -> tuple[Callable[..., Any], list]:
    """The output of ``forward(*args)`` and its gradients with respect to every operand, for a
    cotangent of the output that is one more operand; and the operands."""

    def step(*arrays):
        import jax

        output, pull = jax.vjp(forward, *arrays[:-1])
        return output, pull(arrays[-1])

    # the output is shaped as value, the third
    return step, [*args, args[2]]


def public_forward(problem: Any) -> Callable[..., Any]:
    """kdagen's operator as a user calls it; operands as in ``compare.tokamax_forward``."""
    from kdagen.runtime.kda import kimi_delta_attention

    def forward(query, key, value, gate, beta, a_log, bias):
        output, _ = kimi_delta_attention(
            *(query, key, value, gate, beta),
            a_log=a_log,
            delta_time_bias=bias,
            lower_bound=problem.lower_bound,
            use_gate_in_kernel=True,
            use_qk_l2norm=problem.qk_l2norm,
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
    problem: Any, chip: Any, args: list, table: Path | None
) -> tuple[Program, Any, str]:
    """kdagen's step compiled and read, with what ``dispatched`` returns.

    Raises:
      RuntimeError: the program has other kernels than those of that step.
    """
    from kdagen.runtime.target import KdagenWarning

    step, origin = dispatched(problem, chip, table)
    function, given = step_of(public_forward(problem), args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KdagenWarning)  # the origin says the same
        program = read_program(chip, function, given, {})
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


def demands(ours: Program, theirs: Program) -> list[str]:
    """Lines that hold the step to what is asked of it."""
    # What has no time makes a side's time a lower bound.
    at_least, at_most = bool(ours.uncounted), bool(theirs.uncounted)
    kernels = ours.kernel_seconds / theirs.kernel_seconds
    whole = ours.seconds / theirs.seconds
    memory = ours.temporary_bytes / theirs.temporary_bytes
    time = [judged(share, TIME_SHARE, at_least, at_most) for share in (kernels, whole)]
    return [
        f"  of tokamax's   kernels {time[0]}, whole step {time[1]}; asked: at most "
        f"{TIME_SHARE:.0%}",
        f"  of tokamax's   temporaries {judged(memory, TEMPORARY_SHARE)}; asked: at most a third",
    ]


def judged(share: float, limit: float, at_least: bool = False, at_most: bool = False) -> str:
    """A share in per cent, and whether it keeps to a limit, which is open where the share is only a
    bound that does not tell."""
    words = "about " if at_least and at_most else "at least " * at_least + "at most " * at_most
    met = share <= limit
    sure = not (at_least if met else at_most)
    verdict = ("met" if met else "missed") if sure else "open"
    return f"{words}{share:.1%} ({verdict})"
