"""The fused forward kernel: stages, scratch and the call.

One Pallas call takes query, key, value, gate and beta to output and final state. Its grid is
(groups of batch rows, groups of heads, blocks of chunks + 2): block ``t`` of the relations,
``t - 1`` of the inverse and ``t - 2`` of the recurrence are computed in one step, see
``kdagen.emission``. The states of a program stay in VMEM from its first block to its last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdagen.kernels import lockstep, recurrence
from kdagen.kernels.geometry import Cut, Extent, Geometry, bias, padded, rate, widened
from kdagen.kernels.inverse import on_diagonal
from kdagen.kernels.lanes import BF16, F32, beside, index, remainder, stack
from kdagen.kernels.tiling import LANES

DRAIN = 2
"""Grid steps after the last block has entered the pipeline."""


@dataclass(frozen=True)
class Forward:
    """What a generated forward kernel takes and keeps.

    Attributes:
      geometry: its cuts.
      gate_rows: whether rate and bias of a raw gate are operands.
      initial_state, final_state: whether they are operands.
      wide_inverse: the inverse is formed and applied in f32, and so are the products after it.
      states: dtype of the kept states at the start of every chunk, None to keep none.
      keep_inverse, keep_corrected, keep_gate: further residual outputs, see ``Results``.
    """

    geometry: Geometry
    gate_rows: bool
    initial_state: bool
    final_state: bool
    wide_inverse: bool
    states: str | None = None
    keep_inverse: bool = False
    keep_corrected: bool = False
    keep_gate: bool = False

    @property
    def inverse_dtype(self) -> Any:
        """The dtype of the inverse and of what corrected values are multiplied with."""
        return F32 if self.wide_inverse else BF16


class Results(NamedTuple):
    """What a forward kernel returns; None where it was not asked for.

    Attributes:
      output: [HV, B, T, V] or [B, T, HV, V] as the layout, in query's dtype.
      final_state: [B, 1, HV, K, V] f32.
      states: [B, HV, chunks, KP, VP], before every chunk; KP and VP are K and V in whole registers
        of 128 lanes, and chunks those of all blocks.
      inverse: (I + N diag(b))^-1 [B / rows, groups, blocks, packs, C, 128], packs as in
        ``kdagen.kernels.geometry``.
      corrected: E, as the output, see ``kdagen.kernels.recurrence``.
      gate: log2 decay as the factorisation takes it (floored), summed from the start of its
        sub-block, as the gate, f32.
    """

    output: jax.Array
    final_state: jax.Array | None = None
    states: jax.Array | None = None
    inverse: jax.Array | None = None
    corrected: jax.Array | None = None
    gate: jax.Array | None = None


class Refs(NamedTuple):
    """The kernel's references; a field is None where the call has no such operand."""

    query: Any
    key: Any
    value: Any
    gate: Any
    beta: Any
    rate: Any
    bias: Any
    initial: Any
    output: Any
    final: Any
    kept_states: Any
    kept_inverse: Any
    kept_corrected: Any
    kept_gate: Any
    state: Any
    decayed: Any
    keys_to_end: Any
    query_relations: Any
    totals: Any
    key_relations: Any
    inverses: Any


class Step:
    """One grid step as the stages see it: loads, stores and hand-over by item or pack.

    ``scale`` and ``lower_bound`` are the call's. See ``kdagen.kernels.geometry`` for items.
    """

    def __init__(
        self, kernel: Forward, cut: Cut, refs: Refs, scale: float, lower_bound: float | None
    ):
        self.scale, self.lower_bound = scale, lower_bound
        self._kernel, self._geometry, self._cut, self._refs = kernel, kernel.geometry, cut, refs
        step = pl.program_id(2)
        # blocks t and t - 2 use one slot, block t - 1 the other
        self._slot, self._other = remainder(step, 2), remainder(step + 1, 2)
        self._entering = jnp.minimum(step, pl.num_programs(2) - 1 - DRAIN)
        self._leaving = step - DRAIN

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
        mine = pl.program_id(1) * self._geometry.heads + head
        bias = widened(self._refs.bias[pl.ds(mine, 1), :])
        return jnp.full(bias.shape, self._refs.rate[mine], F32), bias

    def beta(self, pack: int) -> jax.Array:
        """[1, 128] f32 of the entering block, chunk-heads side by side; 0 past the end."""
        ref, cut = self._refs.beta, self._cut
        if not cut.lanes_as_given:
            return ref[pack : pack + 1, :]
        return beside(
            [
                self._inside(ref[cut.lane_index(item)].astype(F32), self._entering, item, axis=1)
                for item in self.items(pack)
            ]
        )

    def inside(self, x: jax.Array, item: int) -> jax.Array:
        """x [C, D] f32 of the entering block, with 0 in rows past the end of the sequence."""
        return self._inside(x, self._entering, item)

    def _inside(self, x: jax.Array, block, item: int, axis: int = 0) -> jax.Array:
        geometry, tokens = self._geometry, self._cut.extent.tokens
        if tokens % geometry.block == 0:
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
        beta = self.beta(pack)
        ends, totals = [], []
        for item, factor in zip(self.items(pack), factors, strict=True):
            ready = factor.chunk_factors(self.scale)
            decayed = stack([ready.query_decayed, ready.key_decayed])
            refs.decayed[slot, item] = decayed.astype(operand)
            ends.append(ready.key_to_end)
            totals.append(ready.total)
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
                kept = refs.state[item % geometry.streams].astype(refs.kept_states.dtype)
                refs.kept_states[row, head, n] = kept

        def emit(ref: Any, i: int, x: jax.Array) -> None:
            if ref is not None:
                ref[self._cut.index(items[i], width)] = x[:, :width].astype(ref.dtype)

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
        yield from recurrence.advance(
            handover,
            refs.state,
            [item % geometry.streams for item in items],
            functools.partial(emit, refs.output),
            keep=functools.partial(emit, refs.kept_corrected),
            dtype=geometry.operand,
            inverse_dtype=self._kernel.inverse_dtype,
        )


