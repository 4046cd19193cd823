"""The fused forward kernel: stages, scratch, block specs and the call.

One Pallas call takes query, key, value, gate and beta to output and final state. Its grid is
(batch, groups of heads, blocks of chunks + 2): block ``t`` of the relations, ``t - 1`` of the
inverse and ``t - 2`` of the recurrence are computed in one step, see ``kdagen.emission``. The state
of a group stays in VMEM from its first block to its last.
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
from kdagen.kernels.lanes import BF16, F32, index, remainder, stack
from kdagen.kernels.tiling import LANES

DRAIN = 2
"""Grid steps after the last block has entered the pipeline."""


@dataclass(frozen=True)
class Geometry:
    """What the specs and the scratch of a generated kernel depend on.

    Attributes:
      chunk: tokens a chunk, C; heads, chunks: of one program and grid step.
      gate_rows: whether rate and bias of a raw gate are operands.
      initial_state, final_state: whether they are operands.
      vmem_limit_bytes: asked of the compiler; None is the chip's default.
      name: of the kernel, as profiles show it.
    """

    chunk: int
    heads: int
    chunks: int
    gate_rows: bool
    initial_state: bool
    final_state: bool
    vmem_limit_bytes: int | None
    name: str

    @property
    def block(self) -> int:
        """Tokens of one grid step."""
        return self.chunk * self.chunks

    @property
    def per_pack(self) -> int:
        """Chunk-heads side by side along the lanes."""
        return LANES // self.chunk

    @property
    def packs(self) -> int:
        """Packs of chunk-heads in one grid step."""
        return self.heads * self.chunks // self.per_pack


class Refs(NamedTuple):
    """The kernel's references; a field is None where the call has no such operand."""

    query: Any
    key: Any
    value: Any
    gate: Any
    beta: Any
    gate_rows: Any
    initial: Any
    output: Any
    final: Any
    state: Any
    decayed: Any
    keys_to_end: Any
    query_relations: Any
    totals: Any
    key_relations: Any
    inverses: Any


class Step:
    """One grid step as the stages see it: loads, stores and hand-over by chunk-head or pack.

    ``scale`` and ``lower_bound`` are the call's. Items are numbered chunk after chunk: item
    ``n * heads + head`` is chunk n of that head in its block.
    """

    def __init__(
        self, geometry: Geometry, refs: Refs, tokens: int, scale: float, lower_bound: float | None
    ):
        self.scale, self.lower_bound = scale, lower_bound
        self._geometry, self._refs, self._tokens = geometry, refs, tokens
        step = pl.program_id(2)
        # blocks t and t - 2 use one slot, block t - 1 the other
        self._slot, self._other = remainder(step, 2), remainder(step + 1, 2)
        self._entering = jnp.minimum(step, pl.num_programs(2) - 1 - DRAIN)
        self._leaving = step - DRAIN

    def items(self, pack: int) -> range:
        """The chunk-heads of a pack."""
        return range(pack * self._geometry.per_pack, (pack + 1) * self._geometry.per_pack)

    def query(self, item: int) -> jax.Array:
        """[C, K] f32 of the entering block; 0 past the end of the sequence, as all that follow."""
        return self._load(self._refs.query, self._entering, item)

    def key(self, item: int) -> jax.Array:
        """[C, K] f32 of the entering block."""
        return self._load(self._refs.key, self._entering, item)

    def gate(self, item: int) -> jax.Array:
        """[C, K] f32 of the entering block."""
        return self._load(self._refs.gate, self._entering, item)

    def gate_rows(self, item: int) -> tuple[jax.Array, jax.Array]:
        """exp(a_log) and the bias of a raw gate, rows [1, K] f32."""
        _, head = divmod(item, self._geometry.heads)
        return self._refs.gate_rows[head, 0:1, :], self._refs.gate_rows[head, 1:2, :]

    def inside(self, x: jax.Array, item: int) -> jax.Array:
        """x [C, D] f32 of the entering block, with 0 in rows past the end of the sequence."""
        return self._inside(x, self._entering, item)

    def _inside(self, x: jax.Array, block, item: int) -> jax.Array:
        geometry = self._geometry
        if self._tokens % geometry.block == 0:
            return x
        n, _ = divmod(item, geometry.heads)
        left = self._tokens - block * geometry.block - n * geometry.chunk
        return jnp.where(index(x.shape, 0) < left, x, 0.0)

    def _load(self, ref, block, item: int) -> jax.Array:
        n, head = divmod(item, self._geometry.heads)
        chunk = self._geometry.chunk
        return self._inside(ref[head, n * chunk : (n + 1) * chunk, :].astype(F32), block, item)

    def store_factors(self, pack: int, factors) -> None:
        """Hands the decayed operands of a pack of the entering block over to its recurrence."""
        refs, slot = self._refs, self._slot
        beta = refs.beta[pack : pack + 1, :]
        ends, totals = [], []
        for item, factor in zip(self.items(pack), factors, strict=True):
            ready = factor.chunk_factors(self.scale)
            refs.decayed[slot, item] = stack([ready.query_decayed, ready.key_decayed]).astype(BF16)
            ends.append(ready.key_to_end)
            totals.append(ready.total)
        refs.keys_to_end[slot, pack] = (jnp.transpose(stack(ends)) * beta).astype(BF16)
        unused = jnp.zeros((refs.totals.shape[2] - len(totals), totals[0].shape[1]), F32)
        refs.totals[slot, pack] = stack([*totals, unused])

    def store_relations(
        self, pack: int, query_relations: jax.Array, key_relations: jax.Array
    ) -> None:
        """Hands the relations of a pack of the entering block over to inverse and recurrence."""
        refs, slot = self._refs, self._slot
        beta = refs.beta[pack : pack + 1, :]
        refs.query_relations[slot, pack] = (query_relations * (beta * self.scale)).astype(BF16)
        refs.key_relations[slot, pack] = key_relations * -beta

    def key_relations(self, pack: int) -> Callable[[int, int], jax.Array]:
        """Reader of rows (start, count) of -N diag(b) [C, 128] f32 of the block in between."""
        ref, slot = self._refs.key_relations, self._other
        return lambda start, count: ref[slot, pack, start : start + count, :]

    def store_inverse(self, pack: int, made: jax.Array) -> None:
        """Hands the inverse of a pack, [C, 128] bf16, over to its recurrence."""
        self._refs.inverses[self._other, pack] = made

    def recurrence(self, item: int) -> Generator[None, None, None]:
        """Output and state of one chunk-head of the leaving block."""
        refs, slot, geometry = self._refs, self._slot, self._geometry
        n, head = divmod(item, geometry.heads)
        pack, x = divmod(item, geometry.per_pack)
        lanes = slice(x * geometry.chunk, (x + 1) * geometry.chunk)
        rows = slice(n * geometry.chunk, (n + 1) * geometry.chunk)

        def emit(output: jax.Array) -> None:
            refs.output[head, rows, :] = output.astype(refs.output.dtype)

        handover = recurrence.Handover(
            decayed=lambda: refs.decayed[slot, item],
            value=lambda: self._load(refs.value, self._leaving, item),
            inverse=lambda: refs.inverses[slot, pack, :, lanes],
            relations=lambda: refs.query_relations[slot, pack, :, lanes],
            keys_to_end=lambda: refs.keys_to_end[slot, pack, :, lanes],
            decay=lambda: jnp.transpose(jnp.exp2(refs.totals[slot, pack]))[:, x : x + 1],
        )
        return recurrence.advance(handover, refs.state, head, emit)


