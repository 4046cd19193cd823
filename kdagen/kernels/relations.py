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

Sums are always accumulated from the nearer boundary; G over a whole chunk is never formed.
Chunk-heads stand side by side along the lanes: a pack of 128/C of them shares every product.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kdagen.kernels.lanes import F32, NT, choose, dot, index, rows, stack
from kdagen.kernels.tiling import LANES, Job


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


def _plus(a: jax.Array | None, b: jax.Array) -> jax.Array:
    return b if a is None else a + b


class Bounded:
    """Factors of one chunk-head, split at the middle row of each sub-block."""

    def __init__(self, query: jax.Array, key: jax.Array, sums: jax.Array, sub_block: int):
        """query, key, sums: [C, K] f32; sums run from the start of each sub-block, log2."""
        self.rows = sub_block
        self.blocks = query.shape[0] // sub_block
        middle = sub_block // 2 - 1
        self.middle = [rows(sums, i * sub_block + middle, 1) for i in range(self.blocks)]
        self.total = [rows(sums, (i + 1) * sub_block - 1, 1) for i in range(self.blocks)]
        offset = stack([self._block(sums, i) - self.middle[i] for i in range(self.blocks)])
        grow = jnp.exp2(offset)
        self.query = query * grow
        self.key = key * grow
        self.column = key * jnp.exp2(-offset)

    def _block(self, x: jax.Array, i: int) -> jax.Array:
        return rows(x, i * self.rows, self.rows)

    def left_side(self, job: Job) -> list[jax.Array]:
        return [self._block(self.query, job.index), self._block(self.key, job.index)]

    def right_side(self, job: Job) -> list[jax.Array]:
        pieces = [self._block(self.column, job.index)]
        between = self.middle[job.index]
        for j in range(job.index - 1, -1, -1):
            pieces.insert(
                0, _scaled(self._block(self.column, j), self.total[j] - self.middle[j] + between)
            )
            between = between + self.total[j]
        return pieces

    def chunk_factors(self) -> Factors:
        before, queries, keys = None, [], []
        for i in range(self.blocks):
            factor = jnp.exp2(_plus(before, self.middle[i]))
            queries.append(self._block(self.query, i) * factor)
            keys.append(self._block(self.key, i) * factor)
            before = _plus(before, self.total[i])
        after, ends = None, []
        for j in range(self.blocks - 1, -1, -1):
            ends.insert(
                0,
                _scaled(self._block(self.column, j), _plus(after, self.total[j] - self.middle[j])),
            )
            after = _plus(after, self.total[j])
        return Factors(stack(queries), stack(keys), stack(ends), before)


