"""What a search goes through: the candidates for one problem on one chip."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from kdagen.chips import Chip
from kdagen.generate import variant_id
from kdagen.gradient.step import CUTS, Step
from kdagen.problem import Problem
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
from kdagen.search.steps import Steps
from kdagen.space import default_variant, legal_variants, space
from kdagen.store.rows import Entry, Result
from kdagen.variant import Variant, Violation, check

Candidate = Variant | Step


class Space(Protocol):
    """The candidates for one problem on one chip.

    Attributes:
      default: the one that runs where nothing was tuned.
      first: those to try after it.
      axes: the sampler's, for each an ordered list of options, partial parameter sets. Parameters
        whose legal values depend on each other share one. An option is in it if it is legal beside
        the default's other parameters; the first axis is ordered by the work in flight.
    """

    default: Any
    first: list[Any]
    axes: dict[str, list[Option]]

    def legal(self) -> Iterator[Any]:
        """Every candidate that is legal and allowed, in a fixed order."""
        ...

    def point(self, candidate: Any) -> Option:
        """Every parameter that the axes have, by the names of the axes."""
        ...

    def candidate(self, point: Option) -> Any:
        """The inverse of ``point``."""
        ...

    def check(self, candidate: Any) -> Violation | None:
        """Whether it is legal."""
        ...

    def excess(self, candidate: Any) -> str:
        """Why this search does not allow it though it is legal; empty where it does."""
        ...

    def hopeless(self, candidate: Any) -> bool:
        """Whether ``unproven`` would be said of it, by what is known of other results."""
        ...

    def unproven(self, candidate: Any, result: Result) -> str:
        """Why a candidate with that result may not win, which is remembered; empty where it may."""
        ...

    def identity(self, candidate: Any) -> str:
        """The id of its code."""
        ...

    def read(self, text: str) -> Any:
        """The candidate of a row.

        Raises:
          VariantError: it is of a version with other parameters.
        """
        ...

    def adapted(self, entry: Entry) -> list[Any]:
        """What the result of another problem or chip suggests here, best first; some of them, or
        all, may not be legal."""
        ...

    def recombined(self, results: Mapping[Any, Result]) -> Any | None:
        """A candidate not yet tried whose parts were, and whose time, which is their sum, is less
        than that of any result that may win."""
        ...


class Forwards:
    """The variants of the forward kernel; see ``Space``."""

    def __init__(self, problem: Problem, chip: Chip) -> None:
        self._problem, self._chip = problem, chip
        self.default = default_variant(problem, chip)
        self.first: list[Variant] = []
        group = (*CUTS, VMEM_LIMIT)
        default = self.point(self.default)
        legal = lambda point: self.check(self.candidate(point)) is None  # noqa: E731
        axes = legal_axes(default, space(problem, chip), [group], legal)
        first = "+".join(group)
        kept = unraised(axes[first], default, "", problem.tokens)
        least = LEAST_IN_FLIGHT * max(map(in_flight, kept))
        busy = [option for option in kept if in_flight(option) >= least]
        axes[first] = ordered(busy, default, "")
        self.axes = axes

    def legal(self) -> Iterator[Variant]:
        return legal_variants(self._problem, self._chip)

    def point(self, candidate: Variant) -> Option:
        return candidate.to_dict()

    def candidate(self, point: Option) -> Variant:
        return Variant(**point)

    def check(self, candidate: Variant) -> Violation | None:
        return check(candidate, self._problem, self._chip)

    def excess(self, candidate: Variant) -> str:
        return ""

    def hopeless(self, candidate: Variant) -> bool:
        return False

    def unproven(self, candidate: Variant, result: Result) -> str:
        return ""

    def identity(self, candidate: Variant) -> str:
        return variant_id(self._problem, candidate, self._chip)

    def read(self, text: str) -> Variant:
        return Variant.from_dict(json.loads(text))

    def adapted(self, entry: Entry) -> list[Variant]:
        if entry.problem.trained:
            return []
        variant = self.read(entry.result.variant)
        return [variant, structured(variant, self.default)]

    def recombined(self, results: Mapping[Variant, Result]) -> None:
        return None


def space_of(problem: Problem, chip: Chip, residual_limit: int | None = None) -> Space:
    """What to search for a problem; a limit on residuals is for those that are trained.

    Raises:
      VariantError: no kernel serves it, or none within the limit.
    """
    if problem.trained:
        return Steps(problem, chip, residual_limit)
    return Forwards(problem, chip)
