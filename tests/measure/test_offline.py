"""The modelled time of a candidate, from schedules written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kdagen.chips import get_chip
from kdagen.compiler.bundles import parse_listing
from kdagen.compiler.schedule import Schedule
from kdagen.compiler.slots import SlotTable
from kdagen.measure import offline, operands
from kdagen.problem import Problem

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


def test_a_shorter_packing_has_as_much_padding() -> None:
    packed = Problem(tokens=64 * 100 + 7, heads=2, segments=(1000, 0, 5000))
    short = offline.shortened(packed, 64)
    missing = offline.missing_blocks(packed, 64)
    assert missing > 0 and short.tokens == packed.tokens - 64 * missing
    padding = packed.tokens - 6000
    assert operands.lengths(short) == [max(short.tokens - padding, 0)]
    full = offline.shortened(replace(packed, segments=5), 64)
    assert operands.lengths(full) == [full.tokens]


@pytest.mark.parametrize("states", ["initial_state", "final_state"])
def test_a_packing_with_states_is_compiled_whole(states: str) -> None:
    packed = Problem(tokens=64 * 100, heads=2, segments=25, **{states: True})
    assert offline.missing_blocks(packed, 64) == 0
    assert offline.shortened(packed, 64) == packed
    whole = replace(packed, segments=None)
    assert offline.shortened(whole, 64).tokens < whole.tokens


def test_a_kernel_is_told_of_the_vectors_that_it_takes() -> None:
    packed = Problem(tokens=200, heads=2, batch=2, segments=3, final_state=True)
    vectors = operands.numbers(packed, 64)
    lengths, table = (f"s32[{len(vector)}]" for vector in vectors)
    operand = (
        "%s{0}_s{0} = inlined_call_operand.smem [shape: {1}, index: {0}, kind: {2}, shape "
        "index: {{}}]"
    )
    text = "  0 : {{ {} }}\n".format(
        " ;; ".join(
            operand.format(index, shape, kind)
            for index, shape, kind in (
                (3, "bf16[8]", "input"),
                (5, lengths, "input"),
                (6, table, "input"),
                (7, lengths, "output"),
            )
        )
    )
    kernel = schedule_of(text)
    assert offline.told(kernel, vectors) == {5: vectors[0], 6: vectors[1]}
    assert offline.told(kernel, vectors[:1]) == {5: vectors[0]}
    assert offline.told(kernel, []) is None
