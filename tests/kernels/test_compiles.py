"""Points across the space on every chip: compiled by the TPU's compiler, or refused before."""

from pathlib import Path

import pytest

from kdagen.chips import CHIPS
from tests.children import written_by
from tests.kernels.compile_points import LENGTHS, POINTS

PROGRAM = Path(__file__).parent / "compile_points.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What ``compile_points`` writes, in a process of its own."""
    return written_by(PROGRAM, tmp_path_factory, 500)


@pytest.fixture(scope="module")
def outcomes(found):
    """Of every point on every chip."""
    return found["points"]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", POINTS)
def test_what_check_passes_the_compiler_takes(outcomes, name, chip):
    found = outcomes[chip][name]
    assert "refused" not in found, f"check() passed it, the compiler: {found['refused']}"
    if "violation" not in found:
        assert found["vmem_bytes"] <= found["estimated_bytes"]
        assert found["vmem_bytes"] <= found["vmem_limit_bytes"]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", POINTS)
def test_each_operand_is_read_once_and_each_result_written_once(outcomes, name, chip):
    found = outcomes[chip][name]
    if found.get("dense"):
        moved = found["moved_bytes"] / found["floor_bytes"]
        assert 0.99 < moved < 1.3
        assert found["moves"] == []


def test_a_longer_sequence_takes_no_more_code_or_vmem(found):
    short, long = found["lengths"]
    assert LENGTHS[1] == 64 * LENGTHS[0]
    assert long == short
    assert short["bundles"] > 1000 and short["vmem_bytes"] > 1 << 20


@pytest.mark.parametrize("name", POINTS)
def test_check_refuses_no_point_everywhere_and_only_for_vmem(outcomes, name):
    violations = [found[name].get("violation") for found in outcomes.values()]
    assert set(violations) <= {None, "vmem"}
    assert None in violations


def test_a_limit_above_what_a_chip_grants_is_refused(outcomes):
    granted = {chip.name for chip in CHIPS.values() if chip.usable_vmem_bytes >= 64 << 20}
    passed = {chip for chip in CHIPS if "violation" not in outcomes[chip]["a raised limit"]}
    assert passed == granted and len(passed) < len(CHIPS)
