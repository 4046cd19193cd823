"""How a training step is computed: a forward and a backward kernel, and what is kept between them.

Both walk the same chunks: the forward keeps the state at the start of each. An inverse that is kept
lies as the forward's programs made it, so that the backward's must be cuts of those.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kdagen.chips import Chip
from kdagen.gradient import variant as gradient
from kdagen.gradient.variant import BackwardVariant
from kdagen.kernels.tiling import LANES
from kdagen.problem import RESIDUAL_POLICIES, Problem, canonical_json
from kdagen.variant import Variant, VariantError, Violation, check

CUTS = ("chunk", "heads", "rows", "chunks")
"""Parameters that say what a program works on."""

KEPT = ("keep_inverse", "keep_corrected")
"""Parameters that say what the forward keeps and the backward reads, beside the states."""

SHARED = ("chunk", *KEPT)
"""Parameters that both kernels have in common."""


@dataclass(frozen=True)
class Step:
    """A forward that keeps residuals, the backward that takes them, and when that forward runs.

    Attributes:
      forward, backward: how, with ``SHARED`` in common.
      residuals: "save": the forward pass keeps the residuals. "rematerialize": it runs ``plain``,
        and the gradient runs ``forward`` before ``backward``.
    """

    forward: Variant
    backward: BackwardVariant
    residuals: str = "save"

    def __post_init__(self) -> None:
        if self.residuals not in RESIDUAL_POLICIES:
            takes = ", ".join(map(repr, RESIDUAL_POLICIES))
            raise VariantError(f"residuals: got {self.residuals!r}; it must be {takes}")

    @property
    def plain(self) -> Variant:
        """The forward without residuals; its output has the same bits."""
        return dataclasses.replace(
            self.forward, states="none", keep_inverse=False, keep_corrected=False, keep_gate=False
        )

    @property
    def first(self) -> Variant:
        """What the forward pass runs."""
        return self.forward if self.residuals == "save" else self.plain

    def to_dict(self) -> dict[str, Any]:
        """Parameters of both kernels, and the policy."""
        return {
            "forward": self.forward.to_dict(),
            "backward": self.backward.to_dict(),
            "residuals": self.residuals,
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Step:
        """The inverse of ``to_dict``.

        Raises:
          VariantError: a part or a parameter is unknown, missing or of the wrong type.
        """
        parts = {f.name for f in dataclasses.fields(cls)}
        if fields.keys() != parts:
            raise VariantError(
                f"a training step is given by {', '.join(sorted(parts))}; got "
                f"{', '.join(sorted(fields)) or 'nothing'}"
            )
        for name in ("forward", "backward"):
            if not isinstance(fields[name], dict):
                raise VariantError(
                    f"{name}: got {fields[name]!r}; it must be an object of parameters"
                )
        return cls(
            Variant.from_dict(fields["forward"]),
            BackwardVariant.from_dict(fields["backward"]),
            fields["residuals"],
        )

    def to_json(self) -> str:
        """The canonical form."""
        return canonical_json(self.to_dict())


def keeping(problem: Problem) -> Problem:
    """The problem of the forward that keeps residuals, and of the backward."""
    return dataclasses.replace(problem, residuals="save")


def of_first(problem: Problem, step: Step) -> Problem:
    """The problem of ``Step.first``."""
    return dataclasses.replace(problem, residuals="save" if step.residuals == "save" else None)


def check_step(step: Step, problem: Problem, chip: Chip) -> Violation | None:
    """Whether a step is legal for a problem on a chip: None, or the first rule it breaks."""
    forward, backward = step.forward, step.backward
    if problem.residuals in RESIDUAL_POLICIES and step.residuals != problem.residuals:
        return Violation(
            "policy", f"residuals={step.residuals!r}: the problem's is {problem.residuals!r}"
        )
    apart = _apart(forward, backward)
    if apart is not None:
        return Violation("cuts", apart)
    states = gradient.states_dtype(problem)
    if forward.states != states or forward.keep_gate:
        return Violation(
            "kept",
            f"states={forward.states!r}, keep_gate={forward.keep_gate}: the backward takes "
            f"{states} states and no gate",
        )
    broken = check(forward, keeping(problem), chip)
    return broken or gradient.check(backward, keeping(problem), chip)


def _apart(forward: Variant, backward: BackwardVariant) -> str | None:
    """Why what a forward keeps is not what a backward reads, or None if it is."""
    alike = list(SHARED)
    if backward.keep_inverse:
        # chunk-heads that share the lanes must share a chunk to be told apart by heads or chunks
        whole = backward.streams * backward.chunk % LANES == 0
        alike += ["rows"] + ([] if whole else ["heads", "chunks"])
        if whole and (forward.heads % backward.heads or backward.rows > 1):
            alike.append("heads")
    for name in alike:
        ours, theirs = getattr(forward, name), getattr(backward, name)
        if ours != theirs:
            return f"{name}={ours} of the forward: that of the backward is {theirs}"
    if forward.chunks % backward.chunks:
        # the last block of the backward would reach beyond the chunks that have a state
        return (
            f"chunks={forward.chunks} of the forward: it must be a multiple of the "
            f"{backward.chunks} of the backward"
        )
    return None


def check_any(variant: Variant | Step, problem: Problem, chip: Chip) -> Violation | None:
    """The check of what a problem is solved by: a step if it is trained, else a forward."""
    if isinstance(variant, Step):
        return check_step(variant, problem, chip)
    return check(variant, problem, chip)


def keeping_for(
    forward: Variant, backward: BackwardVariant, problem: Problem, *, alike: bool = False
) -> Variant:
    """A forward but for what a backward asks of it; with ``alike``, or where it has to be, it is
    also cut as the backward is."""
    shared = {name: getattr(backward, name) for name in SHARED}
    states = gradient.states_dtype(problem)
    fitted = dataclasses.replace(forward, **shared, states=states, keep_gate=False)
    if alike or forward.chunk != backward.chunk or _apart(fitted, backward) is not None:
        return dataclasses.replace(fitted, **{name: getattr(backward, name) for name in CUTS})
    return fitted


def paired(
    problem: Problem, forward: Variant, chips: Sequence[Chip], *, small: bool = False
) -> Step:
    """A legal step whose forward is a given one but for what a backward asks of it.

    Its policy is that of the problem, "save" where that has none.

    Args:
      problem: what is computed.
      forward: a variant that serves it without residuals.
      chips: on which it must be legal, the smallest first.
      small: as few chunk-heads in flight as can be, for the interpreter.

    Raises:
      VariantError: there is none.
    """
    policy = problem.residuals if problem.residuals in RESIDUAL_POLICIES else "save"
    reasons = []
    for backward in _backwards(keeping(problem), forward, chips[0], small=small):
        for alike in (small, True):
            kept = keeping_for(forward, backward, problem, alike=alike)
            found = Step(kept, backward, policy)
            broken = next((b for c in chips if (b := check_step(found, problem, c))), None)
            if broken is None:
                return found
            reasons.append(str(broken))
    raise VariantError(f"no backward kernel serves the call: {reasons[0]}")


def _backwards(
    problem: Problem, forward: Variant, chip: Chip, *, small: bool
) -> Iterator[BackwardVariant]:
    """Those to try: the default with everything kept and with the states alone, one cut as the
    forward is, and one of the fewest chunk-heads."""
    try:
        default = gradient.default_variant(problem, chip)
    except VariantError as error:
        raise VariantError(f"no backward kernel serves the call: {error}") from error
    group = problem.value_heads // problem.heads
    chunks = LANES // default.chunk if group * default.chunk % LANES else 1
    smallest = dataclasses.replace(default, heads=group, rows=1, chunks=chunks)
    if small:
        yield smallest
    # what is kept takes VMEM too, and may be what does not fit
    with contextlib.suppress(VariantError):
        yield gradient.default_variant(problem, chip, kept=True)
    yield default
    yield dataclasses.replace(default, **{name: getattr(forward, name) for name in CUTS})
    yield smallest
