"""Kernels of packed sequences, long ones and with states, compiled by the TPU's compiler."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kdagen.compiler.aot import worker_environment
from tests.kernels.packed_points import KERNELS, POINTS

PROGRAM = Path(__file__).parent / "packed_points.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Per kernel and point what ``packed_points`` found, in a process of its own."""
    folder = tmp_path_factory.mktemp("compiles")
    environment = worker_environment(tmp_path_factory.mktemp("dump"))
    roots = [str(PROGRAM.parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = ":".join(filter(None, roots))
    child = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder / "outcomes.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads((folder / "outcomes.json").read_text())


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
