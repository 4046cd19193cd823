"""Plans of the backward kernel: every stage once, and nothing read before it is made."""

import dataclasses

import pytest

from kdagen.emission import EmissionError
from kdagen.gradient.plan import ORDERS, RECURRENCE, Shape, plan, prove

SHAPE = Shape(
    chunk=64,
    streams=4,
    chunks=2,
    base=16,
    inverse_block=8,
    corrected=True,
    stages=frozenset(ORDERS["leaving"]),
)


def _entries(slots):
    return [(stage, item) for slot in slots for stage, items in slot for item in items]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("span", "lag"), [(1, 0), (5, 3), (16, 0)])
@pytest.mark.parametrize("chunk", [32, 64, 128])
def test_every_segment_is_planned_once(chunk, span, lag, order):
    shape = dataclasses.replace(SHAPE, chunk=chunk)
    found = _entries(plan(shape, span, lag, order))
    for stage in shape.stages:
        items = range(8) if stage in ("corrections", "recurrence") else range(shape.packs)
        for item in items:
            assert found.count((stage, item)) == shape.segments(stage)


def test_a_recurrence_before_that_of_the_chunk_after_it_is_refused():
    slots = list(plan(SHAPE, 4, 0, "leaving"))
    first = next(i for i, slot in enumerate(slots) if any(s == RECURRENCE for s, _ in slot))
    early = ((RECURRENCE, (0,)),)
    with pytest.raises(EmissionError, match="recurrence of item 0 begins before recurrence"):
        prove((*slots[:first], early, *slots[first:]), SHAPE)


def test_gradients_before_their_recurrence_are_refused():
    slots = plan(SHAPE, 4, 0, "leaving")
    with pytest.raises(EmissionError, match="gradients of item"):
        prove(((("gradients", (0,)),), *slots), SHAPE)
