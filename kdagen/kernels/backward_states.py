"""Gradients of the initial states of segments, and through their final states, of a packed call.

The recurrence of a chunk knows one cotangent of a state, that of the segment which goes on behind
it. Where others end in the chunk, what comes from the cotangents of their final states is formed
ahead of the recurrence, which adds it. After it, where segments begin, the gradients of their
initial states are formed, and what both kinds of state add to the gradients of queries, keys and
gates is added to those in their windows: all of it is linear in a cotangent.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from kdagen.kernels.backward_step import DRAIN, Backward, Refs
from kdagen.kernels.gate_gradients import lane_sums, normalized, parts
from kdagen.kernels.geometry import Cut
from kdagen.kernels.lanes import (
    F32,
    FULL,
    NT,
    SPLIT,
    beside,
    dot,
    index,
    quotient,
    remainder,
    rows,
    stack,
)
from kdagen.kernels.segment_walk import END, Prepare, Visited, Walk, left
from kdagen.kernels.tiling import LANES


class BackwardStates:
    """Cotangents of states of the segments that begin or end in the leaving block of a grid step.

    Scratch is what ``Handover.within`` names, by chunk-head but for what is said:

    before, after: [C, KP], sums of the log2 decay from the start of a token's segment, or of the
    chunk, to the token, and from behind it to the end; reads_within: [KP, 2C], scaled queries
    beside keys under the first, transposed; keys_within: [C, KP], keys under the second. Of those
    there are two slots, by the parity of the grid step.
    written_within, left_within: what the recurrence adds to the gradient of what is written and
    to the cotangent of the state that it leaves.
    both, written: (dout; -dR) and P of the leaving block.
    d_after: [streams, KP, VP], cotangents of the states behind the chunk that is visited.
    state_in, d_in, d_out: [heads, KP, VP], initial states, cotangents of final ones and gradients
    of initial ones of a segment on their way.
    """

    def __init__(
        self,
        kernel: Backward,
        cut: Cut,
        refs: Refs,
        walk: Walk,
        entering: Any,
        leaving: Any,
        step: Any,
    ):
        self._kernel, self._cut, self._geometry = kernel, cut, cut.geometry
        self._refs, self._walk = refs, walk
        self._entering, self._leaving = entering, leaving
        self._enters, self._active = step < cut.blocks, step >= DRAIN
        self._slot, self._other = remainder(step, 2), remainder(step + 1, 2)
        self._exact = self._geometry.exact
        self._dtype: DTypeLike = self._geometry.operand

    @property
    def _kept(self) -> Mapping[str, Any]:
        return self._refs.within

    def prepare(self, prepare: Prepare, scale: float, lower_bound: float | None) -> None:
        """Forms what the entering block takes, if a segment begins or ends in it."""
        windows = {name: getattr(self._refs, name) for name in ("query", "key", "gate", "spans")}
        prepared = functools.partial(
            self._walk.prepare,
            block=self._entering,
            refs=windows,
            prepare=prepare,
            gate_rows=self._gate_rows,
            lower_bound=lower_bound,
            dtype=self._dtype,
            keep=functools.partial(self._keep, scale),
        )
        for r in self._walk.rows:
            busy = self._walk.busy(r, self._entering) & self._enters
            pl.when(busy)(functools.partial(prepared, r))

    def _gate_rows(self, head: Any) -> tuple[jax.Array, ...]:
        ref = self._refs.gate_rows
        return () if ref is None else (ref[head, 0:1, :], ref[head, 1:2, :])

    def _keep(
        self, scale: float, item: Any, query: Any, key: Any, before: jax.Array, after: jax.Array
    ) -> None:
        kept, where = self._kept, (self._slot, item)
        kept["before"][where] = before
        if "after" in kept:
            kept["after"][where] = after
        if "keys_within" in kept:
            keys = key * jnp.exp2(after)
            kept["keys_within"][where] = keys.astype(kept["keys_within"].dtype)
        factor = jnp.exp2(before)
        reads = jnp.transpose(stack([query * (factor * scale), key * factor]))
        kept["reads_within"][where] = reads.astype(kept["reads_within"].dtype)

    def written_within(self, item: int) -> jax.Array | None:
        """[C, VP] f32 to be added to dP of a chunk-head, if there may be anything."""
        return self._kept["written_within"][item] if "written_within" in self._kept else None

    def left_within(self, item: int) -> jax.Array | None:
        """[KP, VP] f32 to be added to the cotangent that a chunk-head leaves."""
        return self._kept["left_within"][item] if "left_within" in self._kept else None

    def keep(self, name: str, item: int, x: jax.Array) -> None:
        """Keeps ``both`` or ``written`` of a chunk-head, if that is taken."""
        if name in self._kept:
            self._kept[name][item] = x.astype(self._kept[name].dtype)

    def begin(self) -> None:
        """Ahead of the recurrence: what it is to add, and the cotangents behind the block."""
        walk, heads = self._walk, self._geometry.heads
        behind = jnp.minimum(self._leaving + 1, self._cut.blocks - 1)
        for r in walk.rows:

            @pl.when(self._active & walk.busy(r, self._leaving))
            def _(r=r):
                mine = slice(r * heads, (r + 1) * heads)
                self._kept["d_after"][mine] = self._refs.d_state[mine]

            if "written_within" not in self._kept:
                continue
            ends = walk.of_block(r, self._leaving, END) > 0
            first = self._leaving == self._cut.blocks - 1
            stale = first | (walk.of_block(r, behind, END) > 0)

            @pl.when(self._active & (ends | stale))
            def _(r=r):
                walk.forget(r, (self._kept["written_within"], self._kept["left_within"]))

            @pl.when(self._active & ends)
            def _(r=r):
                walk.each(r, self._leaving, functools.partial(self._end, r))

    def _end(self, r: int, at: Visited) -> None:
        """What the cotangent of a final state adds where its segment ends."""
        kept, walk = self._kept, self._walk

        def of_heads(heads: list[Any]) -> None:
            items = [walk.item(at.n, r, head) for head in heads]
            finals = [kept["d_in"][head] for head in heads]
            written = []
            for item, final in zip(items, finals, strict=True):
                keys = kept["keys_within"][self._other, item]
                made = dot(keys, final, dtype=self._inverse_dtype, passes=self._passes)
                row = index(made.shape, 0)
                mine = (row >= at.first) & (row < at.last)
                written.append(jnp.where(mine, made, kept["written_within"][item]))
            before = [final * self._left(i, at) for final, i in zip(finals, items, strict=True)]
            for item, x, state in zip(items, written, before, strict=True):
                kept["written_within"][item] = x
                # of one that begins in the chunk nothing is left before it
                ref = kept["left_within"]
                ref[item] = jnp.where(at.begins, ref[item], state)

        @pl.when(~at.goes_on)
        def _():
            pltpu.sync_copy(walk.state(self._refs.d_final, r, at.segment), kept["d_in"])
            walk.each_head(of_heads)

    def end(self, scale: float) -> None:
        """After the recurrence and the gradients: what they did not know of."""
        for r in self._walk.rows:

            @pl.when(self._active & self._walk.busy(r, self._leaving))
            def _(r=r):
                visit = functools.partial(self._visit, r, scale)
                self._walk.each(r, self._leaving, visit, backwards=True)
                if self._refs.d_initial is not None:
                    pass_by = functools.partial(self._pass_by, r)
                    self._walk.each_empty(r, self._leaving, pass_by)

    def _visit(self, r: int, scale: float, at: Visited) -> None:
        """Gradients of a segment's states in a chunk, and the cotangent before it."""
        refs, kept, walk, geometry = self._refs, self._kept, self._walk, self._geometry
        if "state_in" in kept:

            @pl.when(at.begins)
            def _():
                pltpu.sync_copy(walk.state(refs.initial, r, at.segment), kept["state_in"])

        if "d_in" in kept:

            @pl.when(~at.goes_on)
            def _fetch() -> None:
                pltpu.sync_copy(walk.state(refs.d_final, r, at.segment), kept["d_in"])

        place = r * geometry.heads

        def of_heads(heads: list[Any]) -> None:
            items = [walk.item(at.n, r, head) for head in heads]
            behind = []
            for head in heads:
                after = kept["d_after"][place + head]
                final = kept["d_in"][head] if "d_in" in kept else jnp.zeros_like(after)
                behind.append(jnp.where(at.goes_on, after, final))
            if "written" in kept:

                @pl.when(at.begins | ~at.goes_on)
                def _add() -> None:
                    for one in zip(heads, items, behind, strict=True):
                        self._add_gradients(r, *one, scale, at)

            before = []
            for item, cotangent in zip(items, behind, strict=True):
                reads = kept["reads_within"][self._other, item].astype(F32)
                row = remainder(index(reads.shape, 1), geometry.chunk)
                reads = jnp.where((row >= at.first) & (row < at.last), reads, 0.0)
                made = dot(reads, kept["both"][item], dtype=self._dtype)
                before.append(cotangent * self._left(item, at) + made)
            for head, state in zip(heads, before, strict=True):
                kept["d_out"][head] = state

        walk.each_head(of_heads)

        @pl.when(~at.begins)
        def _():
            kept["d_after"][place : place + geometry.heads] = kept["d_out"][...]

        if refs.d_initial is not None:

            @pl.when(at.begins)
            def _():
                pltpu.sync_copy(kept["d_out"], walk.state(refs.d_initial, r, at.segment))

    def _add_gradients(
        self, r: int, head: Any, item: Any, behind: jax.Array, scale: float, at: Visited
    ) -> None:
        """Adds what the recurrence did not know of to the gradients of queries, keys and gates of a
        chunk-head; ``behind`` is the cotangent of the segment's state at its last row."""
        refs, kept, kernel = self._refs, self._kept, self._kernel
        query, key = (self._handed(name, item) for name in ("query", "key"))
        zero = jnp.zeros_like(query)
        row = index(query.shape, 0)
        mine = (row >= at.first) & (row < at.last)
        inside = refs.states[r, head, at.n].astype(F32)
        own = kept["state_in"][head] if "state_in" in kept else jnp.zeros_like(inside)
        state = jnp.where(at.begins, own, inside)
        both, dtype, passes = kept["both"][item], self._inverse_dtype, self._passes
        chunk = query.shape[0]
        d_query = d_key_read = d_key_written = zero
        if "state_in" in kept:
            reads = dot(both, own, NT, dtype, passes)
            factor = jnp.exp2(kept["before"][self._other, item])
            of_begun = mine & at.begins
            d_query = jnp.where(of_begun, rows(reads, 0, chunk) * (factor * scale), 0.0)
            d_key_read = jnp.where(of_begun, rows(reads, chunk, chunk) * factor, 0.0)
        if "d_in" in kept:
            written = dot(kept["written"][item], kept["d_in"][head], NT, dtype, passes)
            factor = jnp.exp2(kept["after"][self._other, item])
            d_key_written = jnp.where(mine & ~at.goes_on, written * factor, 0.0)
        key_head = quotient(head, self._cut.extent.ratio) if self._cut.extent.ratio > 1 else head
        for name, operand, gradient in (
            ("query", query, d_query),
            ("key", key, d_key_read + d_key_written),
        ):
            if kernel.wants(name):
                if kernel.handover.norms:
                    along = lane_sums(
                        (operand * gradient).astype(self._dtype), operand.shape[1], self._dtype
                    )
                    norm = self._handed(f"{name}_norm", item)
                    gradient = normalized(operand, norm, gradient, along)
                self._add(f"d_{name}", r, key_head, at.n, gradient)
        if not kernel.wants_decay:
            return
        later, earlier = query * d_query + key * d_key_read, key * d_key_written
        column = index((chunk, chunk), 1)
        tokens = index((chunk, chunk), 0)
        ones = beside([(column >= tokens).astype(F32), (column < tokens).astype(F32)])
        split = 1 if self._exact else 2
        summed = dot(
            beside([ones[:, :chunk]] * split + [ones[:, chunk:]] * split),
            stack([parts(later, split), parts(earlier, split)]),
            dtype=self._dtype,
        )
        carried = jnp.sum(jnp.transpose(state * behind), axis=0, keepdims=True)
        carried = carried * jnp.exp2(kept["before"][self._other, item, pl.ds(at.last - 1, 1), :])
        log_decay = jnp.where(mine, summed + carried, 0.0)
        by_gate = log_decay * self._handed("by_gate", item)
        if kernel.wants("gate"):
            self._add("d_gate", r, head, at.n, by_gate)
        if kernel.wants_rows:
            by_rate = jnp.zeros_like(by_gate)
            if kernel.wants("a_log"):
                by_rate = log_decay * self._handed("by_log_rate", item)
            refs.d_rows[head] += stack(
                [jnp.sum(x, axis=0, keepdims=True) for x in (by_rate, by_gate)]
            )

    def _add(self, name: str, r: int, head: Any, n: Any, x: jax.Array) -> None:
        """Adds [C, K] f32 to the rows of a chunk of one head in the window of a gradient."""
        ref = getattr(self._refs, name)
        chunk, width = self._geometry.chunk, self._cut.extent.key_dim
        tokens = pl.ds(pl.multiple_of(n * chunk, chunk), chunk)
        where: tuple[Any, ...] = (head, r, tokens, slice(None))
        if self._cut.flat:
            lanes = head * width if isinstance(head, int) else pl.multiple_of(head * width, LANES)
            where = (r, tokens, pl.ds(lanes, width))
        ref[where] = (ref[where].astype(F32) + x[:, :width]).astype(ref.dtype)

    def _pass_by(self, r: int, segment: Any) -> None:
        """The gradient of the initial state of an empty segment: the cotangent of its final one."""
        out = self._kept["d_out"]
        if "d_in" in self._kept:
            pltpu.sync_copy(self._walk.state(self._refs.d_final, r, segment), out)
        else:
            out[...] = jnp.zeros_like(out)
        pltpu.sync_copy(out, self._walk.state(self._refs.d_initial, r, segment))

    @property
    def _inverse_dtype(self) -> DTypeLike:
        return jnp.dtype(self._kernel.handover.inverse_dtype)

    @property
    def _passes(self) -> int:
        return FULL if self._exact else SPLIT

    def _handed(self, name: str, item: Any) -> jax.Array:
        return self._refs.handed[name][self._other, item]

    def _left(self, item: Any, at: Visited) -> jax.Array:
        """What is left of a state where a segment ends in a chunk, [KP, 1] f32."""
        return left(self._kept["before"], (self._other, item), at.last - 1)
