"""Plans of emission: their products, their counts, and that no unsafe one passes."""

from __future__ import annotations

import collections
import itertools
import random

import numpy as np
import pytest

from kdagen.emission import (
    INVERSE,
    ORDERS,
    RECURRENCE,
    RELATIONS,
    EmissionError,
    Plan,
    inverse_products,
    plan,
    prove,
    relation_tiles,
)
from kdagen.kernels import lockstep
from kdagen.kernels.tiling import LANES, side_by_side

FACTORISATIONS = (("bounded", 16), ("bounded", 32), ("unbounded", 8))
CHUNKS = (32, 64, 128)

SPACE = {
    "chunk": CHUNKS,
    "heads": (1, 2, 3, 4, 5, 8, 11, 16, 32),
    "chunks": (1, 2, 3, 4, 8, 16),
    "factorisation": FACTORISATIONS,
    "inverse_block": (2, 4, 8),
    "recurrence_span": (1, 2, 4, 7, 12, 40),
    "inverse_span": (1, 2, 3, 12),
    "relation_span": (0, 1, 5, 9, 30),
    "lag": (0, 1, 2, 7),
    "order": tuple(ORDERS),
}


def sample(count: int, seed: int, most_items: int = 64) -> list[dict]:
    """Arguments of ``plan`` whose chunk-heads fill the lanes."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        point = {name: rng.choice(values) for name, values in SPACE.items()}
        items = point["heads"] * point["chunks"]
        if items <= most_items and items * point["chunk"] % LANES == 0:
            decay, sub_block = point.pop("factorisation")
            found.append(point | {"decay": decay, "sub_block": sub_block})
    return found


def entries(made: Plan) -> list[tuple[str, int]]:
    """Stage and item of every segment, in the order of emission."""
    return [(stage, item) for slot in made.slots for stage, items in slot for item in items]


def is_safe(order: list[tuple[str, int]], heads: int, chunk: int) -> bool:
    """Runs the segments with the scratch they touch: does every read see what it should?

    A recurrence reads its hand-over in its first three segments, and its states in the first; its
    fourth writes them. From their third segment on, relations overwrite the hand-over of
    their pack.
    """
    done: collections.Counter = collections.Counter()
    overwritten, advanced = set(), collections.Counter()
    together = side_by_side(heads, chunk)
    groups = heads // together
    for stage, item in order:
        segment = done[stage, item]
        done[stage, item] += 1
        if stage == RELATIONS and segment >= 2:
            overwritten.add(item)
        if stage == RECURRENCE:
            if segment <= 2 and item * together * chunk // LANES in overwritten:
                return False
            if segment == 0 and advanced[item % groups] != item // groups:
                return False
            if segment == 3:
                advanced[item % groups] += 1
    return True


@pytest.mark.parametrize(("decay", "sub_block"), FACTORISATIONS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_tiles_cover_the_lower_triangle_once(decay, sub_block, chunk):
    covered = np.zeros((chunk, chunk), int)
    for tile in relation_tiles(decay, chunk, sub_block):
        lanes = np.zeros(chunk, int)
        for job in tile:
            covered[job.row : job.row + job.rows, job.lane : job.lane + job.lanes] += 1
            assert 0 <= job.source <= chunk - job.lanes
            lanes[job.source : job.source + job.lanes] += 1
        assert lanes.max() <= 1, "two jobs of one product share a lane"
    assert (np.tril(covered) == np.tri(chunk, dtype=int)).all()
    assert covered.max() == 1


@pytest.mark.parametrize(("decay", "sub_block"), FACTORISATIONS)
def test_a_reference_row_lies_where_the_factorisation_allows(decay, sub_block):
    """Unbounded: columns of a diagonal block are met by no row outside of it; the pair's right half
    meets its left half across the boundary between them."""
    for job in itertools.chain(*relation_tiles(decay, 128, sub_block)):
        first_row, last_lane = job.row, job.lane + job.lanes
        if job.kind == "early":
            assert last_lane == first_row
        else:
            assert last_lane == job.row + job.rows


def test_every_plan_is_safe_and_complete():
    for arguments in sample(700, seed=1):
        made = plan(**arguments)
        heads, chunk = arguments["heads"], arguments["chunk"]
        prove(made, heads=heads, chunk=chunk)
        order = entries(made)
        assert is_safe(order, heads, chunk), arguments
        items = heads * arguments["chunks"]
        packs = items * chunk // LANES
        groups = items // side_by_side(heads, chunk)
        expected = {(RECURRENCE, group): 4 for group in range(groups)}
        expected |= {(RELATIONS, pack): 4 for pack in range(packs)}
        products = inverse_products(chunk, arguments["inverse_block"])
        expected |= {(INVERSE, pack): products + 1 for pack in range(packs)}
        assert collections.Counter(order) == expected, arguments


@pytest.mark.parametrize(
    ("streams", "chunk", "together"), [(1, 64, 1), (3, 64, 1), (8, 64, 2), (6, 32, 2), (5, 128, 1)]
)
def test_streams_of_a_pack_advance_together(streams, chunk, together):
    """Unless the pack also holds another chunk of theirs, which waits for them."""
    assert side_by_side(streams, chunk) == together
    made = plan(
        chunk=chunk, heads=streams, chunks=4, decay="bounded", sub_block=32, inverse_block=8,
        recurrence_span=4, inverse_span=2, relation_span=5, lag=0, order="rir",
    )  # fmt: skip
    groups = {item for stage, item in entries(made) if stage == RECURRENCE}
    assert groups == set(range(4 * streams // together))


def test_orders_say_who_goes_first():
    arguments = sample(1, seed=2)[0] | {"heads": 8, "chunks": 1, "chunk": 64}
    for order, stages in ORDERS.items():
        made = plan(**arguments | {"order": order})
        full = [slot for slot in made.slots if {stage for stage, _ in slot} == set(stages)]
        assert full
        if order == "mix":
            assert any(len(slot) > len(stages) for slot in full)
        else:
            assert all([stage for stage, _ in slot] == list(stages) for slot in full)


def test_a_mutated_plan_passes_only_if_it_is_safe():
    rng = random.Random(3)
    caught = passed = 0
    for arguments in sample(60, seed=4, most_items=16):
        heads, chunk = arguments["heads"], arguments["chunk"]
        order = entries(plan(**arguments))
        for _ in range(12):
            changed = list(order)
            i, j = rng.sample(range(len(changed)), 2)
            changed[i], changed[j] = changed[j], changed[i]
            mutated = Plan(tuple(((stage, (item,)),) for stage, item in changed), ())
            if is_safe(changed, heads, chunk):
                prove(mutated, heads=heads, chunk=chunk)
                passed += 1
            else:
                with pytest.raises(EmissionError, match=r"overwrite|before"):
                    prove(mutated, heads=heads, chunk=chunk)
                caught += 1
    assert caught > 100 and passed > 100


def test_each_hazard_is_named():
    made = plan(
        chunk=64, heads=2, chunks=2, decay="bounded", sub_block=32, inverse_block=8,
        recurrence_span=4, inverse_span=2, relation_span=5, lag=0, order="rir",
    )  # fmt: skip
    relations_first = sorted(entries(made), key=lambda entry: entry[0] != RELATIONS)
    backwards = sorted(entries(made), key=lambda entry: (entry[0] != RECURRENCE, -entry[1]))
    for order, message in (
        (relations_first, r"pack 0 overwrite .* group 0"),
        (backwards, r"group 1 .* before group 0"),
    ):
        slots = tuple(((stage, (item,)),) for stage, item in order)
        with pytest.raises(EmissionError, match=message):
            prove(Plan(slots, made.tiles), heads=2, chunk=64)


def counting(log: list, name: str, products: int):
    def stage(item):
        for i in range(products):
            log.append((name, item, i))
            yield

    return stage


def test_lockstep_advances_in_the_order_of_the_slots():
    log: list = []
    slots = ((("a", (0, 1)), ("b", (0,))), (("a", (1, 0)),), (("a", (0, 1)), ("b", (0,))))
    lockstep.run(slots, {"a": counting(log, "a", 2), "b": counting(log, "b", 1)})
    assert log == [("a", 0, 0), ("a", 1, 0), ("b", 0, 0), ("a", 1, 1), ("a", 0, 1)]


@pytest.mark.parametrize(("products", "message"), [(1, "too long"), (3, "too short")])
def test_lockstep_holds_a_stage_to_its_plan(products, message):
    slots = ((("a", (0,)),),) * 3
    with pytest.raises(AssertionError, match=message):
        lockstep.run(slots, {"a": counting([], "a", products)})
