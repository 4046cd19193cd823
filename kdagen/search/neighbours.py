"""Variants that did well nearby: where a search begins."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kdagen.chips import Chip
from kdagen.problem import Problem
from kdagen.search.spaces import Candidate, Space
from kdagen.store.rows import Entry
from kdagen.variant import VariantError


def neighbours(
    entries: Iterable[Entry], problem: Problem, chip: Chip, space: Space, most: int
) -> list[Candidate]:
    """Up to ``most`` legal candidates taken from the best results for other problems and chips.

    The nearest problem first, those of the same kind before others. A variant that is not legal
    here is tried with the default's chunks, heads and factorisation: how its stages interleave may
    still be right.
    """
    found: dict[Candidate, None] = {}
    for entry in _best_of_each(entries, problem, chip):
        try:
            candidates = space.adapted(entry)
        except VariantError:
            continue  # recorded by a version with other parameters
        for candidate in candidates:
            if candidate != space.default and space.check(candidate) is None:
                found[candidate] = None
                break
    return list(found)[:most]


def _best_of_each(entries: Iterable[Entry], problem: Problem, chip: Chip) -> list[Entry]:
    best: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        seconds = entry.result.seconds
        # one with a reason may not win there, and would not here
        if entry.result.status != "ok" or entry.result.reason or seconds is None:
            continue
        place = (entry.environment.chip, entry.problem.to_json())
        held = best.get(place)
        if held is None or seconds < (held.result.seconds or math.inf):
            best[place] = entry

    def distance(entry: Entry) -> tuple[bool, bool, bool, float, str]:
        other = entry.problem
        return (
            other.trained != problem.trained,
            other.gate != problem.gate,
            entry.environment.chip != chip.name,
            abs(math.log(other.value_heads / problem.value_heads)),
            other.to_json(),
        )

    return sorted(best.values(), key=distance)