class Unbounded:
    """Factors of one chunk-head, split at boundaries between the two rows."""

    def __init__(self, query: jax.Array, key: jax.Array, sums: jax.Array, sub_block: int):
        """query, key, sums: [C, K] f32; sums run from the start of each half (sub_block rows)."""
        self.half = half = sub_block
        self.pairs = query.shape[0] // (2 * half)
        halves = range(2 * self.pairs)
        cut = [rows(sums, r * half, half) for r in halves]
        total = [c[half - 1 : half] for c in cut]
        reference = [
            0.5 * (c[half // 2 - 1 : half // 2] + c[half // 2 : half // 2 + 1]) for c in cut
        ]
        # columns have an exp2 of their own: derived from the row factors they would be flushed
        # to zero wherever gates of one channel are slow and of another fast
        offset = stack([c - m for c, m in zip(cut, reference, strict=True)])
        grow = jnp.exp2(offset)
        self.query, self.key = query * grow, key * grow
        self.column = key * jnp.exp2(-offset)
        from_start = jnp.exp2(
            stack([cut[r] if r % 2 == 0 else cut[r] + total[r - 1] for r in halves])
        )
        self.query_start, self.key_start = query * from_start, key * from_start
        to_end = [total[r] - cut[r] + (total[r + 1] if r % 2 == 0 else 0.0) for r in halves]
        self.key_end = key * jnp.exp2(stack(to_end))
        to_right = [total[r] - cut[r] + reference[r + 1] for r in halves if r % 2 == 0]
        lefts = stack([rows(key, r * half, half) for r in halves if r % 2 == 0])
        self.key_right = lefts * jnp.exp2(stack(to_right))
        self.total = [total[2 * i] + total[2 * i + 1] for i in range(self.pairs)]

    def _pair(self, x: jax.Array, i: int) -> jax.Array:
        return rows(x, 2 * self.half * i, 2 * self.half)

    def _half(self, x: jax.Array, r: int) -> jax.Array:
        return rows(x, self.half * r, self.half)

    def left_side(self, job: Job) -> list[jax.Array]:
        if job.kind == "early":
            return [self._pair(self.query_start, job.index), self._pair(self.key_start, job.index)]
        half = 2 * job.index + (job.kind == "right")
        return [self._half(self.query, half), self._half(self.key, half)]

    def right_side(self, job: Job) -> list[jax.Array]:
        i = job.index
        if job.kind == "left":
            return [self._half(self.column, 2 * i)]
        if job.kind == "right":
            return [self._half(self.key_right, i), self._half(self.column, 2 * i + 1)]
        pieces, between = [], None
        for j in range(i - 1, -1, -1):
            pieces.insert(0, _scaled(self._pair(self.key_end, j), between))
            between = _plus(between, self.total[j])
        return pieces

    def chunk_factors(self) -> Factors:
        before, queries, keys = None, [], []
        for i in range(self.pairs):
            queries.append(_scaled(self._pair(self.query_start, i), before))
            keys.append(_scaled(self._pair(self.key_start, i), before))
            before = _plus(before, self.total[i])
        after, ends = None, []
        for j in range(self.pairs - 1, -1, -1):
            ends.insert(0, _scaled(self._pair(self.key_end, j), after))
            after = _plus(after, self.total[j])
        return Factors(stack(queries), stack(keys), stack(ends), before)


def relate(
    factors: Sequence[Bounded] | Sequence[Unbounded], tiles, chunk: int
) -> Generator[None, None, tuple[jax.Array, jax.Array]]:
    """Q and N of a pack, both [C, 128] f32, chunk-heads side by side; zero above the diagonal.

    Yields after every product; there is one per tile.
    """
    owner = index((chunk, LANES), 1) // chunk
    key_dim = factors[0].key.shape[1]
    parts: dict[tuple[int, str], tuple[jax.Array, jax.Array]] = {}
    for tile in tiles:
        left, right = [], []
        for x, factor in enumerate(factors):
            used = 0
            for job in tile:
                left += factor.left_side(job)
                right += _gap(job.source - used, key_dim) + factor.right_side(job)
                used = job.source + job.lanes
            if x < len(factors) - 1:
                right += _gap(chunk - used, key_dim)
        product = dot(stack(left), stack(right), NT)
        if product.shape[1] < LANES:
            empty = jnp.zeros((product.shape[0], LANES - product.shape[1]), product.dtype)
            product = jnp.concatenate([product, empty], axis=1)
        yield
        height = product.shape[0] // len(factors)
        at = 0
        for job in tile:
            pair = []
            for side in range(2):
                start = at + side * job.rows
                pieces = [rows(product, x * height + start, job.rows) for x in range(len(factors))]
                mine = choose(pieces, rows(owner, 0, job.rows))
                shift = (job.lane - job.source) % LANES
                pair.append(pltpu.roll(mine, shift, 1) if shift else mine)
            at += 2 * job.rows
            parts[job.row, job.kind] = (pair[0], pair[1])
    return _assemble(parts, tiles, chunk)


def _gap(count: int, width: int) -> list[jax.Array]:
    return [jnp.zeros((count, width), F32)] if count else []


def _assemble(parts, tiles, chunk: int) -> tuple[jax.Array, jax.Array]:
    jobs = [job for tile in tiles for job in tile]
    diagonal = sorted((job for job in jobs if job.kind != "early"), key=lambda job: job.row)
    early = {job.row: job for job in jobs if job.kind == "early"}
    lane = index((chunk, LANES), 1) % chunk
    row = index((chunk, LANES), 0)
    bands: list[list[jax.Array]] = [[], []]
    for side in range(2):
        height = 2 * diagonal[0].rows if diagonal[0].kind != "block" else diagonal[0].rows
        for start in range(0, chunk, height):
            own = [job for job in diagonal if start <= job.row < start + height]
            band = stack([parts[job.row, job.kind][side] for job in own])
            if start in early:
                lanes = rows(lane, start, height)
                band = jnp.where(lanes >= start, band, parts[start, "early"][side])
            bands[side].append(band)
    # products above the diagonal may be infinite: selected away, never multiplied by zero
    query = jnp.where(row >= lane, stack(bands[0]), 0.0)
    key = jnp.where(row > lane, stack(bands[1]), 0.0)
    return query, key
