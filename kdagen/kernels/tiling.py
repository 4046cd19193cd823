"""How relation blocks lie in matrix products. Plain Python, so that plans need no JAX."""

from __future__ import annotations

import math
from dataclasses import dataclass

LANES = 128
"""Lanes of a vector register, and columns of the products that a pack of chunk-heads shares."""

SUBLANES = 8
"""Rows of a vector register."""

BASE_BLOCK = 16
"""Rows of the diagonal blocks whose inverses are laid out side by side along the lanes."""


def side_by_side(streams: int, chunk: int) -> int:
    """Streams whose chunks lie in one pack of chunks of ``chunk`` rows, and advance together.

    Chunks of one stream may share a pack too; those depend on one another.
    """
    return math.gcd(streams, LANES // chunk)


@dataclass(frozen=True)
class Job:
    """One block of relations: rows of a chunk against columns of the same chunk.

    Attributes:
      kind: "block" (bounded: a row block against all columns up to its own); or, unbounded, with
        pairs of halves: "early" (a pair against all earlier pairs), "left" (a left half against
        itself), "right" (a right half against its pair); or, of a tree, "level" (all right halves
        against their left ones).
      index: of the row block or pair; of a level, the rows of its half-blocks.
      row, rows: first row and their number; of a level, the number of rows in right halves.
      source: lane, within the chunk-head's own, at which the product leaves its columns.
      lane, lanes: first lane at which they belong, and their number.
    """

    kind: str
    index: int
    row: int
    rows: int
    source: int
    lane: int
    lanes: int