Stages = Callable[[Step], Mapping[str, Callable[[int], lockstep.Stage]]]


def _kernel(
    geometry: Geometry,
    stages: Stages,
    slots,
    tokens: int,
    scale: float,
    lower_bound: float | None,
    *operands,
) -> None:
    """Body of one grid step. ``operands`` are the references in the order of ``Refs``."""
    given = iter(operands)
    absent = {
        "gate_rows": not geometry.gate_rows,
        "initial": not geometry.initial_state,
        "final": not geometry.final_state,
    }
    refs = Refs(*(None if absent.get(name) else next(given) for name in Refs._fields))
    row, group, step = (pl.program_id(i) for i in range(3))
    mine = pl.ds(group * geometry.heads, geometry.heads)

    # the recurrence of the first block begins: scratch still holds another group's state
    @pl.when(step == DRAIN)
    def _():
        if refs.initial is None:
            refs.state[...] = jnp.zeros_like(refs.state)
        else:
            pltpu.sync_copy(refs.initial.at[row, 0, mine], refs.state)

    lockstep.run(slots, stages(Step(geometry, refs, tokens, scale, lower_bound)))

    if refs.final is not None:

        @pl.when(step == pl.num_programs(2) - 1)
        def _():
            pltpu.sync_copy(refs.state, refs.final.at[row, 0, mine])


