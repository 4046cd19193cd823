"""Relations within a chunk: q k^T and k k^T under the decay between their rows.

For rows t and columns j of one chunk, with G the cumulative log2 decay,

  Q[t, j] = sum_c q[t, c] k[j, c] 2^(G[t, c] - G[j, c])    (j <= t)
  N[t, j] = sum_c k[t, c] k[j, c] 2^(G[t, c] - G[j, c])    (j < t)

2^(G_t - G_j) is split in two factors so that the sum over channels is a matrix product. Where it is
split is the factorisation:

``Bounded``    at the middle row of the sub-block that holds t. Both factors stay finite only if the
               gate has a lower bound: 16 rows of -5 are 2^-115.
``Unbounded``  at boundaries between j and t: sums from the boundary to t, and from j + 1 to the
               boundary, both at most 0. Inside an 8-row half, where there is no boundary left, at
               the mean of its two middle rows, with the decay of one token floored (see ``gates``).
``Tree``       at boundaries between j and t always, down to single rows: exact for every decay, at
               a product for every doubling of the block.

Sums are always accumulated from the nearer boundary; G over a whole chunk is never formed.
Chunk-heads stand side by side along the lanes: a pack of 128/C of them shares every product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

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
from kdagen.kernels.tiling import LANES, SUBLANES, Job

Tiles = Sequence[Sequence[Job]]
"""The products of the relations: each a list of blocks that share it."""


@dataclass
class Factors:
    """What one chunk-head hands on, all f32.

    Attributes:
      query_decayed, key_decayed: [C, K], rows times 2^(sum from the chunk's start to t).
      key_to_end: [C, K], rows times 2^(sum from j + 1 to the chunk's end).
      total: [1, K], log2 decay of the whole chunk.
    """

    query_decayed: jax.Array
    key_decayed: jax.Array
    key_to_end: jax.Array
    total: jax.Array


def _scaled(x: jax.Array, exponent: jax.Array | None) -> jax.Array:
    return x if exponent is None else x * jnp.exp2(exponent)


def _plus(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    return b if a is None else a if b is None else a + b


class Split:
    """A chunk-head cut into blocks of rows, and what of it reaches across their boundaries.

    Attributes:
      size, blocks: rows of a block, and their number.
      total: per block, its log2 decay [1, K].
      key_end: [C, K] f32, keys times 2^(sum from j + 1 to the end of their block).
      query_rows, key_rows: [C, K] f32, rows times 2^(sum from their block's start to t, less
        ``base``).
      base: per block, an exponent [1, K], or None for 0.
    """

    size: int
    blocks: int
    total: list[jax.Array]
    key_end: jax.Array
    query_rows: jax.Array
    key_rows: jax.Array
    base: list[jax.Array | None]

    def block(self, x: jax.Array, i: int) -> jax.Array:
        return rows(x, i * self.size, self.size)

    def earlier(self, i: int) -> list[jax.Array]:
        """Columns of all blocks before block i, decayed up to the base of its rows."""
        pieces: list[jax.Array] = []
        between = self.base[i]
        for j in range(i - 1, -1, -1):
            pieces.insert(0, _scaled(self.block(self.key_end, j), between))
            between = _plus(between, self.total[j])
        return pieces

    def chunk_factors(self, scale: float) -> Factors:
        """What the recurrence takes, from the chunk's start and to its end; queries scaled."""
        before: jax.Array | None = None
        queries, keys = [], []
        for i in range(self.blocks):
            exponent = _plus(before, self.base[i])
            factor = scale if exponent is None else jnp.exp2(exponent) * scale
            queries.append(self.block(self.query_rows, i) * factor)
            keys.append(_scaled(self.block(self.key_rows, i), exponent))
            before = _plus(before, self.total[i])
        after: jax.Array | None = None
        ends: list[jax.Array] = []
        for j in range(self.blocks - 1, -1, -1):
            ends.insert(0, _scaled(self.block(self.key_end, j), after))
            after = _plus(after, self.total[j])
        assert before is not None
        return Factors(stack(queries), stack(keys), stack(ends), before)


class Bounded(Split):
    """Split at the middle row of the sub-block that holds t."""

    def __init__(self, query: jax.Array, key: jax.Array, sums: jax.Array, sub_block: int):
        """query, key, sums: [C, K] f32; sums run from the start of each sub-block, log2."""
        self.size, self.blocks = sub_block, query.shape[0] // sub_block
        cut = [self.block(sums, i) for i in range(self.blocks)]
        middle = [rows(c, sub_block // 2 - 1, 1) for c in cut]
        self.base = list(middle)
        self.total = [rows(c, sub_block - 1, 1) for c in cut]
        offset = stack([c - m for c, m in zip(cut, middle, strict=True)])
        grow = jnp.exp2(offset)
        self.query_rows, self.key_rows = query * grow, key * grow
        self.column = key * jnp.exp2(-offset)
        # two factors of at most 2^115 either way; their product by itself might be flushed to zero
        # where what it scales is large
        ends = [
            self.block(self.column, i) * jnp.exp2(self.total[i] - middle[i])
            for i in range(self.blocks)
        ]
        self.key_end = stack(ends)

    def left_side(self, job: Job) -> list[jax.Array]:
        """Rows of the queries, then of the keys."""
        return [self.block(self.query_rows, job.index), self.block(self.key_rows, job.index)]

    def right_side(self, job: Job) -> list[jax.Array]:
        """Columns that the rows of the job meet, as rows."""
        return [*self.earlier(job.index), self.block(self.column, job.index)]


class Unbounded(Split):
    """Split at boundaries between the two rows: of pairs of halves, of halves, and inside a half.

    The blocks of ``Split`` are the pairs.
    """

    def __init__(self, query: jax.Array, key: jax.Array, sums: jax.Array, sub_block: int):
        """query, key, sums: [C, K] f32; sums run from the start of each half (sub_block rows)."""
        self.half = half = sub_block
        self.size, self.blocks = 2 * half, query.shape[0] // (2 * half)
        halves = range(2 * self.blocks)
        lefts = [r for r in halves if r % 2 == 0]
        cut = [rows(sums, r * half, half) for r in halves]
        total = [rows(c, half - 1, 1) for c in cut]
        reference = [0.5 * (rows(c, half // 2 - 1, 1) + rows(c, half // 2, 1)) for c in cut]
        # factors towards each boundary have an exp2 of their own: derived from one another they
        # would be flushed to zero wherever gates of one channel are slow and of another fast
        offset = stack([c - m for c, m in zip(cut, reference, strict=True)])
        grow = jnp.exp2(offset)
        self.query, self.key = query * grow, key * grow
        self.column = key * jnp.exp2(-offset)
        from_start = jnp.exp2(
            stack([cut[r] if r in lefts else cut[r] + total[r - 1] for r in halves])
        )
        self.query_rows, self.key_rows = query * from_start, key * from_start
        self.base = [None] * self.blocks
        to_end = [total[r] - cut[r] + (total[r + 1] if r in lefts else 0.0) for r in halves]
        self.key_end = key * jnp.exp2(stack(to_end))
        to_right = stack([total[r] - cut[r] + reference[r + 1] for r in lefts])
        self.key_right = stack([rows(key, r * half, half) for r in lefts]) * jnp.exp2(to_right)
        self.total = [total[r] + total[r + 1] for r in lefts]

    def left_side(self, job: Job) -> list[jax.Array]:
        """Rows of the queries, then of the keys."""
        if job.kind == "early":
            return [self.block(self.query_rows, job.index), self.block(self.key_rows, job.index)]
        return [rows(self.query, job.row, self.half), rows(self.key, job.row, self.half)]

    def right_side(self, job: Job) -> list[jax.Array]:
        """Columns that the rows of the job meet, as rows."""
        if job.kind == "early":
            return self.earlier(job.index)
        own = rows(self.column, job.row, self.half)
        if job.kind == "left":
            return [own]
        return [rows(self.key_right, job.index * self.half, self.half), own]


class Tree:
    """Split at the boundary in the middle of the smallest aligned block that holds both rows.

    At the level of half-blocks of h rows, h = 1, 2, 4 ... C/2, rows of right halves carry 2^(sum
    from the boundary to t), columns of left halves 2^(sum from j + 1 to the boundary). Each pair
    j < t meets at one level. Every sum is of what lies between the rows, so the decay of a token
    needs no floor, and an error of a sum is relative to the sum.

    Attributes:
      diagonal: [C, 1] f32, the sum over channels of q_t k_t, for ``assemble``.
    """

    def __init__(self, query: jax.Array, key: jax.Array, decay: jax.Array):
        """query, key: [C, K] f32; decay: [C, K] f32, of each token by itself, log2, at most 0."""
        self.diagonal = jnp.sum(query * key, axis=1, keepdims=True)
        self._query, self._key = query, key
        self._rows: dict[int, list[jax.Array]] = {}
        self._columns: dict[int, jax.Array] = {}
        chunk, half = query.shape[0], 1
        # of each row's block of ``half`` rows: from its start to the row, from the row (which is
        # left out) to its end, and all of it
        before, after, total = decay, jnp.zeros_like(decay), decay
        while half < chunk:
            factor = jnp.exp2(alternate(after, before, half))
            self._columns[half] = column = key * factor
            self._rows[half] = [rights(query * factor, half), rights(column, half)]
            sibling = alternate(_moved(total, -half), _moved(total, half), half)
            before = alternate(before, before + sibling, half)
            after = alternate(after + sibling, after, half)
            total = total + sibling
            half *= 2
        self._before, self._after, self._total = before, after, total

    def left_side(self, job: Job) -> list[jax.Array]:
        """Rows of right halves: of the queries, then of the keys."""
        return self._rows[job.index]

    def right_side(self, job: Job) -> list[jax.Array]:
        """All columns; those of right halves are to be left out of the product."""
        return [self._columns[job.index]]

    def chunk_factors(self, scale: float) -> Factors:
        """What the recurrence takes, from the chunk's start and to its end; queries scaled."""
        from_start = jnp.exp2(self._before)
        return Factors(
            self._query * (from_start * scale),
            self._key * from_start,
            self._key * jnp.exp2(self._after),
            rows(self._total, 0, 1),
        )


def alternate(left: jax.Array, right: jax.Array, half: int) -> jax.Array:
    """Rows of ``left`` in the left halves of blocks of 2 ``half`` rows, of ``right`` in others."""
    if half % SUBLANES:
        grouped = [x.reshape(-1, SUBLANES, x.shape[1]) for x in (left, right)]
        row = jax.lax.broadcasted_iota(jnp.int32, grouped[0].shape, 1)
        chosen = jnp.where(remainder(quotient(row, half), 2) == 1, grouped[1], grouped[0])
        return chosen.reshape(left.shape)
    pieces = range(left.shape[0] // half)
    return stack([rows(right if i % 2 else left, i * half, half) for i in pieces])


def _moved(x: jax.Array, by: int) -> jax.Array:
    """Rows moved down by ``by``, or up: round the whole, or round groups of 8 where ``by`` < 8."""
    if by % SUBLANES:
        grouped = x.reshape(-1, SUBLANES, x.shape[1])
        return pltpu.roll(grouped, jnp.int32(by % SUBLANES), 1).reshape(x.shape)
    cut = -by % x.shape[0]
    return stack([rows(x, cut, x.shape[0] - cut), rows(x, 0, cut)]) if cut else x


def rights(x: jax.Array, half: int) -> jax.Array:
    """[C/2, K]: all rows in right halves. Of the chunk's second half those stay where they are,
    those of its first half fill the gaps; ``spread`` is the way back."""
    middle = x.shape[0] // 2
    first, second = rows(x, 0, middle), rows(x, middle, middle)
    return second if half == middle else alternate(_moved(first, -half), second, half)


def spread(x: jax.Array, half: int) -> jax.Array:
    """[C, L] that has the rows x [C/2, L] of ``rights`` in right halves, and anything in left."""
    return stack([_moved(x, half), x])


def operands(
    factors: Sequence[Bounded | Unbounded | Tree],
    tiles: Tiles,
    chunk: int,
    *,
    dtype: DTypeLike = BF16,
) -> list[tuple[jax.Array, jax.Array]]:
    """Both sides, in ``dtype``, of the ``product`` of every tile of a pack.

    They are made ahead of the products: the MXU takes its work in program order, and a product that
    waits for its operands holds up all that come after it.
    """
    made = []
    for tile in tiles:
        left: list[jax.Array] = []
        right: list[jax.Array] = []
        for x, factor in enumerate(factors):
            used = 0
            for job in tile:
                left += factor.left_side(job)
                right += _gap(job.source - used, left[0].shape[1]) + factor.right_side(job)
                used = job.source + job.lanes
            if x < len(factors) - 1:
                right += _gap(chunk - used, left[0].shape[1])
        made.append((stack(left).astype(dtype), stack(right).astype(dtype)))
    return made


def product(left: jax.Array, right: jax.Array, *, dtype: DTypeLike = BF16) -> jax.Array:
    """left @ right^T of operands in ``dtype``, as wide as a register: [rows, 128] f32."""
    result = dot(left, right, NT, dtype)
    if result.shape[1] == LANES:
        return result
    empty = jnp.zeros((result.shape[0], LANES - result.shape[1]), result.dtype)
    return jnp.concatenate([result, empty], axis=1)


def assemble(
    products: Sequence[jax.Array],
    tiles: Tiles,
    chunk: int,
    *,
    diagonals: Sequence[jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Q and N of a pack, both [C, 128] f32, chunk-heads side by side; zero above the diagonal.

    ``diagonals`` are those of each ``Tree``; another factorisation has none of its own.
    """
    lane, row = index((chunk, LANES), 1), index((chunk, LANES), 0)
    owner, column = quotient(lane, chunk), remainder(lane, chunk)
    count = LANES // chunk
    parts: dict[Job, list[jax.Array]] = {}
    for tile, made in zip(tiles, products, strict=True):
        height = made.shape[0] // count
        at = 0
        for job in tile:
            parts[job] = []
            shift = (job.lane - job.source) % LANES
            for _ in ("query", "key"):
                pieces = [rows(made, x * height + at, job.rows) for x in range(count)]
                mine = choose(pieces, rows(owner, 0, job.rows))
                parts[job].append(pltpu.roll(mine, jnp.int32(shift), 1) if shift else mine)
                at += job.rows
    if diagonals is not None:
        own = choose([jnp.broadcast_to(x, row.shape) for x in diagonals], owner)
        query, key = (_by_level(parts, side, row, column, own) for side in range(2))
    else:
        query, key = (_in_place(parts, side, column) for side in range(2))
    # products above the diagonal may be infinite: selected away, never multiplied by zero
    return jnp.where(row >= column, query, 0.0), jnp.where(row > column, key, 0.0)


def _in_place(parts: dict[Job, list[jax.Array]], side: int, column: jax.Array) -> jax.Array:
    """The parts of Q (side 0) or N (side 1) one below the other, [C, 128] f32."""
    bands = []
    for job in sorted(parts, key=lambda job: job.row):
        if job.kind in ("block", "left"):
            bands.append(parts[job][side])
        elif job.kind == "right":
            bands[-1] = stack([bands[-1], parts[job][side]])
    for job in parts:
        if job.kind == "early":
            band = bands[job.index]
            inside = rows(column, job.row, job.rows) >= job.row
            bands[job.index] = jnp.where(inside, band, parts[job][side])
    return stack(bands)


def _by_level(
    parts: dict[Job, list[jax.Array]],
    side: int,
    row: jax.Array,
    column: jax.Array,
    diagonal: jax.Array,
) -> jax.Array:
    """The levels of Q (side 0) or N (side 1) of a tree together, [C, 128] f32."""
    band = diagonal
    for job in sorted(parts, key=lambda job: job.index):
        # rows and columns of one half-block have met at a smaller one
        met = same_block(row, column, job.index)
        band = jnp.where(met, band, spread(parts[job][side], job.index))
    return band


def _gap(count: int, width: int) -> list[jax.Array]:
    return [jnp.zeros((count, width), F32)] if count else []
