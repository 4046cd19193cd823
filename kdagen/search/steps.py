"""Training steps as a search goes through them: two kernels that share chunks, and a policy."""

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
from kdagen.gradient.step import (
    CUTS,
    KEPT,
    SHARED,
    Step,
    check_step,
    keeping,
    keeping_for,
    paired,
)
from kdagen.gradient.variant import BackwardVariant
from kdagen.gradient.variant import check as gradient_check
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
from kdagen.space import default_variant, space
from kdagen.store.rows import Entry, Result
from kdagen.variant import LANES, MAX_LOOP_BUNDLES, MIB, Variant, VariantError, Violation, check


class Steps:
    """The training steps: a forward, a backward of the same chunks, and a policy; see
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
        # Of all steps with too large a loop the fewest bundles in it for a token in flight, and the
        # most tokens in flight of the others.
        self._least_bundles, self._most_tokens = 0.0, LANES
        self.axes = self._axes(policies)
        self.first = self._first_ones(policies)
        self._require_allowed()

    def _axes(self, policies: tuple[str, ...]) -> dict[str, list[Option]]:
        """The cuts of either kernel are an axis; where the forward keeps an inverse that its own
        would not let the backward read, it is cut as the backward is, whatever its own says."""
        problem, chip, default = self._problem, self._chip, self.point(self.default)
        found: dict[str, list[Option]] = {}

        def add(part: str, values: Mapping[str, Any], cuts: tuple[str, ...], check: Any) -> str:
            prefix = f"{part}."
            group = tuple(n if n == "chunk" else f"{prefix}{n}" for n in (*cuts, VMEM_LIMIT))
            own = {n if n == "chunk" else f"{prefix}{n}": x for n, x in values.items()}

            def legal(point: Option) -> bool:
                return check(getattr(self.candidate(point), part), keeping(problem), chip) is None

            found.update(legal_axes(default, own, [group], legal))
            first = "+".join(group)
            found[first] = unraised(found[first], default, prefix, problem.tokens)
            return first

        # "save", so that a forward may keep what a backward may read
        values = space(keeping(problem), chip)
        rest = {n: x for n, x in values.items() if n not in (*KEPT, "states", "keep_gate")}
        first = add("forward", rest, CUTS, check)
        least = LEAST_IN_FLIGHT * max(in_flight(o, "forward.") for o in found[first])
        busy = [o for o in found[first] if in_flight(o, "forward.") >= least or self._own(o)]
        found[first] = ordered(busy, default, "forward.")

        of_backward = gradient.space(problem, chip)
        rest = {n: x for n, x in of_backward.items() if n not in SHARED}
        first = add("backward", rest, CUTS[1:], gradient_check)
        usual = in_flight(default, "backward.")
        near = [
            option
            for option in found[first]
            if LEAST_IN_FLIGHT * usual
            <= in_flight({**default, **option}, "backward.")
            <= usual / LEAST_IN_FLIGHT
        ]
        found[first] = ordered(near, default, "backward.")
        for name in KEPT:
            found[name] = [{name: x} for x in values[name] if x in of_backward[name]]
        found["residuals"] = [{"residuals": name} for name in policies]
        return found

    def _own(self, option: Option) -> bool:
        default = self.point(self.default)
        return all(default[name] == x for name, x in option.items())

    def _first_ones(self, policies: tuple[str, ...]) -> list[Step]:
        """The default's cuts and those of half the heads in the backward, with more and more kept;
        with each policy."""
        found: dict[Step, None] = {}
        heads = self.default.backward.heads
        for count, kept, policy in itertools.product(
            (heads, max(heads // 2, 1)), (0, 1, 2), policies
        ):
            # corrected values first: they leave the cuts apart
            flags = {name: n < kept for n, name in enumerate(reversed(KEPT))}
            changed = {"backward.heads": count, **flags, "residuals": policy}
            if count != heads:
                changed[f"backward.{VMEM_LIMIT}"] = 0
            step = self.candidate({**self.point(self.default), **changed})
            if self.check(step) is None and not self.excess(step) and step != self.default:
                found[step] = None
        return list(found)

    def _require_allowed(self) -> None:
        # all but the chunks leave the states as they are, and what else is kept adds to them
        cuts, policies = next(iter(self.axes.values())), self.axes["residuals"]
        bare = {**self.point(self.default), **dict.fromkeys(KEPT, False)}
        least = min(
            residual_bytes(self._problem, self.candidate({**bare, **option, **policy}))
            for option, policy in itertools.product(cuts, policies)
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
        parts = (("forward", forward), ("backward", backward))
        return {
            **{name: forward[name] for name in SHARED},
            **{f"{part}.{n}": x for part, of in parts for n, x in of.items() if n not in SHARED},
            "residuals": candidate.residuals,
        }

    def candidate(self, point: Option) -> Step:
        shared = {name: point[name] for name in SHARED}

        def of(part: str) -> Option:
            prefix = f"{part}."
            own = {n.removeprefix(prefix): x for n, x in point.items() if n.startswith(prefix)}
            return own | shared

        forward, backward = Variant(**of("forward")), BackwardVariant(**of("backward"))
        return self._joined(forward, backward, point["residuals"])

    def check(self, candidate: Step) -> Violation | None:
        return check_step(candidate, self._problem, self._chip)

    def excess(self, candidate: Step) -> str:
        kept = residual_bytes(self._problem, candidate)
        if self._limit is None or kept <= self._limit:
            return ""
        return f"it keeps {kept / MIB:.1f} MiB of residuals, of {self._limit / MIB:.1f} allowed"

    def hopeless(self, candidate: Step) -> bool:
        tokens = in_flight(self.point(candidate), "backward.")
        return tokens > self._most_tokens and self._least_bundles * tokens > MAX_LOOP_BUNDLES

    def unproven(self, candidate: Step, result: Result) -> str:
        bundles = result.loop_bundles
        tokens = in_flight(self.point(candidate), "backward.")
        if bundles is None or tokens <= LANES:
            return ""
        if bundles <= MAX_LOOP_BUNDLES:
            self._most_tokens = max(self._most_tokens, tokens)
            return ""
        # check() holds the forward's loop to the limit, so that it is the backward's
        ratio = bundles / tokens
        self._least_bundles = min(self._least_bundles or ratio, ratio)
        return (
            f"code_size: {bundles} bundles in the loop, more than the {MAX_LOOP_BUNDLES} known to "
            "run well"
        )

    def identity(self, candidate: Step) -> str:
        return step_id(self._problem, candidate, self._chip)

    def read(self, text: str) -> Step:
        return Step.from_dict(json.loads(text))

    def adapted(self, entry: Entry) -> list[Step]:
        default = self.default
        if entry.problem.trained:
            step = self.read(entry.result.variant)
            forward, backward, policy = step.forward, step.backward, step.residuals
        else:
            forward = Variant.from_dict(json.loads(entry.result.variant))
            backward, policy = default.backward, default.residuals
        return [
            self._joined(forward, backward, policy),
            self._joined(
                structured(forward, default.forward),
                structured(backward, default.backward),
                policy,
            ),
        ]

    def _joined(self, forward: Variant, backward: BackwardVariant, policy: str) -> Step:
        return Step(keeping_for(forward, backward, self._problem), backward, policy)

    def recombined(self, results: Mapping[Step, Result]) -> Step | None:
        groups: dict[tuple[Any, ...], list[tuple[Step, Result]]] = {}
        for step, result in results.items():
            # a gradient that runs the forward again takes the time of its own
            if result.status == "ok" and not result.reason and step.residuals == "save":
                shared = tuple(getattr(step.backward, name) for name in SHARED)
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
