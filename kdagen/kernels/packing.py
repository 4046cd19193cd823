"""Packed sequences: chunks on one grid over all tokens, and segments as masks within them.

A segment may begin and end anywhere in a chunk. Rows of one chunk are related only where they are
of one segment; what comes in at its start is seen by the rows of the segment that was open there,
and what goes out at its end was written by the rows of the last one. Nothing is moved or copied.
Padding is a segment of its own that holds zeros, and zeros lie past the end of the tensors.

A call tells of its segments by ``spans`` [B, 2, T] int32, for every token the first one of its
segment and the first one behind it, and by ``boundaries`` [B, N + 1] int32, the first token of each
segment and the number of tokens that are no padding, its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from kdagen.kernels.gate_gradients import parts
from kdagen.kernels.geometry import Cut, padded
from kdagen.kernels.lanes import F32, beside, dot, index, remainder, rows, stack
from kdagen.kernels.tiling import LANES, SUBLANES

_FORGOTTEN = -1e9
"""Log2 decay that leaves nothing."""

_ROWS = 16
"""Rows that are cleared at a time where heads lie side by side."""


def spans_view(cut: Cut, spans: jax.Array) -> jax.Array:
    """[B, blocks, 2, block] int32, as ``spans_spec`` cuts it."""
    batch, _, tokens = spans.shape
    block = cut.geometry.block
    whole = cut.blocks * block
    if whole > tokens:
        # of another segment: an activated gate of 0 decays
        pad = [(0, 0), (0, 0), (0, whole - tokens)]
        spans = jnp.pad(spans, pad, constant_values=whole)
    return spans.reshape(batch, 2, cut.blocks, block).transpose(0, 2, 1, 3)


def spans_spec(cut: Cut, where: Callable[[Any], Any]) -> pl.BlockSpec:
    """Block of ``spans_view``: [rows, 2, block]."""
    geometry = cut.geometry
    return pl.BlockSpec(
        (geometry.rows, None, 2, geometry.block),
        lambda row, group, step: (row, where(step), 0, 0),
    )


def scratch(cut: Cut) -> dict[str, Any]:
    """VMEM scratch of ``Segments`` by name, for the references of a kernel.

    edges: per chunk and batch row of a block its ``open`` in row 0 and ``last`` in row 1, in every
    lane; token_rows: per pack write strengths, those of the last segment alone, and the ends of
    segments within their chunk.
    """
    geometry = cut.geometry
    width = padded(cut.extent.key_dim)
    return {
        "edges": pltpu.VMEM((geometry.chunks * geometry.rows, SUBLANES, width), F32),
        "token_rows": pltpu.VMEM((3, geometry.packs, LANES), F32),
    }


class Segments:
    """Segments of the block whose relations are formed in a grid step.

    ``arrange`` comes first, and fills the scratch that the others read.
    """

    def __init__(self, cut: Cut, edges: Any, token_rows: Any):
        self._cut, self._geometry = cut, cut.geometry
        self._edges, self._token_rows = edges, token_rows

    def arrange(
        self,
        spans: Any,
        lengths: Any,
        row: jax.Array,
        block: jax.Array,
        strengths: Callable[[int], jax.Array],
    ) -> None:
        """From the reference of ``spans_view`` and that of the lengths.

        Args:
          row: group of batch rows of the program; block: the one whose relations are formed.
          strengths: of a pack, [1, 128] f32, of which those of padding may be anything.
        """
        geometry = self._geometry
        chunk = geometry.chunk
        pieces = {}
        for n in range(geometry.chunks):
            start = block * geometry.block + n * chunk
            for r in range(geometry.rows):
                first, behind = (spans[r, i : i + 1, n * chunk : (n + 1) * chunk] for i in range(2))
                token = index(first.shape, 1)
                opened = _count(first < start)
                last = chunk - _count(behind >= start + chunk)
                at, shape = n * geometry.rows + r, (1, self._edges.shape[2])
                self._edges[at, 0:1, :] = jnp.broadcast_to(opened, shape)
                self._edges[at, 1:2, :] = jnp.broadcast_to(last, shape)
                inside = start + token < lengths[row * geometry.rows + r]
                pieces[n, r] = (
                    inside.astype(F32),
                    (token.astype(F32) >= last).astype(F32),
                    jnp.clip(behind - start, 0, chunk).astype(F32),
                )
        for pack in range(geometry.packs):
            mine = [pieces[geometry.place(item)[:2]] for item in self._items(pack)]
            inside, of_last, ends = (beside(same) for same in zip(*mine, strict=True))
            # selected: what padding holds may be no number
            strength = jnp.where(inside > 0.0, strengths(pack), 0.0)
            for i, x in enumerate((strength, strength * of_last, ends)):
                self._token_rows[i, pack : pack + 1, :] = x

    def strengths(self, pack: int) -> jax.Array:
        """[1, 128] f32, 0 for padding."""
        return self._token_rows[0, pack : pack + 1, :]

    def last_strengths(self, pack: int) -> jax.Array:
        """[1, 128] f32, 0 but for the last segment of each chunk."""
        return self._token_rows[1, pack : pack + 1, :]

    def ends(self, pack: int) -> jax.Array:
        """[1, 128] f32: of each token's segment the first row behind it in its chunk."""
        return self._token_rows[2, pack : pack + 1, :]

    def incoming(self, x: jax.Array, item: int) -> jax.Array:
        """x [n C, K] f32, 0 in the rows of segments that begin in the chunk."""
        row = remainder(index(x.shape, 0), self._geometry.chunk).astype(F32)
        return jnp.where(row < self._edge(item, 0), x, 0.0)

    def outgoing(self, x: jax.Array, item: int) -> jax.Array:
        """x [C, K] f32, 0 in the rows of segments that end before the chunk does."""
        return jnp.where(index(x.shape, 0).astype(F32) >= self._edge(item, 1), x, 0.0)

    def through(self, total: jax.Array, item: int) -> jax.Array:
        """The log2 decay [1, K] of a chunk; of one in which a segment begins, nothing is left."""
        whole = self._edge(item, 0) >= self._geometry.chunk
        return jnp.where(whole, total, _FORGOTTEN)

    def related(self, x: jax.Array, pack: int) -> jax.Array:
        """x [C, 128] f32 of a pack, 0 where row and column are not of one segment."""
        return of_one_segment(x, self.ends(pack))

    def _edge(self, item: int, which: int) -> jax.Array:
        n, row, _ = self._geometry.place(item)
        return self._edges[n * self._geometry.rows + row, which : which + 1, :]

    def _items(self, pack: int) -> range:
        per_pack = self._geometry.per_pack
        return range(pack * per_pack, (pack + 1) * per_pack)


