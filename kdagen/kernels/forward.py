"""The fused forward kernel: stages, scratch and the call.

One Pallas call takes query, key, value, gate and beta to output and final state. Its grid is
(groups of batch rows, groups of heads, blocks of chunks + 2): block ``t`` of the relations,
``t - 1`` of the inverse and ``t - 2`` of the recurrence are computed in one step, see
``kdagen.emission``. The states of a program stay in VMEM from its first block to its last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdagen.kernels import gates, lockstep, recurrence
from kdagen.kernels.geometry import Cut, Extent, Geometry, padded, widened
from kdagen.kernels.inverse import on_diagonal
from kdagen.kernels.lanes import BF16, F32, beside, index, remainder, stack
from kdagen.kernels.pipeline import DRAIN, RELATIONS, STAGES, written_out
from kdagen.kernels.tiling import LANES


@dataclass(frozen=True)
class Forward:
    """What a generated forward kernel takes and keeps.

    Attributes:
      geometry: its cuts.
      gate_rows: whether the gate is raw, with a rate and a bias of each channel.
      initial_state, final_state: whether they are operands.
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
    wide_inverse: bool
    ends: int = 0
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
    """The kernel's references; a field is None where the call has no such operand.

    ``final`` [rows, 1, heads, K, V] is where the states are kept all along, and ``state``, of the
    same shape, where there is none. ``gate_rows`` [2, heads, K] are rates and biases, ``beta_rows``
    [packs, 128] what ``Step.arrange_beta`` makes of a beta that is taken as it was given.
    """

    query: Any
    key: Any
    value: Any
    gate: Any
    beta: Any
    a_log: Any
    bias: Any
    initial: Any
    output: Any
    final: Any
    kept_states: Any
    kept_inverse: Any
    kept_corrected: Any
    kept_gate: Any
    state: Any
    gate_rows: Any
    beta_rows: Any
    decayed: Any
    keys_to_end: Any
    query_relations: Any
    totals: Any
    key_relations: Any
    inverses: Any

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
    ):
        self.scale, self.lower_bound = scale, lower_bound
        self._kernel, self._geometry, self._cut, self._refs = kernel, kernel.geometry, cut, refs
        # blocks t and t - 2 use one slot, block t - 1 the other
        self._slot, self._other = remainder(step, 2), remainder(step + 1, 2)
        self._entering = jnp.minimum(step, cut.blocks - 1)
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
        rate, bias = (self._refs.gate_rows[i, head : head + 1, :] for i in range(2))
        return rate, bias

    def beta(self, pack: int) -> jax.Array:
        """[1, 128] f32 of the entering block, chunk-heads side by side; 0 past the end."""
        ref = self._refs.beta if self._refs.beta_rows is None else self._refs.beta_rows
        return ref[pack : pack + 1, :]

    def arrange_beta(self) -> None:
        """Takes beta as the caller gave it apart into rows for ``beta``, ahead of all stages: taken
        where they are used, lanes of single heads cost twice as much."""
        given = self._refs.beta[...].astype(F32)
        for pack in range(self._geometry.packs):
            mine = [
                self._inside(given[self._cut.lane_index(item)], self._entering, item, axis=1)
                for item in self.items(pack)
            ]
            self._refs.beta_rows[pack : pack + 1, :] = beside(mine)

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
                kept = refs.states[self._cut.state_index(item)].astype(refs.kept_states.dtype)
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
            refs.states,
            [self._cut.state_index(item) for item in items],
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
    absent: Collection[str],
    scale: float,
    lower_bound: float | None,
    *operands,
) -> None:
    """Body of one grid step. ``operands`` are the references in the order of ``Refs``, but for
    those that are ``absent``."""
    given = iter(operands)
    refs = Refs(*(None if name in absent else next(given) for name in Refs._fields))
    geometry = kernel.geometry
    row, group, step = (pl.program_id(i) for i in range(3))

    # one branch for both: every region that a step goes past costs it some tens of cycles
    @pl.when(step <= DRAIN)
    def _():
        @pl.when(step == 0)
        def _():
            for head in range(geometry.heads if kernel.gate_rows else 0):
                _set_gate_rows(refs, head, group * geometry.heads + head)

        # the recurrence of the first block begins: what is there is another program's
        @pl.when(step == DRAIN)
        def _():
            if refs.initial is None:
                refs.states[...] = jnp.zeros_like(refs.states)
            else:
                heads = pl.ds(group * geometry.heads, geometry.heads)
                for r in range(geometry.rows):
                    start = refs.initial.at[row * geometry.rows + r, 0, heads]
                    pltpu.sync_copy(start, refs.states.at[r, 0])

    def run(names: Collection[str]) -> None:
        this = Step(kernel, cut, refs, step, scale, lower_bound)
        if refs.beta_rows is not None and RELATIONS in names:
            this.arrange_beta()
        mine = [[entry for entry in slot if entry[0] in names] for slot in slots]
        lockstep.run(mine, stages(this))

    apart = written_out(cut.blocks, kernel.ends)
    for at, names in apart.items():
        pl.when(step == at)(functools.partial(run, names))
    if not apart:
        run(STAGES)
    elif len(apart) < cut.blocks + DRAIN:
        between = (step >= kernel.ends) & (step < cut.blocks + DRAIN - kernel.ends)
        pl.when(between)(functools.partial(run, STAGES))


