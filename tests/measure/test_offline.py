"""The modelled time of a candidate, from schedules written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kdagen.chips import get_chip
from kdagen.compiler.bundles import parse_listing
from kdagen.compiler.schedule import Schedule
from kdagen.compiler.slots import SlotTable
from kdagen.measure import offline

PLAIN = "  0 : { %s1_s1 = smov 0 }\n  0x1 : { %s2_s2 = smov 0 }\n"
WAITING = "  0 : { %9 = dma.done.wait [#allocation3], 8 }\n  0x1 : { %s2_s2 = smov 0 }\n"


def schedule_of(text: str) -> Schedule:
    listing = replace(parse_listing(text), name="reduce_fusion", opcode="fusion")
    slots = SlotTable(("SALU",), (2,), ((1,), (1,)))
    return Schedule(get_chip("v4"), listing, slots, slots, (1, 1), 0, 16 << 20)


def test_an_operation_beside_the_kernel_takes_its_time() -> None:
    assert offline._seconds_around(schedule_of(PLAIN)) > 0


def test_one_that_waits_for_the_other_core_is_left_out() -> None:
    waiting = schedule_of(WAITING)
    with pytest.raises(offline.WalkError, match="nothing starts"):
        waiting.walk()
    assert offline._seconds_around(waiting) == 0
