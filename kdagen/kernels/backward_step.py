"""One grid step of the fused backward: what its stages load, keep, accumulate and store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from kdagen.kernels import decay_tree, packing
from kdagen.kernels.geometry import Cut, Geometry, widened
from kdagen.kernels.handover import Handover
from kdagen.kernels.lanes import F32, index, remainder, stack
from kdagen.kernels.packing import Segments
from kdagen.kernels.tiling import LANES

DRAIN = 1
"""Grid steps after the last block has entered."""


@dataclass(frozen=True)
class Backward:
    """What a generated backward kernel takes and gives.

    Attributes:
      geometry: its cuts.
      wanted: names of the gradients that it computes, those of ``kdagen.kernels.backward.call``.
      gate_rows: whether rate and bias of a raw gate are operands.
      output_cotangent, state_cotangent: whether they are operands; an absent one is 0.
      packed: whether the call has segments, see ``kdagen.kernels.packing``.
      segment_states: whether they have states of their own, initial ones or final ones with a
        cotangent.
      keep_inverse, keep_corrected: whether the forward kept them and they are operands; they are
        formed again where it did not.
      handover: what it hands from the relations to the rest.
    """

    geometry: Geometry
    wanted: frozenset[str]
    gate_rows: bool
    output_cotangent: bool
    state_cotangent: bool
    packed: bool
    segment_states: bool
    keep_inverse: bool
    keep_corrected: bool
    handover: Handover

    def wants(self, *names: str) -> bool:
        """Whether any of these gradients is asked for."""
        return not self.wanted.isdisjoint(names)

    @property
    def wants_decay(self) -> bool:
        """Whether anything needs the gradient of the log decay."""
        return self.wants("gate", "a_log", "delta_time_bias")

    @property
    def wants_chunk(self) -> bool:
        """Whether anything but the recurrence of the state's cotangent is needed."""
        return self.wants("query", "key", "beta") or self.wants_decay

    @property
    def wants_rows(self) -> bool:
        """Whether anything is summed over the tokens of a head."""
        return self.wants("a_log", "delta_time_bias")


class Refs(NamedTuple):
    """The kernel's references; a field is None where the call has no such operand."""

    query: Any
    key: Any
    value: Any
    gate: Any
    beta: Any
    spans: Any
    lengths: Any
    table: Any
    initial: Any
    gate_rows: Any
    d_output: Any
    states: Any
    inverse: Any
    corrected: Any
    d_final: Any
    d_query: Any
    d_key: Any
    d_value: Any
    d_gate: Any
    d_beta: Any
    d_initial: Any
    d_rows: Any
    d_state: Any
    edges: Any
    token_rows: Any
    within: Any
    handed: Any


def absent(kernel: Backward) -> dict[str, bool]:
    """Which fields of ``Refs`` a call has not."""
    return {
        "value": kernel.keep_corrected or not kernel.wants_chunk,
        **dict.fromkeys(("spans", "lengths", "edges", "token_rows"), not kernel.packed),
        "table": not kernel.segment_states,
        "initial": not (kernel.handover.initial and kernel.handover.written),
        "gate_rows": not kernel.gate_rows,
        "d_output": not kernel.output_cotangent,
        "inverse": not kernel.keep_inverse,
        "states": not kernel.wants_chunk,
        "corrected": not kernel.keep_corrected or not kernel.wants_chunk,
        "d_final": not kernel.state_cotangent,
        "d_query": not kernel.wants("query"),
        "d_key": not kernel.wants("key"),
        "d_value": not kernel.wants("value"),
        "d_gate": not kernel.wants("gate"),
        "d_beta": not kernel.wants("beta"),
        "d_initial": not kernel.wants("initial_state"),
        "d_rows": not kernel.wants_rows,
    }


