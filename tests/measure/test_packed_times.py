"""The modelled time of packed kernels: what it depends on, and that it has to be told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kdagen.compiler.aot import worker_environment
from kdagen.measure import operands
from tests.measure.packed_times import KERNELS, PACKINGS, PLAIN, STATES

PROGRAM = Path(__file__).parent / "packed_times.py"
FULL = [name for name, lengths in PACKINGS.items() if sum(lengths) == PLAIN.tokens]


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict[str, dict[str, dict]]:
    """Per kernel and packing what ``packed_times`` found, in a process of its own."""
    out = tmp_path_factory.mktemp("times") / "figures.json"
    environment = worker_environment(tmp_path_factory.mktemp("dump"))
    roots = [str(PROGRAM.parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = ":".join(filter(None, roots))
    child = subprocess.run(
        [sys.executable, str(PROGRAM), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(out.read_text())


def test_padding_alone_changes_the_time_of_a_call_without_states(figures) -> None:
    found = {name: one["seconds"] for name, one in figures["forward"].items() if "seconds" in one}
    assert found.keys() == PACKINGS.keys()
    (full,) = {found[name] for name in FULL}
    assert 0 < full < found["padding"] < found["all padding"] < 1.1 * full


@pytest.mark.parametrize("kernel", ["forward with states", "backward with states"])
def test_segments_that_begin_and_end_take_time_where_they_have_states(figures, kernel) -> None:
    found = {name: one["seconds"] for name, one in figures[kernel].items() if "seconds" in one}
    assert found.keys() == PACKINGS.keys()
    assert 0 < found["one"] < found["ends of blocks"] < found["within blocks"]
    # segments that are empty are copied, not computed
    assert found["all padding"] < found["padding"] < found["within blocks"]


def test_states_are_moved_once_a_segment(figures) -> None:
    packed, plain = figures["forward with states"], figures["forward"]["one"]
    states = operands.floor_bytes(STATES) - operands.floor_bytes(PLAIN)
    assert states == 2 * len(PACKINGS["one"]) * 2 * 128 * 128 * 4
    for name in PACKINGS:
        assert packed[name]["dma_out_bytes"] - plain["dma_out_bytes"] == states / 2
        assert packed[name]["dma_in_bytes"] - plain["dma_in_bytes"] >= states / 2


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_packing_that_is_not_told_is_an_error(figures, kernel) -> None:
    (message,) = figures[kernel]["nothing told"].values()
    assert message.endswith("a branch depends on data not given")
