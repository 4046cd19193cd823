"""The sampler's axes: ordered lists of options, partial parameter sets that are legal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Option = dict[str, Any]

VMEM_LIMIT = "vmem_limit_mib"

LEAST_IN_FLIGHT = 0.5
"""Variants with less work in flight than this share of the most leave the MXU waiting for the
products of one chunk-head: with half of it they take 1.5 times as long, with a quarter 3 times."""

# What a variant takes from its problem rather than from its search.
_STRUCTURE = ("chunk", "heads", "chunks", "decay", "sub_block", "ends", VMEM_LIMIT)


def legal_axes(
    default: Option,
    values: Mapping[str, tuple[Any, ...]],
    groups: Sequence[tuple[str, ...]],
    legal: Callable[[Option], bool],
) -> dict[str, list[Option]]:
    """The options of each group, and of each other parameter, that are legal beside the rest of the
    default, which is among them."""
    grouped = {name for group in groups for name in group}
    found = {}
    for group in [*groups, *((name,) for name in values if name not in grouped)]:
        options = [
            dict(zip(group, point, strict=True))
            for point in itertools.product(*(values[name] for name in group))
        ]
        own = {name: default[name] for name in group}
        if own not in options:
            options.append(own)
        found["+".join(group)] = [
            option for option in options if option == own or legal({**default, **option})
        ]
    return found


def unraised(options: Sequence[Option], default: Option, prefix: str, tokens: int) -> list[Option]:
    """Those with a raised VMEM limit only where the chip's own does not do, and with no programs
    longer than the sequence; that of the default is among them whatever it is."""
    limit, kept = f"{prefix}{VMEM_LIMIT}", []
    for option in options:
        fits = (option[f"{prefix}chunks"] - 1) * {**default, **option}["chunk"] < tokens
        own = all(default[name] == x for name, x in option.items())
        raised = option[limit] and {**option, limit: 0} in options
        if own or (fits and not raised):
            kept.append(option)
    return kept


def ordered(options: Iterable[Option], default: Option, prefix: str) -> list[Option]:
    """By the work in flight, so that the sampler can tell near from far."""

    def place(option: Option) -> tuple[int, int, int]:
        whole = {**default, **option}
        return in_flight(whole, prefix), whole["chunk"], whole[f"{prefix}heads"]

    return sorted(options, key=place)


def in_flight(point: Option, prefix: str = "") -> int:
    """Tokens of all chunk-heads of one grid step, of the kernel with that prefix."""
    tokens = point["chunk"]
    for name in ("heads", "rows", "chunks"):
        tokens *= point[f"{prefix}{name}"]
    return tokens


def structured(variant: Any, default: Any) -> Any:
    """A variant with the default's cuts and factorisation: how its stages interleave may still be
    right where it is not legal itself."""
    known = {field.name for field in dataclasses.fields(variant)}
    structure = {name: getattr(default, name) for name in _STRUCTURE if name in known}
    return dataclasses.replace(variant, **structure)