Stages = Callable[[Step], Mapping[str, Callable[[int], lockstep.Stage]]]


def _kernel(
    kernel: Forward,
    cut: Cut,
    stages: Stages,
    slots,
    scale: float,
    lower_bound: float | None,
    *operands,
) -> None:
    """Body of one grid step. ``operands`` are the references in the order of ``Refs``."""
    given = iter(operands)
    absent = {
        "rate": not kernel.gate_rows,
        "bias": not kernel.gate_rows,
        "initial": not kernel.initial_state,
        "final": not kernel.final_state,
        "kept_states": kernel.states is None,
        "kept_inverse": not kernel.keep_inverse,
        "kept_corrected": not kernel.keep_corrected,
        "kept_gate": not kernel.keep_gate,
    }
    refs = Refs(*(None if absent.get(name) else next(given) for name in Refs._fields))
    geometry = kernel.geometry
    row, group, step = (pl.program_id(i) for i in range(3))
    mine = pl.ds(group * geometry.heads, geometry.heads)
    rows = [
        (row * geometry.rows + r, pl.ds(r * geometry.heads, geometry.heads))
        for r in range(geometry.rows)
    ]

    # the recurrence of the first block begins: scratch still holds another program's state
    @pl.when(step == DRAIN)
    def _():
        if refs.initial is None:
            refs.state[...] = jnp.zeros_like(refs.state)
        else:
            for batch, streams in rows:
                pltpu.sync_copy(refs.initial.at[batch, 0, mine], refs.state.at[streams])

    lockstep.run(slots, stages(Step(kernel, cut, refs, scale, lower_bound)))

    if refs.final is not None:

        @pl.when(step == pl.num_programs(2) - 1)
        def _():
            for batch, streams in rows:
                pltpu.sync_copy(refs.state.at[streams], refs.final.at[batch, 0, mine])


