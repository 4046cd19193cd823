"""Training steps as a search goes through them: two kernels that share their cuts, and a policy."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from kdagen.chips import Chip
from kdagen.gradient import space as gradient
from kdagen.gradient.source import step_id
from kdagen.gradient.step import CUTS, KEPT, Step, check_step, cut_alike, paired
from kdagen.gradient.variant import BackwardVariant, states_dtype
from kdagen.measure.steps import residual_bytes
from kdagen.problem import RESIDUAL_POLICIES, TUNED, Problem
from kdagen.search.axes import (
    LEAST_IN_FLIGHT,
    VMEM_LIMIT,
    Option,
    in_flight,
    legal_axes,
    ordered,
    structured,
    unraised,
)
from kdagen.store.tuned import Entry, Result
from kdagen.variant import (
    MAX_LOOP_BUNDLES,
    MIB,
    Variant,
    VariantError,
    Violation,
    default_variant,
    space,
)


class Steps:
    """The training steps: a forward, a backward of the same cuts, and a policy; see
    ``kdagen.search.spaces.Space``.

    "rematerialize" takes the time of one forward more than "save": where either will do, it is
    searched only under a limit.

    Args:
      residual_limit: most bytes that may be kept from the forward pass to the gradient; None is no
        limit.

    Raises:
      VariantError: no step serves the problem, or none keeps so little.
    """

    def __init__(self, problem: Problem, chip: Chip, residual_limit: int | None = None) -> None:
        self._problem, self._chip, self._limit = problem, chip, residual_limit
        self.default = paired(problem, default_variant(problem, chip), (chip,))
        policies = tuple(p for p in RESIDUAL_POLICIES if problem.residuals in (p, TUNED))
        if residual_limit is None:
            policies = policies[:1]
        # of all steps with a result, the fewest bundles in the loop for a token in flight
        self._least_bundles = 0.0
        values = _step_space(problem, chip, policies)
        limits = (f"forward.{VMEM_LIMIT}", f"backward.{VMEM_LIMIT}")
        group = (*CUTS, *limits)
        default = self.point(self.default)
        legal = lambda point: self.check(self.candidate(point)) is None  # noqa: E731
        axes = legal_axes(default, values, [group], legal)
        first = "+".join(group)
        kept = unraised(axes[first], default, limits, problem.tokens)
        usual = in_flight(default)
        near = (usual * LEAST_IN_FLIGHT, usual / LEAST_IN_FLIGHT)
        axes[first] = ordered(o for o in kept if near[0] <= in_flight(o) <= near[1])
        self.axes = axes
        self.first = self._first_ones(policies)
        self._require_allowed()

    def _first_ones(self, policies: tuple[str, ...]) -> list[Step]:
        """The default's cuts and those with half the heads, everything kept and nothing but states,
        with the policy that fits at all first."""
        found: dict[Step, None] = {}
        halved = max(self.default.forward.heads // 2, 1)
        for heads, kept, policy in itertools.product(
            (self.default.forward.heads, halved), (False, True), policies
        ):
            shared = {"heads": heads, **dict.fromkeys(KEPT, kept)}
            step = self.candidate({**self.point(self.default), **shared, "residuals": policy})
            if self.check(step) is None and not self.excess(step) and step != self.default:
                found[step] = None
        return list(found)

    def _require_allowed(self) -> None:
        # all but the cuts leave the states as they are, and what else is kept adds to them
        least = min(
            residual_bytes(self._problem, self.candidate({**self.point(self.default), **option}))
            for option, policy in itertools.product(
                next(iter(self.axes.values())), self.axes["residuals"]
            )
            for option in ({**option, **policy, **dict.fromkeys(KEPT, False)},)
        )
        if self._limit is not None and least > self._limit:
            raise VariantError(
                f"residual_limit: a step of this shape keeps {least / MIB:.1f} MiB at least, of "
                f"{self._limit / MIB:.1f} allowed; 'residuals: tuned' or 'rematerialize' keeps none"
            )

    def legal(self) -> Iterator[Step]:
        for options in itertools.product(*self.axes.values()):
            candidate = self.candidate(dict(itertools.chain(*(o.items() for o in options))))
            if not self.excess(candidate) and self.check(candidate) is None:
                yield candidate

    def point(self, candidate: Step) -> Option:
        forward, backward = candidate.forward.to_dict(), candidate.backward.to_dict()
        shared = {name: forward[name] for name in (*CUTS, *KEPT)}
        parts = (("forward", forward), ("backward", backward))
        return {
            **shared,
            **{f"{part}.{n}": x for part, of in parts for n, x in of.items() if n not in shared},
            "residuals": candidate.residuals,
        }

    def candidate(self, point: Option) -> Step:
        whole = {**self._fixed(), **point}
        shared = {name: whole[name] for name in (*CUTS, *KEPT)}

        def of(part: str) -> Option:
            prefix = f"{part}."
            own = {n.removeprefix(prefix): x for n, x in whole.items() if n.startswith(prefix)}
            return own | shared

        forward, backward = Variant(**of("forward")), BackwardVariant(**of("backward"))
        return Step(forward, backward, whole["residuals"])

    def _fixed(self) -> Option:
        """Parameters of which there is no choice."""
        return {"forward.states": states_dtype(self._problem), "forward.keep_gate": False}

    def check(self, candidate: Step) -> Violation | None:
        return check_step(candidate, self._problem, self._chip)

    def excess(self, candidate: Step) -> str:
        kept = residual_bytes(self._problem, candidate)
        if self._limit is None or kept <= self._limit:
            return ""
        return f"it keeps {kept / MIB:.1f} MiB of residuals, of {self._limit / MIB:.1f} allowed"

    def hopeless(self, candidate: Step) -> bool:
        bundles = self._least_bundles * in_flight(self.point(candidate))
        return bundles > MAX_LOOP_BUNDLES and candidate.forward.packs > 1

    def unproven(self, candidate: Step, result: Result) -> str:
        bundles = result.loop_bundles or 0
        ratio = bundles / in_flight(self.point(candidate))
        if bundles:
            self._least_bundles = min(self._least_bundles or ratio, ratio)
        if bundles <= MAX_LOOP_BUNDLES or candidate.forward.packs == 1:
            return ""
        return (
            f"code_size: {bundles} bundles in the loop, more than the {MAX_LOOP_BUNDLES} known to "
            "run well"
        )

    def identity(self, candidate: Step) -> str:
        return step_id(self._problem, candidate, self._chip)

    def read(self, text: str) -> Step:
        return Step.from_dict(json.loads(text))

    def adapted(self, entry: Entry) -> list[Step]:
        if entry.problem.trained:
            step = self.read(entry.result.variant)
        else:
            forward = Variant.from_dict(json.loads(entry.result.variant))
            shared = {name: getattr(forward, name) for name in CUTS}
            step = dataclasses.replace(
                self.default,
                forward=forward,
                backward=dataclasses.replace(self.default.backward, **shared),
            )
        default = self.default
        fitted = structured(step.forward, default.forward)
        backward = structured(step.backward, default.backward)
        return [
            self._joined(step.forward, step.backward, step.residuals),
            self._joined(fitted, backward, step.residuals),
        ]

    def _joined(self, forward: Variant, backward: BackwardVariant, policy: str) -> Step:
        return Step(cut_alike(forward, backward, self._problem), backward, policy)

    def recombined(self, results: Mapping[Step, Result]) -> Step | None:
        groups: dict[tuple[Any, ...], list[tuple[Step, Result]]] = {}
        for step, result in results.items():
            # a gradient that runs the forward again takes the time of its own
            if result.status == "ok" and not result.reason and step.residuals == "save":
                shared = tuple(getattr(step.forward, name) for name in (*CUTS, *KEPT))
                groups.setdefault(shared, []).append((step, result))
        found: list[tuple[float, str, Step]] = []
        for members in groups.values():
            (one, first), (other, second) = (
                min(members, key=lambda member: getattr(member[1], name) or math.inf)
                for name in ("forward_seconds", "backward_seconds")
            )
            step = dataclasses.replace(one, backward=other.backward)
            seconds = (first.forward_seconds or 0.0) + (second.backward_seconds or 0.0)
            found.append((seconds, step.to_json(), step))
        if self._limit is not None:
            found += self._rebuilding(results)
        known = min(
            (
                r.seconds or math.inf
                for step, r in results.items()
                if r.status == "ok" and not r.reason and not self.excess(step)
            ),
            default=math.inf,
        )
        for seconds, _, step in sorted(found):
            allowed = step not in results and not self.excess(step)
            if seconds < known and allowed and self.check(step) is None:
                return step
        return None

    def _rebuilding(self, results: Mapping[Step, Result]) -> list[tuple[float, str, Step]]:
        """Steps that keep residuals, with the policy that keeps none, and about their time."""
        found = []
        for step, result in results.items():
            if result.status == "ok" and not result.reason and step.residuals == "save":
                other = dataclasses.replace(step, residuals="rematerialize")
                seconds = (result.seconds or 0.0) + (result.forward_seconds or 0.0)
                found.append((seconds, other.to_json(), other))
        return found


def _step_space(
    problem: Problem, chip: Chip, policies: tuple[Any, ...]
) -> dict[str, tuple[Any, ...]]:
    """Ordered values of the parameters of ``Steps.point``, but for those that are fixed."""
    # "save", so that a forward may keep what a backward may read
    forward = space(dataclasses.replace(problem, residuals="save"), chip)
    backward = gradient.space(problem, chip)
    shared = (*CUTS, *KEPT)
    values: dict[str, tuple[Any, ...]] = {
        name: tuple(x for x in forward[name] if x in backward[name]) for name in shared
    }
    fixed = (*shared, "states", "keep_gate")
    for part, of in (("forward", forward), ("backward", backward)):
        values |= {f"{part}.{name}": xs for name, xs in of.items() if name not in fixed}
    return values | {"residuals": policies}
