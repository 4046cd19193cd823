"""A kernel's way through the segments of a block of tokens, one by one, chunk by chunk.

Most blocks have none that begins or ends, and what stands here is not on their way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kdagen.kernels import packing
from kdagen.kernels.geometry import Cut, widened
from kdagen.kernels.lanes import F32, quotient
from kdagen.kernels.tiling import LANES, SUBLANES

_HEADS = 8
"""Heads whose chains of products are written side by side, so that none waits long."""

Prepare = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
"""From query, key, gate, rows and bound of a chunk-head to query and key as they are multiplied and
the log2 decay of each token, all [C, K] f32."""


class Table:
    """Where segments lie, as numbers in SMEM: one vector of int32.

    Per batch row its N + 1 boundaries, and by block of tokens: the first segment that has a token
    there; the first one behind the block; how many begin in it; the first one that ends in it, or
    is empty and lies there; and how many do.
    """

    def __init__(self, slots: int, blocks: int, block: int):
        """slots: N; blocks: of ``block`` tokens each."""
        self._slots, self._blocks, self._block = slots, blocks, block

    def made(self, boundaries: Any) -> Any:
        """From boundaries [B, N + 1], NumPy's or JAX's, in O(N + blocks)."""
        numpy = np if isinstance(boundaries, np.ndarray) else jnp
        parts = []
        for row in boundaries:
            starts, ends = row[:-1], row[1:]
            before = self._up_to(starts // self._block + 1)
            started, ended = (self._up_to(-(-x // self._block)) for x in (starts, ends))
            ended = numpy.concatenate([ended[:1] * 0, ended[1:]])
            first = numpy.maximum(started[:-1] - 1, 0)
            ending = ended[1:] - ended[:-1]
            of_block = first, before[1:], before[1:] - before[:-1], ended[:-1], ending
            parts += [row, *of_block]
        return numpy.concatenate([x.astype(numpy.int32) for x in parts])

    def _up_to(self, edges: Any) -> Any:
        """How many of ``edges`` are at most 0, 1, ... up to the number of blocks."""
        if isinstance(edges, np.ndarray):
            return np.bincount(edges, minlength=self._blocks + 2)[: self._blocks + 1].cumsum()
        counts = jnp.zeros(self._blocks + 1, jnp.int32).at[edges].add(1, mode="drop")
        return jnp.cumsum(counts, dtype=jnp.int32)

    def boundary(self, ref: Any, row: Any, slot: Any) -> Any:
        """The first token of a slot."""
        return ref[self._of_row(row) + slot]

    def of_block(self, ref: Any, row: Any, block: Any, which: int) -> Any:
        """One of the numbers of a block."""
        return ref[self._of_row(row) + self._slots + 1 + which * self._blocks + block]

    def _of_row(self, row: Any) -> Any:
        return row * (self._slots + 1 + _OF_BLOCK * self._blocks)


FIRST, BEHIND, BEGIN, ENDED, END = range(5)
_OF_BLOCK = 5


class Visited:
    """What of a segment lies in a chunk.

    Attributes:
      segment: its slot; n: the chunk of the block.
      first, last: its first row, and the row behind its last one.
      begins, goes_on: whether it has its first token there, and whether it has tokens behind.
    """

    def __init__(self, segment: Any, n: Any, start: Any, end: Any, at: Any, chunk: int):
        """start, end, at: first tokens of the segment, behind it, and of the chunk."""
        self.segment, self.n = segment, n
        self.first, self.last = jnp.maximum(start - at, 0), jnp.minimum(end - at, chunk)
        self.begins, self.goes_on = start >= at, end > at + chunk


class Walk:
    """The segments of batch rows of one program.

    Attributes:
      rows: of the program.
    """

    def __init__(self, cut: Cut, table: Any, slots: int, row: Any, group: Any):
        """table: the reference of a ``Table`` of so many slots; row, group: of the program."""
        self.cut, self.geometry = cut, cut.geometry
        self.rows = range(cut.geometry.rows)
        self._table, self._ref = Table(slots, cut.blocks, cut.geometry.block), table
        self._row = row
        self._heads = pl.ds(group * cut.geometry.heads, cut.geometry.heads)

    def of_block(self, r: int, block: Any, which: int) -> Any:
        """One of the numbers of ``Table`` of a row of the program."""
        return self._table.of_block(self._ref, self._batch(r), block, which)

    def busy(self, r: int, block: Any) -> Any:
        """Whether a segment begins or ends in a block."""
        return self.of_block(r, block, BEGIN) + self.of_block(r, block, END) > 0

    def state(self, ref: Any, r: int, segment: Any) -> Any:
        """Of states [B, N, HV, KP, VP] in HBM those of a segment, of all heads of the program."""
        return ref.at[self._batch(r), segment, self._heads]

    def item(self, n: Any, r: int, head: Any) -> Any:
        """See ``kdagen.kernels.geometry``."""
        return n * self.geometry.streams + r * self.geometry.heads + head

    def each(
        self,
        r: int,
        block: Any,
        visit: Callable[[Visited], None],
        *,
        begins: bool = False,
        ends: bool = False,
        backwards: bool = False,
    ) -> None:
        """Chunk by chunk, ``visit`` of every segment that has tokens there, or only of those that
        begin there, or that end in the block; ``backwards``, from the last chunk and the last
        segment on."""
        chunk = self.geometry.chunk
        limit = (block + 1) * self.geometry.block
        batch = self._batch(r)
        first, behind = (self.of_block(r, block, which) for which in (FIRST, BEHIND))

        def of_chunk(i: Any, carry: Any) -> Any:
            n = self.geometry.chunks - 1 - i if backwards else i
            at = block * self.geometry.block + n * chunk

            def of_segment(j: Any, carry: Any) -> Any:
                segment = first + behind - 1 - j if backwards else j
                start, end = self._edges(batch, segment)
                wanted = (start < at + chunk) & (end > at) & (end > start)
                if begins:
                    wanted &= start >= at
                if ends:
                    wanted &= end <= limit

                @pl.when(wanted)
                def _():
                    visit(Visited(segment, n, start, end, at, chunk))

                return carry

            return lax.fori_loop(first, behind, of_segment, carry)

        lax.fori_loop(0, self.geometry.chunks, of_chunk, jnp.int32(0))

    def each_empty(self, r: int, block: Any, visit: Callable[[Any], None]) -> None:
        """``visit`` of the slot of every empty segment that lies in a block."""

        def of_segment(segment: Any, carry: Any) -> Any:
            start, end = self._edges(self._batch(r), segment)
            pl.when(start == end)(functools.partial(visit, segment))
            return carry

        first = self.of_block(r, block, ENDED)
        behind = first + self.of_block(r, block, END)
        lax.fori_loop(first, behind, of_segment, jnp.int32(0))

    def forget(self, r: int, refs: Iterable[Any]) -> None:
        """Zeros in references [items, ...] of all chunk-heads of a row."""
        for n in range(self.geometry.chunks):
            for ref in refs:
                zero = jnp.zeros(ref.shape[1:], ref.dtype)

                def clear(head: Any, carry: Any, ref=ref, zero=zero, n=n) -> Any:
                    ref[self.item(n, r, head)] = zero
                    return carry

                lax.fori_loop(0, self.geometry.heads, clear, jnp.int32(0))

    def each_head(self, visit: Callable[[list[Any]], None]) -> None:
        """``visit`` of all heads of the program, some of them at a time."""
        heads, extent = self.geometry.heads, self.cut.extent
        if self.cut.flat and (extent.key_dim % LANES or extent.value_dim % LANES):
            # lanes are taken from where a number known beforehand says
            visit(list(range(heads)))
            return
        together = math.gcd(heads, _HEADS)

        def some(i: Any, carry: Any) -> Any:
            visit([i * together + j for j in range(together)])
            return carry

        lax.fori_loop(0, heads // together, some, jnp.int32(0))

    def prepare(
        self,
        r: int,
        block: Any,
        refs: Mapping[str, Any],
        prepare: Prepare,
        gate_rows: Callable[[Any], tuple[jax.Array, ...]],
        lower_bound: float | None,
        dtype: Any,
        keep: Callable[..., None],
    ) -> None:
        """``keep(item, query, key, before, after)`` for all chunk-heads of a row of a block, the
        last two being ``packing.sums`` of its decay.

        ``refs`` are the windows of the block: query, key, gate and spans; ``gate_rows`` those of a
        head for ``prepare``.
        """
        chunk, extent = self.geometry.chunk, self.cut.extent

        def load(name: str, n: int, head: Any) -> jax.Array:
            where = self.cut.rows_of(n, r, head, extent.key_dim)
            return widened(refs[name][where].astype(F32))

        for n in range(self.geometry.chunks):
            lanes = slice(n * chunk, (n + 1) * chunk)
            start = block * self.geometry.block + n * chunk
            first, behind = (
                jnp.clip(refs["spans"][r, i : i + 1, lanes] - start, 0, chunk) for i in range(2)
            )
            masks = packing.sums_within(first, behind, dtype)

            def of_heads(heads: list[Any], n: int = n, masks: jax.Array = masks) -> None:
                made = []
                for head in heads:
                    shared = quotient(head, extent.ratio) if extent.ratio > 1 else head
                    query, key = (load(name, n, shared) for name in ("query", "key"))
                    gate = load("gate", n, head)
                    query, key, decay = prepare(query, key, gate, gate_rows(head), lower_bound)
                    made.append((query, key, *packing.sums(decay, masks, dtype)))
                for head, one in zip(heads, made, strict=True):
                    keep(self.item(n, r, head), *one)

            self.each_head(of_heads)

    def _batch(self, r: int) -> Any:
        return self._row * self.geometry.rows + r

    def _edges(self, batch: Any, segment: Any) -> tuple[Any, Any]:
        """The first token of a segment, and the one behind it."""
        start, end = (self._table.boundary(self._ref, batch, segment + i) for i in range(2))
        return start, end


def left(totals: Any, where: tuple[Any, ...], row: Any) -> jax.Array:
    """What is left of a state after a row of a chunk-head, [KP, 1] f32, from the reference of its
    log2 decays."""
    total = totals[(*where, pl.ds(row, 1), slice(None))]
    column = jnp.broadcast_to(jnp.exp2(total), (SUBLANES, total.shape[1]))
    return jnp.transpose(column)[:, 0:1]
