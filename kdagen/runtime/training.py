"""The kernels of a differentiated call: a backward, and the forward that keeps what it takes.

Both cut the problem alike (chunk, heads, rows and chunks of a program): what the forward keeps for
a program, the same program of the backward reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kdagen.chips import Chip
from kdagen.gradient import variant as gradient
from kdagen.gradient.variant import BackwardVariant
from kdagen.problem import Problem
from kdagen.runtime.target import NoKernelError
from kdagen.variant import LANES, Variant, VariantError, Violation, check


@dataclass(frozen=True)
class Pair:
    """A forward that keeps residuals, and the backward that takes them.

    Attributes:
      problem: what is computed, with residuals "save".
      forward, backward: how, cut alike.
    """

    problem: Problem
    forward: Variant
    backward: BackwardVariant

    def check(self, chip: Chip) -> Violation | None:
        """Whether both are legal on a chip: None, or the first rule that is broken."""
        broken = check(self.forward, self.problem, chip)
        return broken or gradient.check(self.backward, self.problem, chip)


def pair(problem: Problem, forward: Variant, chips: Sequence[Chip], *, small: bool = False) -> Pair:
    """A legal pair whose forward is a given one but for what a backward asks of it.

    Args:
      problem: what is computed.
      forward: a variant that serves it without residuals.
      chips: on which it must be legal, the smallest first.
      small: as few chunk-heads in flight as can be, for the interpreter.

    Raises:
      NoKernelError: there is none.
    """
    problem = replace(problem, residuals="save")
    reasons = []
    for backward in _backwards(problem, forward, chips[0], small=small):
        found = Pair(problem, _cut_alike(forward, backward, problem), backward)
        broken = next((b for chip in chips if (b := found.check(chip)) is not None), None)
        if broken is None:
            return found
        reasons.append(str(broken))
    raise NoKernelError(f"no backward kernel serves the call: {reasons[0]}")


def _backwards(
    problem: Problem, forward: Variant, chip: Chip, *, small: bool
) -> Iterator[BackwardVariant]:
    """Those to try: the default, one cut as the forward is, and one of the fewest chunk-heads."""
    try:
        default = gradient.default_variant(problem, chip)
    except VariantError as error:
        raise NoKernelError(f"no backward kernel serves the call: {error}") from error
    group = problem.value_heads // problem.heads
    chunks = LANES // default.chunk if group * default.chunk % LANES else 1
    smallest = replace(default, heads=group, rows=1, chunks=chunks)
    if small:
        yield smallest
    cut = {name: getattr(forward, name) for name in ("chunk", "heads", "rows", "chunks")}
    yield default
    yield replace(default, **cut)
    yield smallest


def _cut_alike(forward: Variant, backward: BackwardVariant, problem: Problem) -> Variant:
    return replace(
        forward,
        chunk=backward.chunk,
        heads=backward.heads,
        rows=backward.rows,
        chunks=backward.chunks,
        states=gradient.states_dtype(problem),
        keep_inverse=backward.keep_inverse,
        keep_corrected=backward.keep_corrected,
        keep_gate=False,
    )
