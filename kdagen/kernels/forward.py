"""The fused forward kernel: stages, scratch and the call.

One Pallas call takes query, key, value, gate and beta to output and final state. Its grid is
(groups of batch rows, groups of heads, blocks of chunks + 2): block ``t`` of the relations,
``t - 1`` of the inverse and ``t - 2`` of the recurrence are computed in one step, see
``kdagen.emission``. The states of a program stay in VMEM from its first block to its last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdagen.kernels import gates, lockstep, packing, segment_states
from kdagen.kernels.forward_step import Forward, Refs, Step
from kdagen.kernels.geometry import Cut, Extent, padded, widened
from kdagen.kernels.lanes import F32
from kdagen.kernels.pipeline import DRAIN, RELATIONS, STAGES, written_out
from kdagen.kernels.segment_states import SegmentStates
from kdagen.kernels.segment_walk import Prepare, Table, Walk
from kdagen.kernels.tiling import LANES


class Results(NamedTuple):
    """What a forward kernel returns; None where it was not asked for.

    Attributes:
      output: [HV, B, T, V] or [B, T, HV, V] as the layout, in query's dtype.
      final_state: [B, N, HV, K, V] f32, N = 1 without segments.
      states: [B, HV, chunks, KP, VP], before every chunk; KP and VP are K and V in whole registers
        of 128 lanes, and chunks those of all blocks.
      inverse: (I + N diag(b))^-1 [B / rows, groups, blocks, packs, C, 128], packs as in
        ``kdagen.kernels.geometry``.
      corrected: E, shaped as the output, see ``kdagen.kernels.recurrence``.
      gate: log2 decay as the factorisation takes it (floored), summed from the start of its
        sub-block, as the gate, f32.
    """

    output: jax.Array
    final_state: jax.Array | None = None
    states: jax.Array | None = None
    inverse: jax.Array | None = None
    corrected: jax.Array | None = None
    gate: jax.Array | None = None


Stages = Callable[[Step], Mapping[str, Callable[[int], lockstep.Stage]]]


def _kernel(
    kernel: Forward,
    cut: Cut,
    stages: Stages,
    slots,
    absent: Collection[str],
    scale: float,
    lower_bound: float | None,
    segments: int,
    prepare: Prepare | None,
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
            if refs.initial is None or kernel.packed:
                refs.states[...] = jnp.zeros_like(refs.states)
            else:
                heads = pl.ds(group * geometry.heads, geometry.heads)
                for r in range(geometry.rows):
                    start = refs.initial.at[row * geometry.rows + r, 0, heads]
                    pltpu.sync_copy(start, refs.states.at[r, 0])

    if kernel.packed:
        entering, leaving = _entering(cut, step), _leaving(step)
        windows = [(ref, entering) for ref in (refs.query, refs.key, refs.gate)]
        packing.clear_padding(cut, refs.lengths, row, [*windows, (refs.value, leaving)])

    states = None
    if prepare is not None:
        named = {name: ref for name, ref in refs._asdict().items() if ref is not None}
        walk = Walk(cut, refs.table, segments, row, group)
        states = SegmentStates(cut, named, walk, step, DRAIN)
        states.begin(refs.states, geometry.operand)
        states.prepare(prepare, scale, lower_bound, geometry.operand)

    def run(names: Collection[str]) -> None:
        this = Step(kernel, cut, refs, step, scale, lower_bound, states)
        if RELATIONS in names:
            this.arrange(row)
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
    if states is not None:
        states.end(kernel.inverse_dtype, geometry.exact)


def _entering(cut: Cut, step: jax.Array) -> jax.Array:
    """The block whose relations are formed."""
    return jnp.minimum(step, cut.blocks - 1)


def _leaving(step: jax.Array) -> jax.Array:
    """The block whose output is written."""
    return jnp.maximum(step - DRAIN, 0)


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
    spans: jax.Array | None,
    boundaries: jax.Array | None,
    *,
    scale: float,
    lower_bound: float | None,
    prepare: Prepare | None = None,
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
      initial_state: [B, N, HV, K, V] f32, given exactly where ``kernel.initial_state``; N is 1
        without segments.
      spans [B, 2, T], boundaries [B, N + 1]: see ``kdagen.kernels.packing``; given exactly where
        ``kernel.packed``.
      scale: of the queries.
      lower_bound: of a bounded gate.
      prepare: gives queries and keys as they are multiplied, and log2 decays, of one chunk-head,
        where segments have states of their own.
      interpret: False, True or ``pltpu.InterpretParams()``.
    """
    geometry = kernel.geometry
    extent = Extent.of(geometry.layout, query, value)
    cut = Cut(geometry, extent)
    segments = 1 if boundaries is None else boundaries.shape[1] - 1
    key_dim, value_dim = extent.key_dim, extent.value_dim
    state_shape = (padded(key_dim), padded(value_dim))
    entering = functools.partial(_entering, cut)
    between = lambda step: jnp.clip(step - 1, 0, cut.blocks - 1)  # noqa: E731

    whole = pl.BlockSpec(memory_space=pl.ANY)
    heads = extent.value_heads
    # of tens of microseconds, the few operations that arrange an operand take a share that counts
    per_channel = pl.BlockSpec((heads, key_dim), lambda row, group, step: (0, 0))
    given = {
        "query": (cut.key_tensor(entering), cut.view(query)),
        "key": (cut.key_tensor(entering), cut.view(key)),
        "value": (cut.tensor(value_dim, _leaving), cut.view(value)),
        "gate": (cut.tensor(key_dim, entering), cut.view(gate)),
    }
    if kernel.packed:
        given = {name: (spec, packing.copied(x, interpret)) for name, (spec, x) in given.items()}
    if cut.lanes_as_given:
        given["beta"] = (cut.lanes(entering), cut.lanes_view(beta))
    else:
        given["beta"] = (cut.per_pack((LANES,), entering), cut.lane_rows(beta))
    if kernel.gate_rows and a_log is not None:
        given["a_log"] = (pl.BlockSpec(memory_space=pltpu.SMEM), a_log.astype(F32))
    if kernel.gate_rows and delta_time_bias is not None:
        given["bias"] = (per_channel, delta_time_bias.astype(F32).reshape(heads, key_dim))
    if kernel.packed:
        assert spans is not None and boundaries is not None
        given["spans"] = (packing.spans_spec(cut, entering), packing.spans_view(cut, spans))
        numbers = pl.BlockSpec(memory_space=pltpu.SMEM)
        given["lengths"] = (numbers, boundaries[:, -1])
        if kernel.segment_states:
            given["table"] = (numbers, Table(segments, cut.blocks, geometry.block).made(boundaries))
    if kernel.initial_state:
        assert initial_state is not None
        given["initial"] = (whole, _whole_registers(initial_state, state_shape))
    in_specs, operands = zip(*given.values(), strict=True)
    # inside shard_map the results vary over the mesh as the operands do
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    struct = functools.partial(
        jax.ShapeDtypeStruct, manual_axis_type=jax.sharding.ManualAxisType(varying=axes)
    )
    output = cut.tensor(value_dim, _leaving), struct(cut.shape(heads, value_dim), query.dtype)
    results: dict[str, tuple[pl.BlockSpec, Any]] = {"output": output}
    if kernel.final_state:
        final = struct((extent.batch, segments, heads, *state_shape), F32)
        if kernel.packed:
            results["segment_finals"] = (whole, final)
        else:
            results["final"] = (cut.states(state_shape), final)
    if kernel.states is not None:
        states = struct(cut.chunk_shape(state_shape), kernel.states)
        results["kept_states"] = (cut.per_chunk(state_shape, _leaving), states)
    if kernel.keep_inverse:
        inverse_shape = (geometry.chunk, LANES)
        inverse = struct((*cut.pack_shape(), *inverse_shape), geometry.operand)
        results["kept_inverse"] = (cut.per_pack(inverse_shape, between), inverse)
    if kernel.keep_corrected:
        corrected = struct(cut.shape(heads, value_dim), geometry.operand)
        results["kept_corrected"] = (output[0], corrected)
    if kernel.keep_gate:
        sums = struct(cut.shape(heads, key_dim), F32)
        results["kept_gate"] = (cut.tensor(key_dim, entering), sums)
    out_specs, out_shape = zip(*results.values(), strict=True)
    kept = _scratch(kernel, cut)
    absent = set(Refs._fields) - given.keys() - results.keys() - kept.keys()
    # Mosaic takes no 64-bit index; under jax_enable_x64 every literal would be one
    with jax.enable_x64(False):
        made = pl.pallas_call(
            functools.partial(
                _kernel, kernel, cut, stages, slots, absent, scale, lower_bound, segments, prepare
            ),
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
        final = found["segment_finals" if kernel.packed else "final"]
        found["final"] = final[..., :key_dim, :value_dim]
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
    if not kernel.final_state or kernel.packed:
        made["state"] = pltpu.VMEM((geometry.rows, 1, geometry.heads, key_dim, value_dim), F32)
    if kernel.gate_rows:
        made["gate_rows"] = pltpu.VMEM((2, geometry.heads, key_dim), F32)
    if kernel.packed:
        made |= packing.scratch(cut)
    elif cut.lanes_as_given:
        made["beta_rows"] = pltpu.VMEM((geometry.packs, LANES), F32)
    handed = {
        "decayed": pltpu.VMEM((2, geometry.items, 2 * chunk, key_dim), operand),
        "keys_to_end": pltpu.VMEM((2, packs, key_dim, LANES), kernel.inverse_dtype),
        "query_relations": pltpu.VMEM((2, packs, chunk, LANES), kernel.inverse_dtype),
        "totals": pltpu.VMEM((2, packs, 8, key_dim), F32),
        "key_relations": pltpu.VMEM((2, packs, chunk, LANES), F32),
        "inverses": pltpu.VMEM((2, packs, chunk, LANES), kernel.inverse_dtype),
    }
    within = {}
    if kernel.segment_states:
        asked = kernel.initial_state, kernel.final_state
        within = segment_states.scratch(cut, *asked, operand, kernel.inverse_dtype)
    return made | handed | within


def _whole_registers(state: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A state [..., K, V] with zeros up to ``shape``."""
    missing = [(0, 0)] * (state.ndim - 2)
    missing += [(0, to - of) for to, of in zip(shape, state.shape[-2:], strict=True)]
    return jnp.pad(state, missing) if shape != state.shape[-2:] else state
