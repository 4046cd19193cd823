"""The modelled time of packed kernels: what it depends on, and that it has to be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdagen.measure import operands
from tests.children import written_by
from tests.measure.packed_times import KERNELS, PACKINGS, PLAIN, STATES

PROGRAM = Path(__file__).parent / "packed_times.py"
FULL = [name for name, lengths in PACKINGS.items() if sum(lengths) == PLAIN.tokens]


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict[str, dict[str, dict]]:
    """Per kernel and packing what ``packed_times`` found, in a process of its own."""
    return written_by(PROGRAM, tmp_path_factory, 300)


def test_padding_alone_changes_the_time_of_a_call_without_states(figures) -> None:
    found = {name: one["seconds"] for name, one in figures["forward"].items() if "seconds" in one}
    assert found.keys() == PACKINGS.keys()
    (full,) = {found[name] for name in FULL}
    assert 0 < full < found["padding"] < found["all padding"] < 1.1 * full


@pytest.mark.parametrize("kernel", ["forward with states", "backward with states"])
def test_segments_that_begin_and_end_take_time_where_they_have_states(figures, kernel) -> None:
    found = {name: one["seconds"] for name, one in figures[kernel].items() if "seconds" in one}
    assert found.keys() == PACKINGS.keys()
    assert 0 < found["one"] < min(found["ends of blocks"], found["within blocks"])
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