def _set_gate_rows(refs: Refs, head: int, mine: Any) -> None:
    """Rate and bias of a head of the program, which is head ``mine`` of the call."""
    row = (1, refs.gate_rows.shape[2])
    rate, bias = jnp.ones(row, F32), jnp.zeros(row, F32)
    if refs.a_log is not None:
        rate = gates.rate(jnp.full(row, refs.a_log[mine], F32))
    if refs.bias is not None:
        bias = widened(refs.bias[pl.ds(mine, 1), :])
    refs.gate_rows[0, head : head + 1, :] = rate
    refs.gate_rows[1, head : head + 1, :] = bias


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
    heads = extent.value_heads
    # of tens of microseconds, the few operations that arrange an operand take a share that counts
    per_channel = pl.BlockSpec((heads, key_dim), lambda row, group, step: (0, 0))
    given = {
        "query": (cut.key_tensor(entering), cut.view(query)),
        "key": (cut.key_tensor(entering), cut.view(key)),
        "value": (cut.tensor(value_dim, leaving), cut.view(value)),
        "gate": (cut.tensor(key_dim, entering), cut.view(gate)),
    }
    if cut.lanes_as_given:
        given["beta"] = (cut.lanes(entering), cut.lanes_view(beta))
    else:
        given["beta"] = (cut.per_pack((LANES,), entering), cut.lane_rows(beta))
    if kernel.gate_rows and a_log is not None:
        given["a_log"] = (pl.BlockSpec(memory_space=pltpu.SMEM), a_log.astype(F32))
    if kernel.gate_rows and delta_time_bias is not None:
        given["bias"] = (per_channel, delta_time_bias.astype(F32).reshape(heads, key_dim))
    if kernel.initial_state:
        assert initial_state is not None
        given["initial"] = (whole, _whole_registers(initial_state, state_shape))
    in_specs, operands = zip(*given.values(), strict=True)
    # inside shard_map the results vary over the mesh as the operands do
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    struct = functools.partial(
        jax.ShapeDtypeStruct, manual_axis_type=jax.sharding.ManualAxisType(varying=axes)
    )
    output = cut.tensor(value_dim, leaving), struct(cut.shape(heads, value_dim), query.dtype)
    results: dict[str, tuple[pl.BlockSpec, Any]] = {"output": output}
    if kernel.final_state:
        final = struct((extent.batch, 1, heads, *state_shape), F32)
        results["final"] = (cut.states(state_shape), final)
    if kernel.states is not None:
        states = struct(cut.chunk_shape(state_shape), kernel.states)
        results["kept_states"] = (cut.per_chunk(state_shape, leaving), states)
    if kernel.keep_inverse:
        inverse_shape = (geometry.chunk, LANES)
        inverse = struct((*cut.pack_shape(), *inverse_shape), geometry.operand)
        results["kept_inverse"] = (cut.per_pack(inverse_shape, between), inverse)
    if kernel.keep_corrected:
        results["kept_corrected"] = output
    if kernel.keep_gate:
        sums = struct(cut.shape(heads, key_dim), F32)
        results["kept_gate"] = (cut.tensor(key_dim, entering), sums)
    out_specs, out_shape = zip(*results.values(), strict=True)
    kept = _scratch(kernel, cut)
    absent = set(Refs._fields) - given.keys() - results.keys() - kept.keys()
    # Mosaic takes no 64-bit index; under jax_enable_x64 every literal would be one
    with jax.enable_x64(False):
        made = pl.pallas_call(
            functools.partial(_kernel, kernel, cut, stages, slots, absent, scale, lower_bound),
            grid=(cut.row_groups, cut.groups, cut.blocks + DRAIN),
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=out_shape,
            scratch_shapes=list(kept.values()),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=geometry.vmem_limit_bytes,
            ),
            name=geometry.name,
            interpret=interpret,
        )(*operands)
    found = dict(zip(results, made, strict=True))
    for name in found.keys() & {"output", "kept_corrected", "kept_gate"}:
        found[name] = cut.unview(found[name], heads)
    if kernel.final_state:
        found["final"] = found["final"][..., :key_dim, :value_dim]
    return Results(
        found["output"],
        found.get("final"),
        *(found.get(f"kept_{name}") for name in ("states", "inverse", "corrected", "gate")),
    )


def _scratch(kernel: Forward, cut: Cut) -> dict[str, Any]:
    """VMEM scratch by its name in ``Refs``."""
    geometry = kernel.geometry
    packs, chunk, operand = geometry.packs, geometry.chunk, geometry.operand
    key_dim, value_dim = padded(cut.extent.key_dim), padded(cut.extent.value_dim)
    made: dict[str, Any] = {}
    if not kernel.final_state:
        made["state"] = pltpu.VMEM((geometry.rows, 1, geometry.heads, key_dim, value_dim), F32)
    if kernel.gate_rows:
        made["gate_rows"] = pltpu.VMEM((2, geometry.heads, key_dim), F32)
    if cut.lanes_as_given:
        made["beta_rows"] = pltpu.VMEM((geometry.packs, LANES), F32)
    return made | {
        "decayed": pltpu.VMEM((2, geometry.items, 2 * chunk, key_dim), operand),
        "keys_to_end": pltpu.VMEM((2, packs, key_dim, LANES), kernel.inverse_dtype),
        "query_relations": pltpu.VMEM((2, packs, chunk, LANES), kernel.inverse_dtype),
        "totals": pltpu.VMEM((2, packs, 8, key_dim), F32),
        "key_relations": pltpu.VMEM((2, packs, chunk, LANES), F32),
        "inverses": pltpu.VMEM((2, packs, chunk, LANES), kernel.inverse_dtype),
    }


def _whole_registers(state: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A state [..., K, V] with zeros up to ``shape``."""
    missing = [(0, 0)] * (state.ndim - 2)
    missing += [(0, to - of) for to, of in zip(shape, state.shape[-2:], strict=True)]
    return jnp.pad(state, missing) if shape != state.shape[-2:] else state
