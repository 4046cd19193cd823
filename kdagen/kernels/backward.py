"""The fused backward kernel: its scratch, its specs and the call.

One Pallas call takes the operands of the forward, the states it kept and the cotangents of its
results to the gradients that are asked for. Its grid is (groups of batch rows, groups of heads,
blocks of chunks + 1), the blocks from the last to the first: relations of one block and the rest
of the block after it are computed in one step. The state cotangents of a program stay in VMEM all
the while, and so do the sums over tokens that a_log and delta_time_bias take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdagen.kernels import lockstep, packing
from kdagen.kernels.backward_states import BackwardStates
from kdagen.kernels.backward_step import DRAIN, Backward, Refs, Step, absent
from kdagen.kernels.geometry import Cut, Extent, gate_rows, padded
from kdagen.kernels.lanes import F32, quotient, remainder
from kdagen.kernels.segment_walk import Prepare, Table, Walk
from kdagen.kernels.tiling import LANES

Stages = Callable[[Step], Mapping[str, Callable[[int], lockstep.Stage]]]


def _kernel(
    kernel: Backward,
    cut: Cut,
    stages: Stages,
    slots,
    scale: float,
    lower_bound: float | None,
    segments: int,
    prepare: Prepare | None,
    within: Sequence[str],
    handed: Sequence[str],
    *operands,
) -> None:
    """Body of one grid step. ``operands`` are the references in the order of ``Refs``, those of
    ``within`` and of ``handed`` by name last."""
    given, missing = iter(operands), absent(kernel)
    fields = [name for name in Refs._fields if name not in ("within", "handed")]
    found = {name: None if missing.get(name) else next(given) for name in fields}
    named = {name: next(given) for name in within}
    refs = Refs(**found, within=named, handed=dict(zip(handed, given, strict=True)))
    geometry = kernel.geometry
    row, group, step = (pl.program_id(i) for i in range(3))
    mine = pl.ds(group * geometry.heads, geometry.heads)
    rows = [
        (row * geometry.rows + r, pl.ds(r * geometry.heads, geometry.heads))
        for r in range(geometry.rows)
    ]

    # the recurrence of the last block begins: scratch still holds what another program left
    @pl.when(step == DRAIN)
    def _():
        if refs.d_final is None or kernel.packed:
            refs.d_state[...] = jnp.zeros_like(refs.d_state)
        else:
            for batch, streams in rows:
                pltpu.sync_copy(refs.d_final.at[batch, 0, mine], refs.d_state.at[streams])
        if refs.d_rows is not None:
            refs.d_rows[...] = jnp.zeros_like(refs.d_rows)

    this = Step(kernel, cut, refs, scale, lower_bound)
    if kernel.packed:
        entered, left = (
            (refs.query, refs.key, refs.gate),
            (refs.value, refs.d_output, refs.corrected),
        )
        windows = [(ref, this.entering) for ref in entered]
        windows += [(ref, this.leaving) for ref in left if ref is not None]
        packing.clear_padding(cut, refs.lengths, row, windows)
    if prepare is not None:
        walk = Walk(cut, refs.table, segments, row, group)
        this.states = BackwardStates(kernel, cut, refs, walk, this.entering, this.leaving, step)
        this.states.begin()
        this.states.prepare(prepare, scale, lower_bound)
    this.arrange(row)
    lockstep.run(slots, stages(this))
    if this.states is not None:
        this.states.end(scale)

    if refs.d_initial is not None and not kernel.packed:

        @pl.when(step == pl.num_programs(2) - 1)
        def _():
            for batch, streams in rows:
                pltpu.sync_copy(refs.d_state.at[streams], refs.d_initial.at[batch, 0, mine])


def call(
    kernel: Backward,
    stages: Stages,
    slots,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    a_log: jax.Array | None,
    delta_time_bias: jax.Array | None,
    spans: jax.Array | None,
    boundaries: jax.Array | None,
    initial_state: jax.Array | None,
    states: jax.Array | None,
    inverse: jax.Array | None,
    corrected: jax.Array | None,
    d_output: jax.Array | None,
    d_final: jax.Array | None,
    *,
    scale: float,
    lower_bound: float | None,
    prepare: Prepare | None = None,
    interpret: Any = False,
) -> dict[str, jax.Array]:
    """Runs the kernel.

    Shapes are those of layout "HBTD"; "BTHD" takes [B, T, H, D] and, for beta, [B, T, HV].

    Args:
      kernel: of the generated module.
      stages: makes the stages from a grid step; slots: the order of their segments.
      query, key: [H, B, T, K]; gate: [HV, B, T, K]; value: [HV, B, T, V]; beta: [HV, B, T].
      a_log: [HV] f32 or None (a rate of 1); delta_time_bias: [HV, K] f32 or None.
      spans [B, 2, T], boundaries [B, N + 1]: see ``kdagen.kernels.packing``; given exactly where
        ``kernel.packed``.
      initial_state: [B, N, HV, K, V] f32, of segments, where they have any.
      states, inverse, corrected: that a forward of the same chunks kept, see
        ``kdagen.kernels.forward.Results``; the last two exactly where ``kernel`` says so.
      d_output: cotangent of the output [HV, B, T, V], given exactly where ``kernel`` says so.
      d_final: that of the final state [B, N, HV, K, V] f32, likewise; N is 1 without segments.
      scale: of the queries.
      lower_bound: of a bounded gate.
      prepare: see ``kdagen.kernels.segment_walk.Prepare``; where segments have states of their own.
      interpret: False, True or ``pltpu.InterpretParams()``.

    Returns:
      The gradients of ``kernel.wanted`` by name, each of its operand's shape and dtype, and
      initial_state [B, N, HV, K, V] f32.
    """
    geometry = kernel.geometry
    extent = Extent.of(geometry.layout, query, value)
    cut = Cut(geometry, extent)
    key_dim, value_dim = extent.key_dim, extent.value_dim
    state_shape = (padded(key_dim), padded(value_dim))
    last = cut.blocks - 1
    entering = lambda step: last - jnp.minimum(step, last)  # noqa: E731
    leaving = lambda step: last - jnp.maximum(step - DRAIN, 0)  # noqa: E731
    handed, within = (
        make(*state_shape) for make in (kernel.handover.shapes, kernel.handover.within)
    )
    segments = 1 if boundaries is None else boundaries.shape[1] - 1

    whole = inverse_spec = pl.BlockSpec(memory_space=pl.ANY)
    if kernel.keep_inverse:
        inverse, inverse_spec = _inverse_of(cut, _present("inverse", inverse), entering)
    tensors = {"query": query, "key": key, "value": value, "gate": gate}
    specs: dict[str, Any] = {
        "query": cut.key_tensor(entering),
        "key": cut.key_tensor(entering),
        "value": cut.tensor(value_dim, leaving),
        "gate": cut.tensor(key_dim, entering),
        "beta": cut.per_pack((LANES,), entering),
        "spans": packing.spans_spec(cut, entering),
        "lengths": pl.BlockSpec(memory_space=pltpu.SMEM),
        "table": pl.BlockSpec(memory_space=pltpu.SMEM),
        "initial": whole,
        "gate_rows": pl.BlockSpec(
            (geometry.heads, 2, state_shape[0]), lambda row, group, step: (group, 0, 0)
        ),
        "d_output": cut.tensor(value_dim, leaving),
        "states": cut.per_chunk(state_shape, leaving),
        "inverse": inverse_spec,
        "corrected": cut.tensor(value_dim, leaving),
        "d_final": whole,
    }
    made: dict[str, Callable[[], Any]] = {
        **{name: functools.partial(cut.view, x) for name, x in tensors.items()},
        "beta": lambda: cut.lane_rows(beta),
        "spans": lambda: packing.spans_view(cut, _present("spans", spans)),
        "lengths": lambda: _present("boundaries", boundaries)[:, -1],
        "table": lambda: Table(segments, cut.blocks, geometry.block).made(
            _present("boundaries", boundaries)
        ),
        "initial": lambda: _whole_registers(_present("initial_state", initial_state), state_shape),
        "gate_rows": lambda: gate_rows(a_log, delta_time_bias, extent.value_heads, key_dim),
        "d_output": lambda: cut.view(_present("d_output", d_output)),
        "states": lambda: _present("states", states),
        "inverse": lambda: inverse,
        "corrected": lambda: cut.view(_present("corrected", corrected)),
        "d_final": lambda: _whole_registers(_present("d_final", d_final), state_shape),
    }
    missing = absent(kernel)
    if not missing["states"]:
        _check_states(states, cut.chunk_shape(state_shape))
    used = [name for name in specs if not missing.get(name)]
    operands = [made[name]() for name in used]
    if kernel.packed:
        cleared = {*tensors, "d_output", "corrected"}
        operands = [
            packing.copied(x, interpret) if name in cleared else x
            for name, x in zip(used, operands, strict=True)
        ]
    # inside shard_map the results vary over the mesh as the operands do
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    struct = functools.partial(
        jax.ShapeDtypeStruct, manual_axis_type=jax.sharding.ManualAxisType(varying=axes)
    )
    heads, value_heads = extent.heads, extent.value_heads
    state = (extent.batch, segments, value_heads, *state_shape)
    rows_spec = pl.BlockSpec(
        (None, geometry.heads, 2, state_shape[0]), lambda row, group, step: (row, group, 0, 0)
    )
    results: dict[str, tuple[Any, Any]] = {
        "d_query": (cut.key_tensor(leaving), struct(cut.shape(heads, key_dim), query.dtype)),
        "d_key": (cut.key_tensor(leaving), struct(cut.shape(heads, key_dim), key.dtype)),
        "d_value": (specs["value"], struct(cut.shape(value_heads, value_dim), value.dtype)),
        "d_gate": (
            cut.tensor(key_dim, leaving),
            struct(cut.shape(value_heads, key_dim), gate.dtype),
        ),
        "d_beta": (cut.per_pack((LANES,), leaving), struct((*cut.pack_shape(), LANES), F32)),
        "d_initial": (whole, struct(state, F32)),
        "d_rows": (rows_spec, struct((cut.row_groups, value_heads, 2, state_shape[0]), F32)),
    }
    results = {name: x for name, x in results.items() if not missing.get(name)}
    # Mosaic takes no 64-bit index; under jax_enable_x64 every literal would be one
    with jax.enable_x64(False):
        found = pl.pallas_call(
            functools.partial(
                _kernel,
                kernel,
                cut,
                stages,
                slots,
                scale,
                lower_bound,
                segments,
                prepare,
                tuple(within),
                tuple(handed),
            ),
            grid=(cut.row_groups, cut.groups, cut.blocks + DRAIN),
            in_specs=[specs[name] for name in used],
            out_specs=[spec for spec, _ in results.values()],
            out_shape=[shape for _, shape in results.values()],
            scratch_shapes=[
                pltpu.VMEM((geometry.streams, *state_shape), F32),
                *(packing.scratch(cut).values() if kernel.packed else ()),
                *(
                    pltpu.VMEM(shape, jnp.dtype(dtype))
                    for shape, dtype in (*within.values(), *handed.values())
                ),
            ],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=geometry.vmem_limit_bytes,
            ),
            name=geometry.name,
            interpret=interpret,
        )(*operands)
    return _by_operand(dict(zip(results, found, strict=True)), kernel, cut, a_log, beta)


def _by_operand(
    found: dict[str, jax.Array],
    kernel: Backward,
    cut: Cut,
    a_log: jax.Array | None,
    beta: jax.Array,
) -> dict[str, jax.Array]:
    extent = cut.extent
    grads: dict[str, jax.Array] = {}
    for name, heads in (
        ("query", extent.heads),
        ("key", extent.heads),
        ("value", extent.value_heads),
        ("gate", extent.value_heads),
    ):
        if f"d_{name}" in found:
            grads[name] = cut.unview(found[f"d_{name}"], heads)
    if "d_beta" in found:
        grads["beta"] = _from_lane_rows(cut, found["d_beta"]).astype(beta.dtype)
    if "d_initial" in found:
        grads["initial_state"] = found["d_initial"][..., : extent.key_dim, : extent.value_dim]
    if "d_rows" in found:
        sums = jnp.sum(found["d_rows"], axis=0)[..., : extent.key_dim]
        if kernel.wants("a_log"):
            assert a_log is not None
            # a rate saturates at e^88
            grads["a_log"] = jnp.where(a_log > 88.0, 0.0, jnp.sum(sums[:, 0], axis=1))
        if kernel.wants("delta_time_bias"):
            grads["delta_time_bias"] = sums[:, 1]
    return grads


def _from_lane_rows(cut: Cut, x: jax.Array) -> jax.Array:
    """The inverse of ``Cut.lane_rows``: [HV, B, T] or, in layout "BTHD", [B, T, HV]."""
    geometry, extent = cut.geometry, cut.extent
    x = x.reshape(
        cut.row_groups, cut.groups, cut.blocks,
        geometry.chunks, geometry.rows, geometry.heads, geometry.chunk,
    )  # fmt: skip
    length = cut.blocks * geometry.block
    if geometry.layout == "HBTD":
        x = x.transpose(1, 5, 0, 4, 2, 3, 6).reshape(extent.value_heads, extent.batch, length)
        return x[:, :, : extent.tokens]
    x = x.transpose(0, 4, 2, 3, 6, 1, 5).reshape(extent.batch, length, extent.value_heads)
    return x[:, : extent.tokens]


def _inverse_of(
    cut: Cut, inverse: jax.Array, where: Callable[[Any], Any]
) -> tuple[jax.Array, pl.BlockSpec]:
    """What the forward kept of the inverse, in a view that this kernel's programs can cut, with
    that cut: [chunks, packs of a chunk, C, 128] of each grid step.

    The forward's programs may hold several times the heads and the chunks of this kernel's.
    """
    geometry = cut.geometry
    groups, blocks, packs = inverse.shape[1:4]
    chunks, mine = geometry.chunks, geometry.streams // geometry.per_pack
    if geometry.streams % geometry.per_pack:  # packs of several chunks
        chunks, mine, ratio, theirs = 1, geometry.packs, 1, packs
    else:
        ratio = cut.groups // groups
        theirs = ratio * mine
        blocks = blocks * (packs // theirs) // chunks
    shape = (inverse.shape[0], groups, blocks, chunks, theirs, *inverse.shape[4:])
    if inverse.size != math.prod(shape) or ratio * groups != cut.groups or blocks < cut.blocks:
        raise ValueError(f"inverse: got shape {inverse.shape}, of programs that do not fit")
    spec = pl.BlockSpec(
        (None, None, None, chunks, mine, *inverse.shape[4:]),
        lambda row, group, step: (
            row, quotient(group, ratio), where(step), 0, remainder(group, ratio), 0, 0,
        ),
    )  # fmt: skip
    return inverse.reshape(shape), spec


def _check_states(states: jax.Array | None, least: tuple[int, ...]) -> None:
    """More chunks than the sequence needs may be there, fewer may not: 0 times what lies behind
    the array need not be 0."""
    shape = _present("states", states).shape
    if shape[:2] + shape[3:] != least[:2] + least[3:] or shape[2] < least[2]:
        raise ValueError(f"states: got shape {shape}; it must be {least}, or of more chunks")


def _present(name: str, x: jax.Array | None) -> jax.Array:
    if x is None:
        raise TypeError(f"{name}: got None; this kernel was generated for a call that has it")
    return x


def _whole_registers(state: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """States [..., K, V] with zeros up to ``shape``."""
    pad = [(0, 0)] * 3 + [(0, full - own) for full, own in zip(shape, state.shape[3:], strict=True)]
    return jnp.pad(state, pad) if state.shape[3:] != shape else state
