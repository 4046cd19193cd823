"""Variants that did well nearby: where a search begins."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable

from kdagen.chips import Chip
from kdagen.problem import Problem
from kdagen.store.tuned import Entry
from kdagen.variant import Variant, VariantError, check, default_variant

# What a variant takes from its problem rather than from its search.
_STRUCTURE = ("chunk", "heads", "chunks", "decay", "sub_block", "vmem_limit_mib")


def neighbours(entries: Iterable[Entry], problem: Problem, chip: Chip, most: int) -> list[Variant]:
    """Up to ``most`` legal variants taken from the best results for other problems and chips.

    The nearest problem first. A variant that is not legal here is tried with the default's chunks,
    heads and factorisation: how its stages interleave may still be right.
    """
    default = default_variant(problem, chip)
    structure = {name: getattr(default, name) for name in _STRUCTURE}
    found: dict[Variant, None] = {}
    for entry in _best_of_each(entries, problem, chip):
        try:
            variant = Variant.from_dict(json.loads(entry.result.variant))
        except VariantError:
            continue  # recorded by a version with other parameters
        for candidate in (variant, dataclasses.replace(variant, **structure)):
            if candidate != default and check(candidate, problem, chip) is None:
                found[candidate] = None
                break
    return list(found)[:most]


def _best_of_each(entries: Iterable[Entry], problem: Problem, chip: Chip) -> list[Entry]:
    best: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        seconds = entry.result.seconds
        if entry.result.status != "ok" or seconds is None:
            continue
        place = (entry.environment.chip, entry.problem.to_json())
        held = best.get(place)
        if held is None or seconds < (held.result.seconds or math.inf):
            best[place] = entry

    def distance(entry: Entry) -> tuple[bool, bool, float, str]:
        other = entry.problem
        return (
            other.gate != problem.gate,
            entry.environment.chip != chip.name,
            abs(math.log(other.value_heads / problem.value_heads)),
            other.to_json(),
        )

    return sorted(best.values(), key=distance)
