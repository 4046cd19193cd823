"""Calls of generated kernels in interpret mode, on data of every kind, against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdagen.chips import get_chip
from kdagen.measure import kinds, verify
from kdagen.problem import Problem
from kdagen.variant import Variant, check

CHIP = get_chip("v6e")


def with_heads(problem: Problem, given: Sequence[kinds.Kind], program: int = 1) -> Problem:
    """The problem with a key head for every kind, and as many more as fill the last program of
    ``program`` value heads."""
    group = problem.value_heads // problem.heads
    heads = len(given)
    while heads * group % program:
        heads += 1
    return dataclasses.replace(problem, heads=heads, value_heads=heads * group)


def call(problem: Problem, variant: Variant, values: dict[str, Any]) -> dict[str, Any]:
    """Output, and final state where the problem asks for it, of a variant that is legal."""
    violation = check(variant, problem, CHIP)
    assert violation is None, violation
    return verify.call(problem, variant, CHIP, values)


def assert_close(
    problem: Problem, variant: Variant, given: Sequence[kinds.Kind], seed: int = 0
) -> None:
    """Every result of a call, with a head at least for each kind given, is within its bounds."""
    if problem.heads < len(given) or problem.value_heads % variant.heads:
        problem = with_heads(problem, given, variant.heads)
    values = kinds.draw(problem, given, seed)
    got = call(problem, variant, values)
    assert_within(problem, given, got, verify.reference(problem, values))


def assert_within(
    problem: Problem, given: Sequence[kinds.Kind], got: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert got.keys() == expected.keys()
    found = kinds.errors(problem, given, got, expected)
    wrong = kinds.outside(problem, found)
    assert not wrong, f"error and bound: {wrong}"