def sums_within(starts: jax.Array, ends: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The factor of ``sums``, from the starts and ends of each token's segment within its chunk,
    [1, C] int32."""
    chunk = starts.shape[1]
    row, column = index((chunk, chunk), 0), index((chunk, chunk), 1)
    before = (column <= row) & (row < ends)
    after = (column > row) & (row >= starts)
    ones = stack([before.astype(F32), after.astype(F32)])
    return ones if dtype == F32 else beside([ones, ones])


def sums(decay: jax.Array, ones: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Sums of ``decay`` [C, K] f32 within segments: from the start of a row's to the row, and from
    the row, which is left out, to the end of its; both [C, K] f32."""
    chunk = decay.shape[0]
    found = dot(ones, parts(decay, 1 if dtype == F32 else 2), dtype=dtype)
    return rows(found, 0, chunk), rows(found, chunk, chunk)


def of_one_segment(x: jax.Array, ends: jax.Array) -> jax.Array:
    """x [C, n] f32, 0 where row and column are not of one segment, for rows not above columns.

    ends: [1, n] f32, see ``Segments.ends``.
    """
    return jnp.where(index(x.shape, 0).astype(F32) < ends, x, 0.0)


def _count(given: jax.Array) -> jax.Array:
    """How many of [1, n] hold: [1, 1] f32."""
    return jnp.sum(given.astype(F32), axis=1, keepdims=True)


def copied(x: jax.Array, interpret: Any) -> jax.Array:
    """An operand of which every window is a copy, to be cleared.

    XLA may put all of an operand in VMEM; its windows are then the operand itself, which the
    program may read again.
    """
    return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def clear_padding(
    cut: Cut, lengths: Any, row: jax.Array, windows: Iterable[tuple[Any, jax.Array]]
) -> None:
    """Zeros in place of padding and of what lies past the end of the tensors, for each window of a
    tensor and the block of tokens that it holds. Few blocks have any, the others pay for the
    question."""
    geometry = cut.geometry
    mine = [lengths[row * geometry.rows + r] for r in range(geometry.rows)]
    shortest = mine[0]
    for other in mine[1:]:
        shortest = jnp.minimum(shortest, other)
    windows = list(windows)
    furthest = windows[0][1]
    for _window, block in windows[1:]:
        furthest = jnp.maximum(furthest, block)

    @pl.when(shortest < (furthest + 1) * geometry.block)
    def clear():
        for window, block in windows:
            for r in range(geometry.rows):
                _clear(cut, window, r, mine[r] - block * geometry.block)


def _clear(cut: Cut, window: Any, row: int, left: jax.Array) -> None:
    """Zeros in all rows of a window but the first ``left`` of one batch row."""

    def clear(where: Any, left: jax.Array) -> None:
        x = window[where].astype(F32)
        window[where] = jnp.where(index(x.shape, 0) < left, x, 0.0).astype(window.dtype)

    if cut.flat:

        def some(i: jax.Array, carry: jax.Array) -> jax.Array:
            start = pl.multiple_of(i * _ROWS, _ROWS)
            clear((row, pl.ds(start, _ROWS)), left - start)
            return carry

        lax.fori_loop(0, window.shape[1] // _ROWS, some, jnp.int32(0))
    else:

        def one(head: jax.Array, carry: jax.Array) -> jax.Array:
            clear((head, row), left)
            return carry

        lax.fori_loop(0, window.shape[0], one, jnp.int32(0))
