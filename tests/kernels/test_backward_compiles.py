"""Backward kernels on every chip: compiled by the TPU's compiler, or refused before."""

from pathlib import Path

import pytest

from kdagen.chips import CHIPS
from tests.children import written_by
from tests.kernels.backward_points import POINTS

PROGRAM = Path(__file__).parent / "backward_points.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Per chip and point, what ``backward_points.outcome`` found, in a process of its own."""
    return written_by(PROGRAM, tmp_path_factory, 800)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", POINTS)
def test_what_check_passes_the_compiler_takes(outcomes, name, chip):
    found = outcomes[chip][name]
    assert "refused" not in found, f"check() passed it, the compiler: {found['refused']}"
    assert found.get("violation") in (None, "vmem")
    if "violation" not in found:
        assert found["vmem_bytes"] <= found["estimated_bytes"]
        assert found["vmem_bytes"] <= found["vmem_limit_bytes"]


@pytest.mark.parametrize("name", POINTS)
def test_some_chip_takes_every_point(outcomes, name):
    assert any("violation" not in outcomes[chip][name] for chip in CHIPS)
