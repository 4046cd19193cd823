"""The forward kernel at every pair of values of the axes of ``pairs``, against float64."""

from __future__ import annotations

import pytest

from kdagen.measure import kinds
from tests.kernels.calls import assert_close
from tests.kernels.pairs import cases


@pytest.mark.parametrize("case", range(len(cases())))
def test_every_pair_of_parameters(case):
    problem, variant = cases()[case]
    assert_close(problem, variant, kinds.telling(problem), case)
