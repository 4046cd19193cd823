"""Backward kernels on every chip: compiled by the TPU's compiler, or refused before."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kdagen.chips import CHIPS
from kdagen.compiler.aot import worker_environment
from tests.kernels.backward_points import POINTS

PROGRAM = Path(__file__).parent / "backward_points.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Per chip and point, what ``backward_points.outcome`` found, in a process of its own."""
    folder = tmp_path_factory.mktemp("compiles")
    environment = worker_environment(tmp_path_factory.mktemp("dump"))
    roots = [str(PROGRAM.parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = ":".join(filter(None, roots))
    child = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder / "outcomes.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads((folder / "outcomes.json").read_text())


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
