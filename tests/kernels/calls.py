"""Calls of generated kernels in interpret mode, on data of every kind, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdagen.chips import get_chip
from kdagen.measure import kinds, verify
from kdagen.problem import Problem
from kdagen.variant import Variant, check

CHIP = get_chip("v6e")


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
        problem = kinds.with_heads(problem, given, variant.heads)
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