def call(
    geometry: Geometry,
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
) -> tuple[jax.Array, jax.Array | None]:
    """Output [H, B, T, V] in query's dtype and final state [B, 1, H, K, V] f32 (or None).

    Args:
      geometry: of the generated module.
      stages: makes the three stages from a grid step; slots: the order of their segments.
      query, key, gate: [H, B, T, K]; value: [H, B, T, V]; beta: [H, B, T].
      a_log: [H] f32 or None (a rate of 1); delta_time_bias: [H, K] f32 or None.
      initial_state: [B, 1, H, K, V] f32, given exactly where ``geometry.initial_state``.
      scale: of the queries.
      lower_bound: of a bounded gate.
      interpret: False, True or ``pltpu.InterpretParams()``.
    """
    heads, batch, tokens, key_dim = query.shape
    value_dim = value.shape[-1]
    length = max(tokens, geometry.block)
    if length > tokens:  # a block may hang over the end of an array, but not be longer than it
        pad = [(0, 0), (0, 0), (0, length - tokens), (0, 0)]
        query, key, value, gate = (jnp.pad(x, pad) for x in (query, key, value, gate))
    blocks = pl.cdiv(tokens, geometry.block)
    groups = heads // geometry.heads
    last = blocks - 1

    def entering(row, group, step):
        return group, row, jnp.minimum(step, last), 0

    def leaving(row, group, step):
        return group, row, jnp.maximum(step - DRAIN, 0), 0

    def tensor(width: int, where) -> pl.BlockSpec:
        return pl.BlockSpec((geometry.heads, None, geometry.block, width), where)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    in_specs = [
        tensor(key_dim, entering),
        tensor(key_dim, entering),
        tensor(value_dim, leaving),
        tensor(key_dim, entering),
        pl.BlockSpec(
            (None, None, None, geometry.packs, LANES),
            lambda row, group, step: (row, group, jnp.minimum(step, last), 0, 0),
        ),
    ]
    operands = [query, key, value, gate, _lane_rows(geometry, beta, groups, blocks)]
    if geometry.gate_rows:
        in_specs.append(
            pl.BlockSpec((geometry.heads, 2, key_dim), lambda row, group, step: (group, 0, 0))
        )
        operands.append(_gate_rows(a_log, delta_time_bias, heads, key_dim))
    if geometry.initial_state:
        assert initial_state is not None
        in_specs.append(whole)
        operands.append(initial_state)
    out_specs = [tensor(value_dim, leaving)]
    # inside shard_map the results vary over the mesh as the operands do
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    struct = functools.partial(
        jax.ShapeDtypeStruct, manual_axis_type=jax.sharding.ManualAxisType(varying=axes)
    )
    out_shape = [struct((heads, batch, length, value_dim), query.dtype)]
    if geometry.final_state:
        out_specs.append(whole)
        out_shape.append(struct((batch, 1, heads, key_dim, value_dim), F32))
    # Mosaic takes no 64-bit index; under jax_enable_x64 every literal would be one
    with jax.enable_x64(False):
        results = pl.pallas_call(
            functools.partial(_kernel, geometry, stages, slots, tokens, scale, lower_bound),
            grid=(batch, groups, blocks + DRAIN),
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=out_shape,
            scratch_shapes=scratch(geometry, key_dim, value_dim),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=geometry.vmem_limit_bytes,
            ),
            name=geometry.name,
            interpret=interpret,
        )(*operands)
    output = results[0][:, :, :tokens] if length > tokens else results[0]
    return output, results[1] if geometry.final_state else None


def scratch(geometry: Geometry, key_dim: int, value_dim: int) -> list[Any]:
    """VMEM scratch, in the order of ``Refs``: the state, then what the stages hand over."""
    items, packs, chunk = geometry.heads * geometry.chunks, geometry.packs, geometry.chunk
    return [
        pltpu.VMEM((geometry.heads, key_dim, value_dim), F32),
        pltpu.VMEM((2, items, 2 * chunk, key_dim), BF16),
        pltpu.VMEM((2, packs, key_dim, LANES), BF16),
        pltpu.VMEM((2, packs, chunk, LANES), BF16),
        pltpu.VMEM((2, packs, 8, key_dim), F32),
        pltpu.VMEM((2, packs, chunk, LANES), F32),
        pltpu.VMEM((2, packs, chunk, LANES), BF16),
    ]


def _lane_rows(geometry: Geometry, beta: jax.Array, groups: int, blocks: int) -> jax.Array:
    """beta [H, B, T] as a lane row a pack: [B, groups, blocks, packs, 128] f32, 0 past the end."""
    _, batch, tokens = beta.shape
    beta = jnp.pad(beta.astype(F32), [(0, 0), (0, 0), (0, blocks * geometry.block - tokens)])
    parts = beta.reshape(groups, geometry.heads, batch, blocks, geometry.chunks, geometry.chunk)
    return parts.transpose(2, 0, 3, 4, 1, 5).reshape(batch, groups, blocks, geometry.packs, LANES)


def _gate_rows(
    a_log: jax.Array | None, bias: jax.Array | None, heads: int, key_dim: int
) -> jax.Array:
    """exp(a_log), at most e^88, and the bias, as rows: [H, 2, K] f32."""
    rate = jnp.ones(heads, F32) if a_log is None else jnp.exp(jnp.minimum(a_log.astype(F32), 88.0))
    rate = jnp.broadcast_to(rate[:, None], (heads, key_dim))
    rows = (
        jnp.zeros((heads, key_dim), F32)
        if bias is None
        else bias.astype(F32).reshape(heads, key_dim)
    )
    return jnp.stack([rate, rows], axis=1)