class Step:
    """One grid step as the stages see it: relations of one block, the rest of the block after it.

    Items are numbered as in ``kdagen.kernels.geometry``. Widths are whole registers, with zeros
    past the tensors' own; rows past the end of the sequence are 0. Queries, keys and gates are
    those of the entering block, all else is of the leaving one, which is one step, and so one block
    of tokens, behind: blocks come from the last to the first.

    Attributes:
      kernel, scale, lower_bound: of the call.
      segments: of the entering block, or None.
      entering, leaving: numbers of the two blocks.
      states: a ``kdagen.kernels.backward_states.BackwardStates``, or None.
      d_state: scratch [streams, KP, VP] f32, the cotangent of each stream's state.
    """

    def __init__(
        self, kernel: Backward, cut: Cut, refs: Refs, scale: float, lower_bound: float | None
    ):
        self.kernel, self.scale, self.lower_bound = kernel, scale, lower_bound
        self._geometry, self._cut, self._refs = kernel.geometry, cut, refs
        self.d_state = refs.d_state
        step, last = pl.program_id(2), pl.num_programs(2) - 1 - DRAIN
        self.entering = last - jnp.minimum(step, last)
        self.leaving = last - jnp.maximum(step - DRAIN, 0)
        self.segments = Segments(cut, refs.edges, refs.token_rows) if kernel.packed else None
        self.states: Any = None
        self._slot, self._other = remainder(step, 2), remainder(step + 1, 2)
        self._sums: dict[Any, list[Any]] = {}

    def hand_over(self, name: str, place: int, x: jax.Array, part: int | None = None) -> None:
        """Stores x for the leaving block of the next step; ``place`` is an item, or a pack."""
        ref = self._refs.handed[name]
        where = (self._slot, place) if part is None else (self._slot, place, part)
        ref[where] = x.astype(ref.dtype)

    def of_chunk(self, name: str, item: int) -> jax.Array | None:
        """What was handed over for the chunk and batch row of an item, if it is handed over."""
        if name not in self._refs.handed:
            return None
        n, row, _ = self._geometry.place(item)
        return self.handed(name, n * self._geometry.rows + row)

    def handed(self, name: str, place: int, part: int | None = None) -> jax.Array:
        """What was handed over for the leaving block."""
        return self._refs.handed[name][
            (self._other, place) if part is None else (self._other, place, part)
        ]

    def items(self, pack: int) -> range:
        """The items of a pack."""
        return range(pack * self._geometry.per_pack, (pack + 1) * self._geometry.per_pack)

    def stream(self, item: int) -> int:
        """The stream of an item."""
        return item % self._geometry.streams

    def query(self, item: int) -> jax.Array:
        """[C, KP] f32."""
        return self._load(self._refs.query, self._cut.key_index(item), item, self.entering)

    def key(self, item: int) -> jax.Array:
        """[C, KP] f32."""
        return self._load(self._refs.key, self._cut.key_index(item), item, self.entering)

    def value(self, item: int) -> jax.Array:
        """[C, VP] f32."""
        return self._load(self._refs.value, self._value_index(item), item, self.leaving)

    def gate(self, item: int) -> jax.Array:
        """[C, KP] f32."""
        return self._load(self._refs.gate, self._gate_index(item), item, self.entering)

    def d_output(self, item: int, dtype: DTypeLike) -> jax.Array:
        """[C, VP] in ``dtype``."""
        geometry, extent = self._geometry, self._cut.extent
        if self._refs.d_output is None:
            return jnp.zeros((geometry.chunk, self.d_state.shape[2]), dtype)
        where = self._value_index(item)
        whole = extent.tokens % geometry.block == 0 or self.kernel.packed
        if whole and extent.value_dim % LANES == 0:
            # as it lies: there and back it would pass through f32
            return self._refs.d_output[where].astype(dtype)
        return self._load(self._refs.d_output, where, item, self.leaving).astype(dtype)

    def corrected(self, item: int) -> jax.Array:
        """E [C, VP] f32 that the forward kept."""
        return self._load(self._refs.corrected, self._value_index(item), item, self.leaving)

    def inverse(self, pack: int) -> jax.Array:
        """(I + N diag(b))^-1 [C, 128] of a pack of the entering block, that the forward kept."""
        return self._refs.inverse[divmod(pack, self._refs.inverse.shape[1])]

    def state(self, item: int) -> jax.Array:
        """[KP, VP], at the start of the chunk."""
        n, row, head = self._geometry.place(item)
        return self._refs.states[row, head, n]

    def beta(self, pack: int) -> jax.Array:
        """[1, 128] f32 of a pack of the entering block."""
        return self._given_beta(pack) if self.segments is None else self.segments.strengths(pack)

    def _given_beta(self, pack: int) -> jax.Array:
        return self._refs.beta[pack : pack + 1, :]

    def arrange(self, row: jax.Array) -> None:
        """What the relations take of segments, ahead of all stages; ``row`` is the group of batch
        rows of the program."""
        refs, geometry = self._refs, self._geometry
        if self.segments is None:
            return
        self.segments.arrange(refs.spans, refs.lengths, row, self.entering, self._given_beta)
        if "of_one_segment" not in refs.handed:
            return
        chunk, base = geometry.chunk, self.kernel.handover.base
        for n in range(geometry.chunks):
            start = self.entering * geometry.block + n * chunk
            for r in range(geometry.rows):
                behind = refs.spans[r, 1:2, n * chunk : (n + 1) * chunk]
                ends = jnp.clip(behind - start, 0, chunk).astype(F32)
                alike = packing.of_one_segment(jnp.ones((chunk, chunk), F32), ends)
                self.hand_over("of_one_segment", n * geometry.rows + r, alike)
                if "reached" in refs.handed:
                    split = refs.handed["reached"].shape[-1] // (2 * chunk)
                    reached = decay_tree.reaching(chunk, base, split, ends)
                    self.hand_over("reached", n * geometry.rows + r, reached)

    def gate_rows(self, item: int) -> tuple[jax.Array, jax.Array]:
        """exp(a_log) and the bias of a raw gate, rows [1, KP] f32."""
        *_, head = self._geometry.place(item)
        return self._refs.gate_rows[head, 0:1, :], self._refs.gate_rows[head, 1:2, :]

    def inside(self, x: jax.Array, item: int, *, entering: bool = False) -> jax.Array:
        """x [C, D] f32 with 0 in rows past the end of the sequence."""
        return self._inside(x, item, self.entering if entering else self.leaving)

    def _inside(self, x: jax.Array, item: int, block: Any) -> jax.Array:
        geometry, tokens = self._geometry, self._cut.extent.tokens
        # of packed sequences nothing but zeros lies there, see ``packing.clear_padding``
        if tokens % geometry.block == 0 or self.kernel.packed:
            return x
        n, *_ = geometry.place(item)
        left = tokens - block * geometry.block - n * geometry.chunk
        return jnp.where(index(x.shape, 0) < left, x, 0.0)

    def _load(self, ref: Any, where: Any, item: int, block: Any) -> jax.Array:
        return widened(self._inside(ref[where].astype(F32), item, block))

    def _gate_index(self, item: int) -> Any:
        return self._cut.index(item, self._cut.extent.key_dim)

    def _value_index(self, item: int) -> Any:
        return self._cut.index(item, self._cut.extent.value_dim)

    def store_value(self, item: int, gradient: jax.Array) -> None:
        """Gradient [C, VP] of the values of an item."""
        _store(self._refs.d_value, self._value_index(item), gradient)

    def store_gate(self, item: int, gradient: jax.Array) -> None:
        """Gradient [C, KP] of the gate operand of an item."""
        _store(self._refs.d_gate, self._gate_index(item), gradient)

    def store_beta(self, pack: int, gradient: jax.Array) -> None:
        """Gradient [1, 128] of the write strengths of a pack."""
        self._refs.d_beta[pack : pack + 1, :] = gradient

    def store_query(self, item: int, gradient: jax.Array) -> None:
        """Gradient [C, KP] of the queries of an item, summed over the heads that share them."""
        _store(self._refs.d_query, self._cut.key_index(item), gradient)

    def store_key(self, item: int, gradient: jax.Array) -> None:
        """Gradient [C, KP] of the keys of an item, summed over the heads that share them."""
        _store(self._refs.d_key, self._cut.key_index(item), gradient)

    def summed(self, what: str, item: int, gradient: jax.Array) -> jax.Array | None:
        """The sum of ``gradient`` over the value heads of a group, once all of them have come."""
        n, row, head = self._geometry.place(item)
        ratio = self._cut.extent.ratio
        place = (what, n, row, head // ratio)
        so_far = self._sums.setdefault(place, [0, None])
        so_far[0] += 1
        so_far[1] = gradient if so_far[1] is None else so_far[1] + gradient
        return self._sums.pop(place)[1] if so_far[0] == ratio else None

    def add_rows(self, item: int, by_log_rate: jax.Array | None, by_bias: jax.Array) -> None:
        """Adds sums over the tokens of an item, each [1, KP] f32, to those of its head."""
        *_, head = self._geometry.place(item)
        if by_log_rate is None:
            by_log_rate = jnp.zeros_like(by_bias)
        self._refs.d_rows[head] += stack([by_log_rate, by_bias])


def _store(ref: Any, where: Any, x: jax.Array) -> None:
    width = ref.shape[-1] if isinstance(where[-1], slice) and where[-1] == slice(None) else None
    if width is None:
        width = where[-1].stop - where[-1].start
    ref[where] = x[:, :width].astype(ref.dtype)
