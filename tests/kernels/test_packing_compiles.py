"""Kernels of packed sequences, long ones and with states, compiled by the TPU's compiler."""

from pathlib import Path

import pytest

from tests.children import written_by
from tests.kernels.packed_points import KERNELS, POINTS

PROGRAM = Path(__file__).parent / "packed_points.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Per kernel and point what ``packed_points`` found, in a process of its own."""
    return written_by(PROGRAM, tmp_path_factory, 500)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", POINTS)
def test_the_compiler_takes_packed_tokens_in_the_memory_that_was_estimated(outcomes, kernel, name):
    found = outcomes[kernel][name]
    assert "refused" not in found, f"check() passed it, the compiler: {found['refused']}"
    assert found["vmem_bytes"] <= found["estimated_bytes"]
    assert found["vmem_bytes"] <= found["vmem_limit_bytes"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_smallest_memory_is_that_of_a_chip(outcomes, kernel):
    assert outcomes[kernel]["states, in 16 MiB"]["vmem_limit_bytes"] == 16 << 20


def test_windows_that_are_cleared_are_copies(outcomes):
    """XLA puts small tensors in VMEM as a whole, where a window would be the tensor itself."""
    found = outcomes["in_vmem"]
    assert found == {"kda_forward": [False] * 4, "kda_backward": [False] * 5}
