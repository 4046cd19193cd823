"""In which order the stages of the backward kernel are written down.

As in ``kdagen.emission``, chunk-heads are emitted in lockstep, so that products of different ones
stand side by side. The stages of one grid step are, for the block that leaves,

  corrections  the corrected values, per chunk-head
  recurrence   the cotangent of the state through a chunk, per chunk-head, from the last chunk on
  writes       the gradient of the write strengths, per pack
  gradients    those of queries, keys and gates, per pack

and, for the block before it, which enters,

  relations    decay factors, q k^T and k k^T, per pack
  inverse      (I + N diag(b))^-1, per pack

Each starts where those of the same pack that it reads from have ended, and a recurrence where that
of the chunk after it has; prove() holds a plan to that. What relations and inverse hand over lies
in one of two slots of scratch, by the parity of the grid step, so that the two blocks do not
meet. Plain Python over integers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kdagen.emission import EmissionError, Run, inverse_products
from kdagen.kernels.tiling import LANES

RELATIONS, INVERSE, CORRECTIONS = "relations", "inverse", "corrections"
RECURRENCE, WRITES, GRADIENTS = "recurrence", "writes", "gradients"
BY_ITEM = (CORRECTIONS, RECURRENCE)
ORDERS = {
    "leaving": (RECURRENCE, INVERSE, CORRECTIONS, RELATIONS, WRITES, GRADIENTS),
    "gradients": (RELATIONS, RECURRENCE, GRADIENTS, INVERSE, WRITES, CORRECTIONS),
    "entering": (RELATIONS, INVERSE, CORRECTIONS, RECURRENCE, WRITES, GRADIENTS),
}
"""Which stage goes first within a slot."""

Slots = tuple[tuple[Run, ...], ...]


@dataclass(frozen=True)
class Shape:
    """What a plan depends on.

    Attributes:
      chunk: tokens of a chunk.
      streams, chunks: of a program and grid step.
      base: rows of the base blocks of the decay tree.
      inverse_block: rows of the blocks that are inverted first; 0 where the inverse is read.
      corrected: whether corrected values are formed again, rather than read.
      stages: the stages that the wanted gradients need.
    """

    chunk: int
    streams: int
    chunks: int
    base: int
    inverse_block: int
    corrected: bool
    stages: Collection[str]

    @property
    def per_pack(self) -> int:
        return LANES // self.chunk

    @property
    def packs(self) -> int:
        return self.streams * self.chunks // self.per_pack

    def segments(self, stage: str) -> int:
        """Segments of one item of a stage: its yields, and what follows the last."""
        if stage == INVERSE:
            return 1 + (
                inverse_products(self.chunk, self.inverse_block) if self.inverse_block else 1
            )
        if stage == CORRECTIONS:
            return 1 + (2 if self.corrected else 1)
        return (
            1
            + {
                RELATIONS: 4,
                RECURRENCE: 5,
                WRITES: 1,
                GRADIENTS: 5,
            }[stage]
        )

    def items(self, pack: int) -> range:
        """The chunk-heads of a pack."""
        return range(pack * self.per_pack, (pack + 1) * self.per_pack)


def plan(shape: Shape, span: int, lag: int, order: str) -> Slots:
    """Lays out one grid step.

    Packs of the leaving block start spread over ``span`` slots, the last chunks first, and those of
    the entering block ``lag`` slots later. ``order`` is one of ``ORDERS``.

    Raises:
      EmissionError: ``prove`` found a hazard after all.
    """
    starts: dict[tuple[str, int], int] = {}
    ends: dict[tuple[str, int], int] = {}

    def begin(stage: str, item: int, at: int) -> None:
        if stage in shape.stages:
            starts[stage, item] = at
            ends[stage, item] = at + shape.segments(stage)

    last_first = list(reversed(range(shape.packs)))
    first = {pack: place * span // shape.packs for place, pack in enumerate(last_first)}
    for item in reversed(range(shape.streams * shape.chunks)):
        start = first[item // shape.per_pack]
        begin(CORRECTIONS, item, start)
        begin(RECURRENCE, item, max(start, ends.get((RECURRENCE, item + shape.streams), 0)))
    for pack in last_first:
        ready = max(ends.get((s, i), 0) for s in BY_ITEM for i in shape.items(pack))
        begin(WRITES, pack, ready)
        begin(GRADIENTS, pack, ready)
        begin(RELATIONS, pack, first[pack] + lag)
        begin(INVERSE, pack, ends[RELATIONS, pack])
    slots = []
    for slot in range(max(ends.values())):
        active = {
            stage: tuple(
                item for (s, item), at in sorted(starts.items())
                if s == stage and at <= slot < ends[s, item]
            )
            for stage in ORDERS[order]
        }  # fmt: skip
        slots.append(tuple((stage, items) for stage, items in active.items() if items))
    result = tuple(slots)
    prove(result, shape)
    return result


def prove(slots: Slots, shape: Shape) -> None:
    """Holds a plan to its dependencies, from nothing but the order of its entries.

    Raises:
      EmissionError: a stage reads what another has yet to make.
    """
    places: dict[tuple[str, int], list[int]] = {}
    for where, entry in enumerate((s, i) for slot in slots for s, items in slot for i in items):
        places.setdefault(entry, []).append(where)
    for (stage, item), found in places.items():
        items = range(item, item + 1) if stage in BY_ITEM else shape.items(item)
        pack = items[0] // shape.per_pack
        leaving = [(s, i) for s in BY_ITEM for i in items]
        before = {
            CORRECTIONS: [],
            RECURRENCE: [(RECURRENCE, item + shape.streams)],
            WRITES: leaving,
            GRADIENTS: leaving,
            RELATIONS: [],
            INVERSE: [(RELATIONS, pack)],
        }[stage]
        for entry in before:
            if entry in places and places[entry][-1] > found[0]:
                raise EmissionError(
                    f"{stage} of item {item} begins before {entry[0]} of item {entry[1]} has ended"
                )
