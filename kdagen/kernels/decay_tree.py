"""Relations of a chunk under their decay, as a tree of products.

For rows t and columns j < t of a chunk the decay 2^(G_t - G_j) is split at the boundary in the
middle of the smallest aligned block that holds both: rows of right halves carry 2^(sum from the
boundary to t), rows of left halves 2^(sum from j + 1 to the boundary). Both are sums of what lies
between the two, at most 0, so no factor overflows whatever the gate, and each pair meets at exactly
one level. The tree ends at single rows or, sooner, at base blocks: pairs within one of those share
a reference, the mean of its two middle rows, and the caller sees to it that gates stay in range.

Every level is one product for a pack of chunk-heads side by side along the lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kdagen.kernels.gate_gradients import parts
from kdagen.kernels.lanes import (
    BF16,
    F32,
    NT,
    choose,
    dot,
    index,
    quotient,
    remainder,
    rows,
    same_block,
    stack,
)
from kdagen.kernels.relations import rights, spread
from kdagen.kernels.tiling import LANES, SUBLANES


@dataclass(frozen=True)
class Level:
    """Which pairs of rows a product relates.

    Attributes:
      chunk: rows of a chunk.
      block: pairs lie in one aligned block of so many rows.
      base: all pairs t > j of the block; else t in its right half and j in its left.
    """

    chunk: int
    block: int
    base: bool = False

    @property
    def half(self) -> int:
        return self.block // 2

    @property
    def height(self) -> int:
        """Rows t of the product."""
        return self.chunk if self.base else self.chunk // 2

    def compact(self, x: jax.Array) -> jax.Array:
        """[height, ...]: the rows t of x [C, ...], in the order of the product."""
        return x if self.base else rights(x, self.half)

    def natural(self, x: jax.Array) -> jax.Array:
        """[C, ...]: rows of ``compact`` in their places; anything in the others."""
        return x if self.base else spread(x, self.half)

    def pairs(self, lanes: int, *, diagonal: bool = False) -> jax.Array:
        """Where in [C, lanes] the pair (row, lane % chunk) is of this level.

        The diagonal is of the base where it is asked for.
        """
        shape = (self.chunk, lanes)
        row, column = index(shape, 0), remainder(index(shape, 1), self.chunk)
        own = same_block(row, column, self.block)
        if self.base:
            return own & (row >= column if diagonal else row > column)
        right = remainder(row, self.block) >= self.half
        return own & right & (remainder(column, self.block) < self.half)


def levels(chunk: int, base: int) -> tuple[Level, ...]:
    """From the whole chunk down to single rows (base 1), or to base blocks, which come last."""
    sizes = []
    size = chunk
    while size > base:
        sizes.append(size)
        size //= 2
    tree = tuple(Level(chunk, size) for size in sizes)
    return tree if base == 1 else (*tree, Level(chunk, base, base=True))


class Decays:
    """The factors of every level for one chunk-head, all [C, K] f32.

    Attributes:
      levels: of the tree.
      left, right: per level, by which rows t and rows j are multiplied; one array for both but in
        the base, since no row is both in a right and in a left half.
      from_start, to_end: 2^(sum from the chunk's start to t), 2^(sum from j + 1 to its end).
      total: [1, K] f32, log2 decay of the chunk.
    """

    def __init__(self, sums: Sequence[jax.Array], base: int):
        """sums: those of the decay, by ``sums``."""
        before, after, *inner = sums
        chunk = before.shape[0]
        self.levels = levels(chunk, base)
        self.left: list[jax.Array] = []
        self.right: list[jax.Array] = []
        size = max(base, SUBLANES)
        cut = [rows(before, i, size) for i in range(0, chunk, size)]
        ends = [rows(after, i, size) for i in range(0, chunk, size)]
        if base > 1:
            middle = [0.5 * (rows(c, base // 2 - 1, 1) + rows(c, base // 2, 1)) for c in cut]
            offset = stack([c - m for c, m in zip(cut, middle, strict=True)])
            self._add(jnp.exp2(offset), jnp.exp2(-offset))
        for exponent in inner:
            self._add(jnp.exp2(exponent))
        while size < chunk:
            blocks = range(0, len(cut), 2)
            exponent = stack([x for i in blocks for x in (ends[i], cut[i + 1])])
            self._add(jnp.exp2(exponent))
            merged_cut, merged_ends = [], []
            for i in blocks:
                first, second = rows(cut[i], size - 1, 1), rows(cut[i + 1], size - 1, 1)
                merged_cut.append(stack([cut[i], cut[i + 1] + first]))
                merged_ends.append(stack([ends[i] + second, ends[i + 1]]))
            cut, ends = merged_cut, merged_ends
            size *= 2
        self.total = rows(cut[0], chunk - 1, 1)
        self.from_start, self.to_end = jnp.exp2(cut[0]), jnp.exp2(ends[0])

    def _add(self, left: jax.Array, right: jax.Array | None = None) -> None:
        """Factors of the next level, from the last up."""
        self.left.insert(0, left)
        self.right.insert(0, left if right is None else right)


def sums(decay: jax.Array, base: int, dtype: DTypeLike = BF16) -> list[jax.Array]:
    """Sums of ``decay`` [C, K] over rows, one product for all of them, each [C, K] f32.

    ``decay`` is that of each token by itself, log2, at most 0. First come two sums within blocks of
    ``base`` rows, of eight at least: from the start of the block to the row, and from the row,
    which is left out, to its end. Then, for each half-block of 1, 2 and 4 rows from ``base`` on,
    from the boundary in the middle of the row's block of two halves to the row, or from the row,
    which is left out, to that boundary. For
    a product in bf16 an f32 operand is split in two bf16 parts.
    """
    chunk = decay.shape[0]
    block = max(base, SUBLANES)
    halves = [half for half in (1, 2, 4) if half >= base]
    split = 1 if dtype == F32 else 2
    shape = (chunk, split * chunk)
    row, column = index(shape, 0), remainder(index(shape, 1), chunk)
    inside = same_block(row, column, block)
    reached = [inside & (column <= row), inside & (column > row)]
    for half in halves:
        right = remainder(quotient(row, half), 2) == 1
        between = (right & (column <= row)) | (~right & (column > row))
        reached.append(same_block(row, column, half) & between)
    ones = stack([x.astype(F32) for x in reached])
    found = dot(ones, parts(decay, split), dtype=dtype)
    return [rows(found, i * chunk, chunk) for i in range(len(reached))]


@dataclass
class Operands:
    """Both sides of the products of one pack, per level.

    Attributes:
      left: per chunk-head, rows t of the decayed queries above those of the keys, [2 height, K].
      right: decayed keys, chunk-heads one below the other, [128, K]; rows that are no row j of the
        level hold anything finite.
    """

    left: list[list[jax.Array]]
    right: list[jax.Array]


def operands(
    queries: Sequence[jax.Array],
    keys: Sequence[jax.Array],
    decays: Sequence[Decays],
    dtype: DTypeLike,
) -> Operands:
    """Operands of a pack from its queries and keys, each [C, K] f32."""
    made = Operands([], [])
    for i, level in enumerate(decays[0].levels):
        lefts, columns = [], []
        for query, key, decay in zip(queries, keys, decays, strict=True):
            column = key * decay.right[i]
            row = key * decay.left[i] if level.base else column
            both = [level.compact(query * decay.left[i]), level.compact(row)]
            lefts.append(stack(both).astype(dtype))
            columns.append(column)
        made.left.append(lefts)
        made.right.append(stack(columns).astype(dtype))
    return made


def products(given: Operands, dtype: DTypeLike) -> list[jax.Array]:
    """Of the two sides of each level, chunk-heads one below the other, [2 height, 128] f32 each."""
    return [
        dot(stack(left), right, NT, dtype)
        for left, right in zip(given.left, given.right, strict=True)
    ]


def assemble(made: Sequence[jax.Array], tree: Sequence[Level]) -> tuple[jax.Array, jax.Array]:
    """Q and N of a pack from its products, both [C, 128] f32, chunk-heads side by side; 0 on and
    above the diagonal, but Q on that of a base."""
    chunk = tree[0].chunk
    count = LANES // chunk
    found = [jnp.zeros((chunk, LANES), F32)] * 2
    for level, product in zip(tree, made, strict=True):
        height = 2 * level.height
        pieces = [rows(product, x * height, height) for x in range(count)]
        both = choose(pieces, quotient(index((height, LANES), 1), chunk))
        for side in range(2):
            part = rows(both, side * level.height, level.height)
            # entries outside may be infinite: selected away, never multiplied by zero
            mine = level.pairs(LANES, diagonal=side == 0)
            found[side] = jnp.where(mine, level.natural(part), found[side])
    return found[0], found[1]


def has_diagonal(tree: Sequence[Level]) -> bool:
    """Whether ``assemble`` gives the diagonal of Q."""
    return tree[-1].base


def reaching(chunk: int, block: int, split: int, ends: jax.Array | None = None) -> jax.Array:
    """Which terms, in ``split`` parts each, reach the decay of a token s within a base block: those
    of rows t >= s, and beside them those of rows j < s; [C, 2 split C] f32, 0 and 1.

    Only the first kind may cancel. Terms of a segment, whose ``ends`` [1, C] f32 are as in
    ``kdagen.kernels.packing.Segments``, cancel among themselves: before it none is summed, nor its
    rounding.
    """
    shape = (chunk, 2 * split * chunk)
    row, lane = index(shape, 0), index(shape, 1)
    column, last = remainder(lane, chunk), quotient(lane, split * chunk) == 1
    below = (last & (column < row)) | (~last & (column >= row))
    reached = (below & same_block(row, column, block)).astype(F32)
    if ends is None:
        return reached
    end = jnp.transpose(jnp.broadcast_to(ends, (SUBLANES, chunk)))[:, 0:1]
    return jnp.where(column.astype(F32) < end, reached, 0.0)