def call(
    kernel: Forward,
    stages: Stages,
    slots,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    a_log: jax.Array | None,
    delta_time_bias: jax.Array | None,
    initial_state: jax.Array | None,
    *,
    scale: float,
    lower_bound: float | None,
    interpret: Any = False,
) -> Results:
    """Runs the kernel.

    Shapes are those of layout "HBTD"; "BTHD" takes [B, T, H, D] and, for beta, [B, T, HV].

    Args:
      kernel: of the generated module.
      stages: makes the three stages from a grid step; slots: the order of their segments.
      query, key: [H, B, T, K]; gate: [HV, B, T, K]; value: [HV, B, T, V]; beta: [HV, B, T]. Value
        head j reads query and key head j // (HV / H).
      a_log: [HV] f32 or None (a rate of 1); delta_time_bias: [HV, K] f32 or None.
      initial_state: [B, 1, HV, K, V] f32, given exactly where ``kernel.initial_state``.
      scale: of the queries.
      lower_bound: of a bounded gate.
      interpret: False, True or ``pltpu.InterpretParams()``.
    """
    geometry = kernel.geometry
    extent = Extent.of(geometry.layout, query, value)
    cut = Cut(geometry, extent)
    key_dim, value_dim = extent.key_dim, extent.value_dim
    state_shape = (padded(key_dim), padded(value_dim))
    last = cut.blocks - 1
    entering = lambda step: jnp.minimum(step, last)  # noqa: E731
    between = lambda step: jnp.clip(step - 1, 0, last)  # noqa: E731
    leaving = lambda step: jnp.maximum(step - DRAIN, 0)  # noqa: E731

    whole = pl.BlockSpec(memory_space=pl.ANY)
    in_specs = [
        cut.key_tensor(entering),
        cut.key_tensor(entering),
        cut.tensor(value_dim, leaving),
        cut.tensor(key_dim, entering),
    ]
    operands = [cut.view(x) for x in (query, key, value, gate)]
    # of tens of microseconds, the few operations that arrange an operand take a share that counts
    if cut.lanes_as_given:
        in_specs.append(cut.lanes(entering))
        operands.append(beta)
    else:
        in_specs.append(cut.per_pack((LANES,), entering))
        operands.append(cut.lane_rows(beta))
    if kernel.gate_rows:
        heads = extent.value_heads
        in_specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
        in_specs.append(pl.BlockSpec((heads, key_dim), lambda row, group, step: (0, 0)))
        operands += [rate(a_log, heads), bias(delta_time_bias, heads, key_dim)]
    if kernel.initial_state:
        assert initial_state is not None
        in_specs.append(whole)
        operands.append(_whole_registers(initial_state, state_shape))
    # inside shard_map the results vary over the mesh as the operands do
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    struct = functools.partial(
        jax.ShapeDtypeStruct, manual_axis_type=jax.sharding.ManualAxisType(varying=axes)
    )
    heads, inverse_shape = extent.value_heads, (geometry.chunk, LANES)
    specs = {"output": cut.tensor(value_dim, leaving)}
    shapes = {"output": struct(cut.shape(heads, value_dim), query.dtype)}
    if kernel.final_state:
        specs["final_state"] = whole
        shapes["final_state"] = struct((extent.batch, 1, heads, *state_shape), F32)
    if kernel.states is not None:
        specs["states"] = cut.per_chunk(state_shape, leaving)
        shapes["states"] = struct(cut.chunk_shape(state_shape), kernel.states)
    if kernel.keep_inverse:
        specs["inverse"] = cut.per_pack(inverse_shape, between)
        shapes["inverse"] = struct((*cut.pack_shape(), *inverse_shape), geometry.operand)
    if kernel.keep_corrected:
        specs["corrected"] = cut.tensor(value_dim, leaving)
        shapes["corrected"] = struct(cut.shape(heads, value_dim), query.dtype)
    if kernel.keep_gate:
        specs["gate"] = cut.tensor(key_dim, entering)
        shapes["gate"] = struct(cut.shape(heads, key_dim), F32)
    # Mosaic takes no 64-bit index; under jax_enable_x64 every literal would be one
    with jax.enable_x64(False):
        made = pl.pallas_call(
            functools.partial(_kernel, kernel, cut, stages, slots, scale, lower_bound),
            grid=(cut.row_groups, cut.groups, cut.blocks + DRAIN),
            in_specs=in_specs,
            out_specs=list(specs.values()),
            out_shape=list(shapes.values()),
            scratch_shapes=scratch(kernel, *state_shape),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=geometry.vmem_limit_bytes,
            ),
            name=geometry.name,
            interpret=interpret,
        )(*operands)
    results = dict(zip(specs, made, strict=True))
    for name in results.keys() & {"output", "corrected", "gate"}:
        results[name] = cut.unview(results[name], heads)
    if kernel.final_state:
        results["final_state"] = results["final_state"][..., :key_dim, :value_dim]
    return Results(**results)


def scratch(kernel: Forward, key_dim: int, value_dim: int) -> list[Any]:
    """VMEM scratch, in the order of ``Refs``: the states, then what the stages hand over.

    ``key_dim`` and ``value_dim`` are in whole registers.
    """
    geometry = kernel.geometry
    packs, chunk, operand = geometry.packs, geometry.chunk, geometry.operand
    return [
        pltpu.VMEM((geometry.streams, key_dim, value_dim), F32),
        pltpu.VMEM((2, geometry.items, 2 * chunk, key_dim), operand),
        pltpu.VMEM((2, packs, key_dim, LANES), kernel.inverse_dtype),
        pltpu.VMEM((2, packs, chunk, LANES), kernel.inverse_dtype),
        pltpu.VMEM((2, packs, 8, key_dim), F32),
        pltpu.VMEM((2, packs, chunk, LANES), F32),
        pltpu.VMEM((2, packs, chunk, LANES), kernel.inverse_dtype),
    ]


def _whole_registers(state: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A state [..., K, V] with zeros up to ``shape``."""
    missing = [(0, 0)] * (state.ndim - 2)
    missing += [(0, to - of) for to, of in zip(shape, state.shape[-2:], strict=True)]
    return jnp.pad(state, missing) if shape != state.shape[-2:] else state
