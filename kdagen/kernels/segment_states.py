"""Initial and final states of the segments of a packed forward, one of each a segment.

A chunk knows one state, that of the segment which was open at its start. Where others begin in it,
what their tokens see of their initial states is formed ahead of the recurrence, which adds it; and
where segments end in it, their final states are formed after it, from what the recurrence left.
Both walk the segments of a block one by one, and most blocks have none that begins or ends.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdagen.kernels.geometry import Cut, padded
from kdagen.kernels.lanes import F32, FULL, SPLIT, dot, index, remainder, stack
from kdagen.kernels.segment_walk import BEGIN, END, Prepare, Visited, Walk, left

SLOTS = 3
"""Blocks of which ``totals_within`` and ``keys_within`` are kept: the last is read after the
relations of the block two steps later are written."""


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

    def __init__(self, cut: Cut, refs: Mapping[str, Any], walk: Walk, step: Any, drain: int):
        self._cut, self._geometry, self._refs, self._walk = cut, cut.geometry, refs, walk
        self._leaving = jnp.maximum(step - drain, 0)
        self._entering = jnp.minimum(step, cut.blocks - 1)
        self._enters = step < cut.blocks
        self._active = step >= drain
        self._slot = remainder(step, 2)
        self._entering_slot = remainder(step, SLOTS)
        self._leaving_slot = remainder(step + SLOTS - drain, SLOTS)

    def prepare(
        self, prepare: Prepare, scale: float, lower_bound: float | None, dtype: Any
    ) -> None:
        """Forms what the states of segments take of the entering block, if any begins or ends."""
        prepared = functools.partial(
            self._walk.prepare,
            block=self._entering,
            refs=self._refs,
            prepare=prepare,
            gate_rows=self._gate_rows,
            lower_bound=lower_bound,
            dtype=dtype,
            keep=functools.partial(self._keep, scale),
        )
        for r in self._walk.rows:
            busy = self._walk.busy(r, self._entering) & self._enters
            pl.when(busy)(functools.partial(prepared, r))

    def _gate_rows(self, head: Any) -> tuple[jax.Array, ...]:
        if "gate_rows" not in self._refs:
            return ()
        return tuple(self._refs["gate_rows"][i, pl.ds(head, 1), :] for i in range(2))

    def _keep(
        self, scale: float, item: Any, query: Any, key: Any, before: jax.Array, after: jax.Array
    ) -> None:
        refs, slot = self._refs, self._entering_slot
        refs["totals_within"][slot, item] = before
        if "decayed_within" in refs:
            factor = jnp.exp2(before)
            both = stack([query * (factor * scale), key * factor])
            ref = refs["decayed_within"]
            ref[self._slot, item] = both.astype(ref.dtype)
        if "keys_within" in refs:
            ref = refs["keys_within"]
            ref[slot, item] = jnp.transpose(key * jnp.exp2(after)).astype(ref.dtype)

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
        if "corrected" in self._refs:
            ref = self._refs["corrected"]
            ref[item] = x.astype(ref.dtype)

    def begin(self, states: Any, dtype: Any) -> None:
        """Ahead of the recurrence: what it is to add, and the states before it."""
        if "state_before" in self._refs:
            for r in self._walk.rows:

                @pl.when(self._active & (self._walk.of_block(r, self._leaving, END) > 0))
                def _(r=r):
                    heads = self._geometry.heads
                    self._refs["state_before"][r * heads : (r + 1) * heads] = states[r, 0]

        if "seen_within" not in self._refs:
            return
        before = jnp.maximum(self._leaving - 1, 0)
        for r in self._walk.rows:
            begun = self._walk.of_block(r, self._leaving, BEGIN) > 0
            stale = (self._leaving == 0) | (self._walk.of_block(r, before, BEGIN) > 0)

            @pl.when(self._active & (begun | stale))
            def _(r=r):
                self._walk.forget(r, (self._refs["seen_within"], self._refs["state_within"]))

            @pl.when(self._active & begun)
            def _(r=r):
                visit = functools.partial(self._begin, r, dtype)
                self._walk.each(r, self._leaving, visit, begins=True)

    def _begin(self, r: int, dtype: Any, at: Visited) -> None:
        """What the tokens of a segment that begins see of its initial state."""
        refs, walk, chunk = self._refs, self._walk, self._geometry.chunk
        pltpu.sync_copy(walk.state(refs["initial"], r, at.segment), refs["state_in"])

        def of_heads(heads: list[Any]) -> None:
            items = [walk.item(at.n, r, head) for head in heads]
            states = [refs["state_in"][head] for head in heads]
            found = [
                dot(refs["decayed_within"][self._slot, item], state, dtype=dtype)
                for item, state in zip(items, states, strict=True)
            ]
            row = remainder(index(found[0].shape, 0), chunk)
            mine = (row >= at.first) & (row < at.last)
            ref = refs["seen_within"]
            seen = [jnp.where(mine, x, ref[i]) for x, i in zip(found, items, strict=True)]
            after = [x * self._left(i, at) for x, i in zip(states, items, strict=True)]
            for item, x, state in zip(items, seen, after, strict=True):
                ref[item] = x
                # of one that ends in the chunk the next one does not see this
                refs["state_within"][item] = jnp.where(at.goes_on, state, 0.0)

        walk.each_head(of_heads)

    def end(self, inverse_dtype: Any, exact: bool) -> None:
        """After the recurrence: the final states of segments that end in the leaving block."""
        if "state_before" not in self._refs:
            return
        passes = FULL if exact else SPLIT
        for r in self._walk.rows:
            # the rows of write strengths are there only now
            busy = self._walk.busy(r, self._entering) & self._enters
            pl.when(busy)(functools.partial(self._keep_strengths, r))

            @pl.when(self._active & (self._walk.of_block(r, self._leaving, END) > 0))
            def _(r=r):
                visit = functools.partial(self._end, r, inverse_dtype, passes)
                self._walk.each(r, self._leaving, visit, ends=True)
                self._walk.each_empty(r, self._leaving, functools.partial(self._pass_by, r))

    def _end(self, r: int, inverse_dtype: Any, passes: int, at: Visited) -> None:
        """The state of a segment at its end, or at that of the chunk."""
        refs, walk, geometry = self._refs, self._walk, self._geometry
        if "state_in" in refs:

            @pl.when(at.begins)
            def _():
                pltpu.sync_copy(walk.state(refs["initial"], r, at.segment), refs["state_in"])

        place = r * geometry.heads

        def of_heads(heads: list[Any]) -> None:
            items = [walk.item(at.n, r, head) for head in heads]
            states = []
            for head, item in zip(heads, items, strict=True):
                state = refs["state_before"][place + head]
                own = refs["state_in"][head] if "state_in" in refs else jnp.zeros_like(state)
                states.append(jnp.where(at.begins, own, state) * self._left(item, at))
            written = [self._written(item, at, inverse_dtype, passes) for item in items]
            for head, state, more in zip(heads, states, written, strict=True):
                refs["state_out"][head] = state + more

        walk.each_head(of_heads)

        @pl.when(at.goes_on)
        def _():
            refs["state_before"][place : place + geometry.heads] = refs["state_out"][...]

        @pl.when(~at.goes_on)
        def _():
            finals = walk.state(refs["segment_finals"], r, at.segment)
            pltpu.sync_copy(refs["state_out"], finals)

    def _pass_by(self, r: int, segment: Any) -> None:
        """The final state of an empty segment, which is its initial one, or 0."""
        refs, state = self._refs, self._refs["state_out"]
        if "initial" in refs:
            pltpu.sync_copy(self._walk.state(refs["initial"], r, segment), state)
        else:
            state[...] = jnp.zeros_like(state)
        pltpu.sync_copy(state, self._walk.state(refs["segment_finals"], r, segment))

    def _left(self, item: Any, at: Visited) -> jax.Array:
        """What is left of a state where a segment ends in a chunk, [KP, 1] f32."""
        return left(self._refs["totals_within"], (self._leaving_slot, item), at.last - 1)

    def _written(self, item: Any, at: Visited, dtype: Any, passes: int) -> jax.Array:
        """What a segment has written in a chunk by its end, or that of the chunk: [KP, VP] f32."""
        keys = self._refs["keys_within"][self._leaving_slot, item].astype(F32)
        lane = index(keys.shape, 1)
        written = keys * self._refs["strengths_within"][self._leaving_slot, item]
        written = jnp.where((lane >= at.first) & (lane < at.last), written, 0.0)
        return dot(written, self._refs["corrected"][item], dtype=dtype, passes=passes)
