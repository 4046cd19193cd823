"""The forward kernel at every pair of values of the axes of ``pairs``, against float64."""

from __future__ import annotations

import pytest

from kdagen.problem import Problem
from tests.kernels.calls import assert_close, draw, errors
from tests.kernels.pairs import cases


@pytest.mark.parametrize("case", range(len(cases())))
def test_every_pair_of_parameters(case):
    problem, variant = cases()[case]
    values = {kind: draw(problem, kind, case) for kind in _telling(problem)}
    found = {kind: errors(problem, variant, given) for kind, given in values.items()}
    assert_close(found)


def _telling(problem: Problem) -> tuple[str, ...]:
    """One kind of gate under which state lives on, and one that reaches both ends."""
    if problem.gate == "log_decay":
        return "0.05", "mixed"
    return "slow", "fast and slow channels"
