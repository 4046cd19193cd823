"""In which order the stages of a pipelined kernel are written down, and whether that order is safe.

The MXU runs a program in its own order, and one head's chain of small dependent products leaves it
idle most of the time. So chunk-heads are emitted in lockstep: each stage of each chunk-head is cut
into segments, and a plan interleaves the segments. Three stages of
different chunks overlap within one grid step ``t``:

  relations   of chunk block t: decay factors, q k^T and k k^T within a chunk
  inverse     of chunk block t - 1: (I + L)^-1
  recurrence  of chunk block t - 2: output and state

They hand over through VMEM scratch with two slots, taken by the parity of the block. Blocks t and
t - 2 share a slot, so what the recurrence reads must be read before the relations overwrite it: a
plan that breaks this computes wrong numbers without any other sign. At either end of a sweep, where
not every stage has a block, a step may be written without the idle ones: what is left of a safe
order is safe.

Everything here is plain Python over integers: it decides legality before anything is traced.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kdagen.errors import KdagenError
from kdagen.kernels.pipeline import INVERSE, RECURRENCE, RELATIONS
from kdagen.kernels.tiling import LANES, Job, side_by_side

ORDERS = {
    "rir": (RECURRENCE, INVERSE, RELATIONS),
    "irr": (INVERSE, RECURRENCE, RELATIONS),
    "mix": (RECURRENCE, INVERSE, RELATIONS),
}
INTERLEAVED = "mix"
"""Which stage goes first within a slot."""

RECURRENCE_PRODUCTS = 3
_LAST_HANDOVER_READ = 2
"""The last segment of a recurrence that reads what the relations wrote two blocks ago."""

RELATION_YIELDS = 3
"""Sums and norms; then operands; then products, and factors for the recurrence; then relations."""
_FIRST_HANDOVER_WRITE = 2
"""The first segment of the relations that writes what a recurrence reads two blocks later."""


class EmissionError(KdagenError, ValueError):
    """A plan that reads a scratch slot after it was overwritten, or a state before it exists."""


def relation_tiles(decay: str, chunk: int, sub_block: int) -> tuple[tuple[Job, ...], ...]:
    """Packs the relation blocks of a chunk into as few 128-lane products as first fit finds.

    A job stays at the lane where its columns belong if that is free, and else fills a hole. Each
    level of a tree is a product of its own.
    """
    if decay == "tree":
        halves = [1 << i for i in range(chunk.bit_length() - 1)]
        return tuple((Job("level", h, 0, chunk // 2, 0, 0, chunk),) for h in reversed(halves))
    wanted = []
    if decay == "bounded":
        for i in range(chunk // sub_block):
            wanted.append(("block", i, i * sub_block, sub_block, 0, (i + 1) * sub_block))
    else:
        pair = 2 * sub_block
        for i in range(chunk // pair):
            if i:
                wanted.append(("early", i, i * pair, pair, 0, i * pair))
            wanted.append(("right", i, i * pair + sub_block, sub_block, i * pair, pair))
            wanted.append(("left", i, i * pair, sub_block, i * pair, sub_block))
    free: list[list[bool]] = []
    tiles: list[list[Job]] = []

    def place(entry, sources, new: bool) -> bool:
        kind, index, row, rows, lane, lanes = entry
        fits = ((t, s) for s in sources for t, f in enumerate(free) if all(f[s : s + lanes]))
        tile, source = next(fits, (len(tiles), lane) if new else (-1, 0))
        if tile < 0:
            return False
        if tile == len(tiles):
            tiles.append([])
            free.append([True] * chunk)
        free[tile][source : source + lanes] = [False] * lanes
        tiles[tile].append(Job(kind, index, row, rows, source, lane, lanes))
        return True

    for width in sorted({entry[-1] for entry in wanted}, reverse=True):
        left = [e for e in wanted if e[-1] == width and not place(e, [e[-2]], new=False)]
        for entry in left:
            place(entry, [entry[-2], *range(0, chunk - width + 1, 8)], new=True)
    return tuple(tuple(sorted(tile, key=lambda job: job.source)) for tile in tiles)


def inverse_products(chunk: int, inverse_block: int) -> int:
    """Dependent matrix products from a chunk's relations to its inverse.

    log2 of the Neumann block of them, then two for each doubling up to the chunk.
    """
    neumann = {2: 0, 4: 2, 8: 3, 16: 4}[inverse_block]
    doublings = (chunk // inverse_block).bit_length() - 1
    return neumann + 2 * doublings


Run = tuple[str, tuple[int, ...]]
"""A stage, and the items of it whose next segments are written one after another."""


@dataclass(frozen=True)
class Plan:
    """The order of emission of one grid step.

    Attributes:
      slots: per slot, stages in their order and the items of each whose next segment is written.
        Items of the recurrence are groups of ``side_by_side`` chunk-heads, these being numbered
        ``chunk_index * heads + head``; of the other two, packs of chunk-heads.
      tiles: the products of the relations, see ``relation_tiles``.
    """

    slots: tuple[tuple[Run, ...], ...]
    tiles: tuple[tuple[Job, ...], ...]


def plan(
    *,
    chunk: int,
    heads: int,
    chunks: int,
    decay: str,
    sub_block: int,
    inverse_block: int,
    recurrence_span: int,
    inverse_span: int,
    relation_span: int,
    lag: int,
    order: str,
) -> Plan:
    """Lays out one grid step and proves it free of hazards.

    The spans say how the items of a stage spread over slots; where that would break a dependency,
    an item starts as much later as it must. See ``kdagen.variant.Variant`` for the arguments.

    Raises:
      EmissionError: ``prove`` found a hazard after all.
    """
    tiles = relation_tiles(decay, chunk, sub_block)
    lanes_per_item = LANES // chunk
    items = heads * chunks
    packs = items // lanes_per_item
    yields = {
        RECURRENCE: RECURRENCE_PRODUCTS,
        INVERSE: inverse_products(chunk, inverse_block),
        RELATIONS: RELATION_YIELDS,
    }
    spans = {RECURRENCE: recurrence_span, RELATIONS: relation_span or recurrence_span}
    # in one slot the relations may come before the recurrence: then they wait a slot longer
    recurrence_last = int(order == INTERLEAVED)
    starts: dict[tuple[str, int], int] = {}
    together = side_by_side(heads, chunk)
    groups, per_pack = heads // together, lanes_per_item // together
    for item in range(items // together):
        # groups of a pack start together, so that their products stand side by side; the next
        # chunk of a head starts when its state has been written
        after = starts[RECURRENCE, item - groups] + RECURRENCE_PRODUCTS if item >= groups else 0
        starts[RECURRENCE, item] = max(item // per_pack * spans[RECURRENCE] // packs, after)
    for pack in range(packs):
        starts[INVERSE, pack] = pack * inverse_span // packs
        read = max(
            starts[RECURRENCE, item] + _LAST_HANDOVER_READ
            for item in range(pack * per_pack, (pack + 1) * per_pack)
        )
        spread = pack * spans[RELATIONS] // packs + lag
        starts[RELATIONS, pack] = max(spread, read - _FIRST_HANDOVER_WRITE + recurrence_last)
    waiting = sorted((start, stage, item) for (stage, item), start in starts.items())
    slots: list[tuple[Run, ...]] = []
    active: dict[str, dict[int, int]] = {stage: {} for stage in ORDERS[order]}
    while waiting or any(active.values()):
        while waiting and waiting[0][0] <= len(slots):
            _, stage, item = waiting.pop(0)
            active[stage][item] = yields[stage] + 1
        slots.append(_laid_out(active, interleaved=order == INTERLEAVED))
        active = {
            stage: {item: left - 1 for item, left in items.items() if left > 1}
            for stage, items in active.items()
        }
    result = Plan(tuple(slots), tiles)
    prove(result, heads=heads, chunk=chunk)
    return result


def _laid_out(active: dict[str, dict[int, int]], *, interleaved: bool) -> tuple[Run, ...]:
    """The segments of one slot: stage after stage, or dealt out so that all last to its end."""
    if not interleaved:
        return tuple((stage, tuple(sorted(items))) for stage, items in active.items() if items)
    dealt = sorted(
        ((i + 0.5) / len(items), rank, stage, item)
        for rank, (stage, items) in enumerate(active.items())
        for i, item in enumerate(sorted(items))
    )
    return tuple(
        (stage, tuple(item for *_, item in run))
        for stage, run in itertools.groupby(dealt, key=lambda entry: entry[2])
    )


def prove(plan: Plan, *, heads: int, chunk: int) -> None:
    """Holds a plan to its dependencies, from nothing but the order of its entries.

    Raises:
      EmissionError: relations overwrite a slot that a recurrence has yet to read, or a chunk reads
        the state of a head before its previous chunk has written it.
    """
    together = side_by_side(heads, chunk)
    groups = heads // together
    position: dict[tuple[str, int], list[int]] = {}
    order = [(stage, item) for slot in plan.slots for stage, items in slot for item in items]
    for where, entry in enumerate(order):
        position.setdefault(entry, []).append(where)
    for (stage, item), places in position.items():
        if stage != RECURRENCE:
            continue
        pack = item * together * chunk // LANES
        if places[_LAST_HANDOVER_READ] > position[RELATIONS, pack][_FIRST_HANDOVER_WRITE]:
            raise EmissionError(
                f"the relations of pack {pack} overwrite what the recurrence of group {item} has "
                "yet to read"
            )
        if item >= groups and position[RECURRENCE, item - groups][-1] > places[0]:
            raise EmissionError(
                f"group {item} reads its states before group {item - groups} has written them"
            )
