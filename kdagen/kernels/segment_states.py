"""Initial and final states of the segments of a packed forward, one of each a segment.

A chunk knows one state, that of the segment which was open at its start. Where others begin in it,
what their tokens see of their initial states is formed ahead of the recurrence, which adds it; and
where segments end in it, their final states are formed after it, from what the recurrence left.
Both walk the segments of a block one by one, and most blocks have none that begins or ends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdagen.kernels import packing
from kdagen.kernels.geometry import Cut, padded, widened
from kdagen.kernels.lanes import F32, FULL, SPLIT, dot, index, quotient, remainder, stack
from kdagen.kernels.tiling import LANES, SUBLANES

SLOTS = 3
"""Blocks of which ``totals_within`` and ``keys_within`` are kept: the last is read after the
relations of the block two steps later are written."""

_HEADS = 8
"""Heads whose chains of products are written side by side, so that none waits long."""


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


def scratch(
    cut: Cut, initial: bool, final: bool, operand: Any, inverse_dtype: Any
) -> dict[str, Any]:
    """VMEM scratch by name, see ``SegmentStates``."""
    geometry, extent = cut.geometry, cut.extent
    chunk, items = geometry.chunk, geometry.items
    key_dim, value_dim = padded(extent.key_dim), padded(extent.value_dim)
    state = (key_dim, value_dim)
    made = {"totals_within": pltpu.VMEM((SLOTS, items, chunk, key_dim), F32)}
    if initial:
        made |= {
            "decayed_within": pltpu.VMEM((2, items, 2 * chunk, key_dim), operand),
            "seen_within": pltpu.VMEM((items, 2 * chunk, value_dim), F32),
            "state_within": pltpu.VMEM((items, *state), F32),
            "state_in": pltpu.VMEM((geometry.heads, *state), F32),
        }
    if final:
        made |= {
            "keys_within": pltpu.VMEM((SLOTS, items, key_dim, chunk), inverse_dtype),
            "strengths_within": pltpu.VMEM((SLOTS, items, 1, chunk), F32),
            "corrected": pltpu.VMEM((items, chunk, value_dim), inverse_dtype),
            "state_before": pltpu.VMEM((geometry.streams, *state), F32),
            "state_out": pltpu.VMEM((geometry.heads, *state), F32),
        }
    return made


Prepare = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
"""From query, key, gate, rows and bound of a chunk-head to query, key and log2 decay."""


class SegmentStates:
    """States of the segments that begin or end in the leaving block of a grid step.

    ``refs`` are by name: ``initial`` and ``segment_finals`` [B, N, HV, KP, VP] f32 in HBM,
    ``table``, and of ``scratch`` above:

    totals_within: by chunk-head [C, KP], sums of the log2 decay from the start of a token's
    segment, or of the chunk, to the token; decayed_within: [2C, KP], scaled queries above keys,
    under that; keys_within: [KP, C], keys under the decay from behind a token to the end of its
    segment, or of the chunk; strengths_within: write strengths.
    seen_within, state_within: what the recurrence adds to what the tokens of a chunk-head see of
    its state, and to the state that it leaves.
    corrected: [items, C, VP], corrected values.
    state_before: states before the leaving block.
    state_in, state_out: those of one segment on their way.
    """

    def __init__(self, cut: Cut, refs: Mapping[str, Any], slots: int, step: Any, drain: int):
        self._cut, self._geometry, self._refs = cut, cut.geometry, refs
        self.table = Table(slots, cut.blocks, cut.geometry.block)
        self._leaving = jnp.maximum(step - drain, 0)
        self._entering = jnp.minimum(step, cut.blocks - 1)
        self._enters = step < cut.blocks
        self._active = step >= drain
        self._slot = remainder(step, 2)
        self._entering_slot = remainder(step, SLOTS)
        self._leaving_slot = remainder(step + SLOTS - drain, SLOTS)

    def prepare(
        self, row: Any, prepare: Prepare, scale: float, lower_bound: float | None, dtype: Any
    ) -> None:
        """Forms what the states of segments take of the entering block, if any begins or ends."""
        refs, geometry = self._refs, self._geometry
        for r in range(geometry.rows):

            @pl.when(self._busy(row, r))
            def _(r=r):
                for n in range(geometry.chunks):
                    lanes = slice(n * geometry.chunk, (n + 1) * geometry.chunk)
                    first, behind = (refs["spans"][r, i : i + 1, lanes] for i in range(2))
                    start = self._entering * geometry.block + n * geometry.chunk
                    first, behind = (
                        jnp.clip(x - start, 0, geometry.chunk) for x in (first, behind)
                    )
                    masks = packing.sums_within(first, behind, dtype)

                    def of_heads(heads: list[Any], n=n, masks=masks) -> None:
                        self._prepare(n, r, heads, masks, prepare, scale, lower_bound, dtype)

                    self._each_head(of_heads)

    def _prepare(
        self, n: int, r: int, heads: list[Any], masks: Any, prepare: Prepare,
        scale: float, lower_bound: float | None, dtype: Any,
    ) -> None:  # fmt: skip
        refs, cut, slot = self._refs, self._cut, self._entering_slot
        made = []
        for head in heads:
            where = functools.partial(cut.rows_of, n, r)
            ratio = cut.extent.ratio
            key_head = head // ratio if isinstance(head, int) else quotient(head, ratio)
            query, key = (
                widened(refs[name][where(key_head, cut.extent.key_dim)].astype(F32))
                for name in ("query", "key")
            )
            gate = widened(refs["gate"][where(head, cut.extent.key_dim)].astype(F32))
            rows: tuple[Any, ...] = ()
            if "gate_rows" in refs:
                rows = tuple(refs["gate_rows"][i, pl.ds(head, 1), :] for i in range(2))
            query, key, decay = prepare(query, key, gate, rows, lower_bound)
            before, after = packing.sums(decay, masks, dtype)
            made.append((query, key, before, after))
        for head, (query, key, before, after) in zip(heads, made, strict=True):
            item = self._item(n, r, head)
            refs["totals_within"][slot, item] = before
            if "decayed_within" in refs:
                factor = jnp.exp2(before)
                both = stack([query * (factor * scale), key * factor])
                ref = refs["decayed_within"]
                ref[self._slot, item] = both.astype(ref.dtype)
            if "keys_within" in refs:
                ref = refs["keys_within"]
                ref[slot, item] = jnp.transpose(key * jnp.exp2(after)).astype(ref.dtype)

    def _busy(self, row: Any, r: int) -> Any:
        """Whether a segment begins or ends in a batch row of the entering block."""
        of_block = functools.partial(self._of_block, row, r, block=self._entering)
        return (of_block(which=BEGIN) + of_block(which=END) > 0) & self._enters

    def _keep_strengths(self, r: int) -> None:
        refs, geometry = self._refs, self._geometry
        for item in range(geometry.items):
            if geometry.place(item)[1] == r:
                pack, x = divmod(item, geometry.per_pack)
                lanes = slice(x * geometry.chunk, (x + 1) * geometry.chunk)
                row = refs["token_rows"][0, pack : pack + 1, lanes]
                refs["strengths_within"][self._entering_slot, item] = row

    def keep_corrected(self, item: int, x: jax.Array) -> None:
        """Keeps the corrected values [C, VP] of a chunk-head of the leaving block."""
        if "corrected" not in self._refs:
            return
        ref = self._refs["corrected"]
        ref[item] = x.astype(ref.dtype)

    def begin(self, states: Any, row: Any, group: Any, dtype: Any) -> None:
        """Ahead of the recurrence: what it is to add, and the states before it."""
        if "state_before" in self._refs:
            for r in self._rows():
                ends = self._of_block(row, r, END) > 0

                @pl.when(self._active & ends)
                def _(r=r):
                    heads = self._geometry.heads
                    self._refs["state_before"][r * heads : (r + 1) * heads] = states[r, 0]

        if "seen_within" not in self._refs:
            return
        before = jnp.maximum(self._leaving - 1, 0)
        for r in self._rows():
            begun = self._of_block(row, r, BEGIN) > 0
            stale = (self._leaving == 0) | (self._of_block(row, r, BEGIN, before) > 0)

            @pl.when(self._active & (begun | stale))
            def _(r=r):
                self._forget(r)

            @pl.when(self._active & begun)
            def _(r=r):
                self._begin_row(row, r, group, dtype)

    def _forget(self, r: int) -> None:
        heads = self._geometry.heads
        for n in range(self._geometry.chunks):
            first = n * self._geometry.streams + r * heads
            for name in ("seen_within", "state_within"):
                ref = self._refs[name]
                zero = jnp.zeros(ref.shape[1:], F32)

                def clear(head: Any, carry: Any, ref=ref, zero=zero, first=first) -> Any:
                    ref[first + head] = zero
                    return carry

                lax.fori_loop(0, heads, clear, jnp.int32(0))

    def _begin_row(self, row: Any, r: int, group: Any, dtype: Any) -> None:
        refs, chunk = self._refs, self._geometry.chunk

        def begin(segment: Any, n: Any, first: Any, last: Any, goes_on: Any) -> None:
            self._fetch(row, r, segment, group)

            def of_heads(heads: list[Any]) -> None:
                items = [self._item(n, r, head) for head in heads]
                states = [refs["state_in"][head] for head in heads]
                found = [
                    dot(refs["decayed_within"][self._slot, item], state, dtype=dtype)
                    for item, state in zip(items, states, strict=True)
                ]
                at = remainder(index(found[0].shape, 0), chunk)
                mine = (at >= first) & (at < last)
                ref = refs["seen_within"]
                seen = [jnp.where(mine, x, ref[i]) for x, i in zip(found, items, strict=True)]
                left = [x * self._left(i, last) for x, i in zip(states, items, strict=True)]
                for item, x, state in zip(items, seen, left, strict=True):
                    ref[item] = x
                    # of one that ends in the chunk the next one does not see this
                    refs["state_within"][item] = jnp.where(goes_on, state, 0.0)

            self._each_head(of_heads)

        self._each(row, r, begin, lambda start, end, at: start >= at)

    def end(self, row: Any, group: Any, inverse_dtype: Any, exact: bool) -> None:
        """After the recurrence: the final states of segments that end in the leaving block."""
        if "state_before" not in self._refs:
            return
        passes = FULL if exact else SPLIT
        for r in self._rows():
            # the rows of write strengths are there only now
            pl.when(self._busy(row, r))(functools.partial(self._keep_strengths, r))
            ends = self._of_block(row, r, END) > 0

            @pl.when(self._active & ends)
            def _(r=r):
                self._end_row(row, r, group, inverse_dtype, passes)

    def _end_row(self, row: Any, r: int, group: Any, inverse_dtype: Any, passes: int) -> None:
        refs, geometry = self._refs, self._geometry

        def end(segment: Any, n: Any, first: Any, last: Any, goes_on: Any) -> None:
            opened = self.table.boundary(refs["table"], self._row(row, r), segment)
            begins = opened >= self._start(n)
            if "state_in" in refs:

                @pl.when(begins)
                def _():
                    self._fetch(row, r, segment, group)

            place = r * geometry.heads

            def of_heads(heads: list[Any]) -> None:
                items = [self._item(n, r, head) for head in heads]
                states = []
                for head, item in zip(heads, items, strict=True):
                    state = refs["state_before"][place + head]
                    own = refs["state_in"][head] if "state_in" in refs else jnp.zeros_like(state)
                    states.append(jnp.where(begins, own, state) * self._left(item, last))
                written = [
                    self._written(item, first, last, inverse_dtype, passes) for item in items
                ]
                for head, state, more in zip(heads, states, written, strict=True):
                    refs["state_out"][head] = state + more

            self._each_head(of_heads)

            @pl.when(goes_on)
            def _():
                refs["state_before"][place : place + geometry.heads] = refs["state_out"][...]

            @pl.when(~goes_on)
            def _():
                heads = pl.ds(group * geometry.heads, geometry.heads)
                whole = refs["segment_finals"].at[self._row(row, r), segment, heads]
                pltpu.sync_copy(refs["state_out"], whole)

        self._each(row, r, end, lambda start, end, at: True)
        self._pass_by(row, r, group)

    def _pass_by(self, row: Any, r: int, group: Any) -> None:
        """The final states of empty segments, which are their initial ones, or 0."""
        refs, table, batch = self._refs, self.table, self._row(row, r)
        heads = pl.ds(group * self._geometry.heads, self._geometry.heads)

        def of_segment(segment: Any, carry: Any) -> Any:
            start, end = (table.boundary(refs["table"], batch, segment + i) for i in range(2))

            @pl.when(start == end)
            def _():
                state = refs["state_out"]
                if "initial" in refs:
                    pltpu.sync_copy(refs["initial"].at[batch, segment, heads], state)
                else:
                    state[...] = jnp.zeros_like(state)
                pltpu.sync_copy(state, refs["segment_finals"].at[batch, segment, heads])

            return carry

        first = self._of_block(row, r, ENDED)
        behind = first + self._of_block(row, r, END)
        lax.fori_loop(first, behind, of_segment, jnp.int32(0))

    def _each(
        self,
        row: Any,
        r: int,
        visit: Callable[[Any, Any, Any, Any, Any], None],
        counts: Callable[[Any, Any, Any], Any],
    ) -> None:
        """``visit(segment, chunk of the block, first row, row behind the last, goes on)`` for every
        chunk of the leaving block and every segment that has a token there and ``counts(first
        token, token behind it, first token of the chunk)``; it ``goes on`` if it has tokens behind
        the chunk."""
        chunk, table, ref = self._geometry.chunk, self.table, self._refs["table"]
        batch = self._row(row, r)

        def of_chunk(n: Any, carry: Any) -> Any:
            at = self._start(n)

            def of_segment(segment: Any, carry: Any) -> Any:
                start, end = (table.boundary(ref, batch, segment + i) for i in range(2))
                here = (start < at + chunk) & (end > at) & (end > start)

                @pl.when(here & counts(start, end, at))
                def _():
                    first, last = jnp.maximum(start - at, 0), jnp.minimum(end - at, chunk)
                    visit(segment, n, first, last, end > at + chunk)

                return carry

            first, behind = (self._of_block(row, r, which) for which in (FIRST, BEHIND))
            return lax.fori_loop(first, behind, of_segment, carry)

        lax.fori_loop(0, self._geometry.chunks, of_chunk, jnp.int32(0))

    def _each_head(self, visit: Callable[[list[Any]], None]) -> None:
        """``visit`` of all heads of the program, some of them at a time."""
        heads, widths = self._geometry.heads, (self._cut.extent.key_dim, self._cut.extent.value_dim)
        if self._cut.flat and any(width % LANES for width in widths):
            # lanes are taken from where a number known beforehand says
            visit(list(range(heads)))
            return
        together = math.gcd(heads, _HEADS)

        def some(i: Any, carry: Any) -> Any:
            visit([i * together + j for j in range(together)])
            return carry

        lax.fori_loop(0, heads // together, some, jnp.int32(0))

    def _fetch(self, row: Any, r: int, segment: Any, group: Any) -> None:
        """The initial states of a segment, of all heads of the program."""
        heads = pl.ds(group * self._geometry.heads, self._geometry.heads)
        own = self._refs["initial"].at[self._row(row, r), segment, heads]
        pltpu.sync_copy(own, self._refs["state_in"])

    def _left(self, item: Any, last: Any) -> jax.Array:
        """What is left of a state up to a row of a chunk-head, [KP, 1] f32."""
        total = self._refs["totals_within"][self._leaving_slot, item, pl.ds(last - 1, 1), :]
        left = jnp.broadcast_to(jnp.exp2(total), (SUBLANES, total.shape[1]))
        return jnp.transpose(left)[:, 0:1]

    def _written(self, item: Any, first: Any, last: Any, dtype: Any, passes: int) -> jax.Array:
        """What rows first to last - 1 of a chunk-head have written by the end of their segment, or
        of the chunk: [KP, VP] f32."""
        keys = self._refs["keys_within"][self._leaving_slot, item].astype(F32)
        lane = index(keys.shape, 1)
        written = keys * self._refs["strengths_within"][self._leaving_slot, item]
        written = jnp.where((lane >= first) & (lane < last), written, 0.0)
        return dot(written, self._refs["corrected"][item], dtype=dtype, passes=passes)

    def _item(self, n: Any, r: int, head: Any) -> Any:
        return n * self._geometry.streams + r * self._geometry.heads + head

    def _start(self, n: Any) -> Any:
        """The first token of a chunk of the leaving block."""
        return self._leaving * self._geometry.block + n * self._geometry.chunk

    def _rows(self) -> Iterator[int]:
        return iter(range(self._geometry.rows))

    def _row(self, row: Any, r: int) -> Any:
        return row * self._geometry.rows + r

    def _of_block(self, row: Any, r: int, which: int, block: Any = None) -> Any:
        block = self._leaving if block is None else block
        return self.table.of_block(self._refs["table"], self._row(row, r), block, which)
