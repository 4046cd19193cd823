"""One grid step of the fused forward: what its stages load, hand over, keep and store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kdagen.kernels import recurrence
from kdagen.kernels.geometry import Cut, Geometry, widened
from kdagen.kernels.inverse import on_diagonal
from kdagen.kernels.lanes import BF16, F32, beside, index, remainder, stack
from kdagen.kernels.packing import Segments
from kdagen.kernels.pipeline import DRAIN
from kdagen.kernels.segment_states import SegmentStates


@dataclass(frozen=True)
class Forward:
    """What a generated forward kernel takes and keeps.

    Attributes:
      geometry: its cuts.
      gate_rows: whether the gate is raw, with a rate and a bias of each channel.
      initial_state, final_state: whether they are operands, one of each a segment if packed.
      packed: whether the call has segments, see ``kdagen.kernels.packing``.
      wide_inverse: the inverse is formed and applied in f32, and so are the products after it.
      ends: steps at either end of a sweep that have code of their own, see
        ``kdagen.kernels.pipeline``.
      states: dtype of the kept states at the start of every chunk, None to keep none.
      keep_inverse, keep_corrected, keep_gate: further residual outputs, see ``Results``.
    """

    geometry: Geometry
    gate_rows: bool
    initial_state: bool
    final_state: bool
    packed: bool
    wide_inverse: bool
    ends: int = 0
    states: str | None = None
    keep_inverse: bool = False
    keep_corrected: bool = False
    keep_gate: bool = False

    @property
    def segment_states(self) -> bool:
        """Whether segments have states of their own."""
        return self.packed and (self.initial_state or self.final_state)

    @property
    def inverse_dtype(self) -> Any:
        """The dtype of the inverse and of what corrected values are multiplied with."""
        return F32 if self.wide_inverse else BF16


class Refs(NamedTuple):
    """The kernel's references; a field is None where the call has no such operand.

    ``final`` [rows, 1, heads, K, V] is where the states are kept all along, and ``state``, of the
    same shape, where there is none. ``gate_rows`` [2, heads, K] are rates and biases, ``beta_rows``
    [packs, 128] what ``Step.arrange`` makes of a beta that is taken as it was given.
    """

    query: Any
    key: Any
    value: Any
    gate: Any
    beta: Any
    a_log: Any
    bias: Any
    spans: Any
    lengths: Any
    table: Any
    initial: Any
    output: Any
    final: Any
    segment_finals: Any
    kept_states: Any
    kept_inverse: Any
    kept_corrected: Any
    kept_gate: Any
    state: Any
    gate_rows: Any
    beta_rows: Any
    edges: Any
    token_rows: Any
    decayed: Any
    keys_to_end: Any
    query_relations: Any
    totals: Any
    key_relations: Any
    inverses: Any
    totals_within: Any
    decayed_within: Any
    seen_within: Any
    state_within: Any
    state_in: Any
    keys_within: Any
    strengths_within: Any
    corrected: Any
    state_before: Any
    state_out: Any

    @property
    def states(self) -> Any:
        """[rows, 1, heads, KP, VP] f32."""
        return self.state if self.final is None else self.final


class Step:
    """One grid step as the stages see it: loads, stores and hand-over by item or pack.

    ``step`` is its number, ``scale`` and ``lower_bound`` are the call's. See
    ``kdagen.kernels.geometry`` for items.
    """

    def __init__(
        self,
        kernel: Forward,
        cut: Cut,
        refs: Refs,
        step: jax.Array,
        scale: float,
        lower_bound: float | None,
        states: SegmentStates | None = None,
    ):
        self.scale, self.lower_bound = scale, lower_bound
        self._kernel, self._geometry, self._cut, self._refs = kernel, kernel.geometry, cut, refs
        # blocks t and t - 2 use one slot, block t - 1 the other
        self._slot, self._other = remainder(step, 2), remainder(step + 1, 2)
        self._entering = jnp.minimum(step, cut.blocks - 1)
        self._leaving = step - DRAIN
        self._segments = Segments(cut, refs.edges, refs.token_rows) if kernel.packed else None
        self._states = states

    def items(self, pack: int) -> range:
        """The chunk-heads of a pack."""
        return range(pack * self._geometry.per_pack, (pack + 1) * self._geometry.per_pack)

    def query(self, item: int) -> jax.Array:
        """[C, KP] f32 of the entering block, KP being K in whole registers.

        0 past K and past the end of the sequence, as all that follow.
        """
        return self._load(self._refs.query, self._cut.key_index(item), self._entering, item)

    def key(self, item: int) -> jax.Array:
        """[C, KP] f32 of the entering block."""
        return self._load(self._refs.key, self._cut.key_index(item), self._entering, item)

    def gate(self, item: int) -> jax.Array:
        """[C, KP] f32 of the entering block."""
        where = self._cut.index(item, self._cut.extent.key_dim)
        return self._load(self._refs.gate, where, self._entering, item)

    def gate_rows(self, item: int) -> tuple[jax.Array, jax.Array]:
        """exp(a_log) and the bias of a raw gate, rows [1, KP] f32."""
        *_, head = self._geometry.place(item)
        rate, bias = (self._refs.gate_rows[i, head : head + 1, :] for i in range(2))
        return rate, bias

    def beta(self, pack: int) -> jax.Array:
        """[1, 128] f32 of the entering block, chunk-heads side by side; 0 past the end."""
        if self._segments is not None:
            return self._segments.strengths(pack)
        ref = self._refs.beta if self._refs.beta_rows is None else self._refs.beta_rows
        return ref[pack : pack + 1, :]

    def arrange(self, row: jax.Array) -> None:
        """What the relations take of tokens as rows of lanes, ahead of all stages: taken where they
        are used, lanes of single heads cost twice as much.

        ``row`` is the group of batch rows of the program.
        """
        refs = self._refs
        strengths = self._given_beta()
        if self._segments is not None:
            self._segments.arrange(refs.spans, refs.lengths, row, self._entering, strengths)
        elif refs.beta_rows is not None:
            for pack in range(self._geometry.packs):
                refs.beta_rows[pack : pack + 1, :] = strengths(pack)

    def _given_beta(self) -> Callable[[int], jax.Array]:
        """Reader of beta by pack, [1, 128] f32."""
        if not self._cut.lanes_as_given:
            return lambda pack: self._refs.beta[pack : pack + 1, :]
        given = self._refs.beta[...].astype(F32)

        def mine(pack: int) -> jax.Array:
            lanes = [(given[self._cut.lane_index(item)], item) for item in self.items(pack)]
            return beside([self._inside(x, self._entering, item, axis=1) for x, item in lanes])

        return mine

    def inside(self, x: jax.Array, item: int) -> jax.Array:
        """x [C, D] f32 of the entering block, with 0 in rows past the end of the sequence."""
        return self._inside(x, self._entering, item)

    def _inside(self, x: jax.Array, block, item: int, axis: int = 0) -> jax.Array:
        geometry, tokens = self._geometry, self._cut.extent.tokens
        # of packed sequences nothing but zeros lies there, see ``packing.clear_padding``
        if tokens % geometry.block == 0 or self._kernel.packed:
            return x
        n, *_ = geometry.place(item)
        left = tokens - block * geometry.block - n * geometry.chunk
        return jnp.where(index(x.shape, axis) < left, x, 0.0)

    def _load(self, ref, where, block, item: int) -> jax.Array:
        return widened(self._inside(ref[where].astype(F32), block, item))

    def keep_gate(self, item: int, sums: jax.Array) -> None:
        """Keeps the sums [C, KP] f32 of the log2 decay."""
        width = self._cut.extent.key_dim
        self._refs.kept_gate[self._cut.index(item, width)] = sums[:, :width]

    def store_factors(self, pack: int, factors) -> None:
        """Hands the decayed operands of a pack of the entering block over to its recurrence."""
        refs, slot, operand = self._refs, self._slot, self._geometry.operand
        segments = self._segments
        beta = self.beta(pack) if segments is None else segments.last_strengths(pack)
        ends, totals = [], []
        for item, factor in zip(self.items(pack), factors, strict=True):
            ready = factor.chunk_factors(self.scale)
            decayed, total = stack([ready.query_decayed, ready.key_decayed]), ready.total
            if segments is not None:
                decayed = segments.incoming(decayed, item)
                total = segments.through(total, item)
            refs.decayed[slot, item] = decayed.astype(operand)
            ends.append(ready.key_to_end)
            totals.append(total)
        refs.keys_to_end[slot, pack] = (jnp.transpose(stack(ends)) * beta).astype(
            refs.keys_to_end.dtype
        )
        unused = jnp.zeros((refs.totals.shape[2] - len(totals), totals[0].shape[1]), F32)
        refs.totals[slot, pack] = stack([*totals, unused])

    def store_relations(
        self, pack: int, query_relations: jax.Array, key_relations: jax.Array
    ) -> None:
        """Hands the relations of a pack of the entering block over to inverse and recurrence."""
        refs, slot = self._refs, self._slot
        beta = self.beta(pack)
        if self._segments is not None:
            query_relations, key_relations = (
                self._segments.related(x, pack) for x in (query_relations, key_relations)
            )
        scaled = query_relations * (beta * self.scale)
        refs.query_relations[slot, pack] = scaled.astype(refs.query_relations.dtype)
        refs.key_relations[slot, pack] = key_relations * -beta

    def key_relations(self, pack: int) -> Callable[[int, int], jax.Array]:
        """Reader of rows (start, count) of -N diag(b) [C, 128] f32 of the block in between."""
        ref, slot = self._refs.key_relations, self._other
        return lambda start, count: ref[slot, pack, start : start + count, :]

    def store_inverse(self, pack: int, made: jax.Array) -> None:
        """Hands the inverse of a pack less the identity, [C, 128], over to its recurrence."""
        self._refs.inverses[self._other, pack] = made
        if self._refs.kept_inverse is not None:
            whole = jnp.where(on_diagonal(self._geometry.chunk), 1.0, made.astype(F32))
            self._refs.kept_inverse[pack] = whole.astype(self._refs.kept_inverse.dtype)

    def recurrence(self, group: int) -> Generator[None, None, None]:
        """Outputs and states of one group of items of the leaving block, see ``Geometry``."""
        refs, slot, geometry = self._refs, self._slot, self._geometry
        items = range(group * geometry.together, (group + 1) * geometry.together)
        pack, first = divmod(items[0], geometry.per_pack)
        lanes = slice(first * geometry.chunk, (first + len(items)) * geometry.chunk)
        width = self._cut.extent.value_dim
        if refs.kept_states is not None:
            for item in items:
                n, row, head = geometry.place(item)
                kept = refs.states[self._cut.state_index(item)].astype(refs.kept_states.dtype)
                refs.kept_states[row, head, n] = kept

        def emit(ref: Any, i: int, x: jax.Array) -> None:
            if ref is not None:
                ref[self._cut.index(items[i], width)] = x[:, :width].astype(ref.dtype)

        def keep(i: int, x: jax.Array) -> None:
            emit(refs.kept_corrected, i, x)
            if self._states is not None:
                self._states.keep_corrected(items[i], x)

        def value(item: int) -> jax.Array:
            return self._load(refs.value, self._cut.index(item, width), self._leaving, item)

        def decay(item: int) -> jax.Array:
            x = item % geometry.per_pack
            return jnp.transpose(jnp.exp2(refs.totals[slot, pack]))[:, x : x + 1]

        def each(read: Callable[[int], jax.Array]) -> list[Callable[[], jax.Array]]:
            return [functools.partial(read, item) for item in items]

        handover = recurrence.Handover(
            decayed=each(lambda item: refs.decayed[slot, item]),
            value=each(value),
            inverse=lambda: refs.inverses[slot, pack, :, lanes],
            relations=lambda: refs.query_relations[slot, pack, :, lanes],
            keys_to_end=lambda: refs.keys_to_end[slot, pack, :, lanes],
            decay=each(decay),
        )
        if refs.seen_within is not None:
            handover.seen = each(lambda item: refs.seen_within[item])
            handover.left = each(lambda item: refs.state_within[item])
        yield from recurrence.advance(
            handover,
            refs.states,
            [self._cut.state_index(item) for item in items],
            functools.partial(emit, refs.output),
            keep=keep,
            dtype=geometry.operand,
            inverse_dtype=self._kernel.inverse_dtype,
        )
