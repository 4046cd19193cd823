"""How a fused kernel cuts its call: programs, blocks of tokens, chunk-heads, packs, lanes.

A program works on ``rows`` batch rows times ``heads`` value heads, its streams, and takes
``chunks`` chunks of every stream in one grid step. A chunk of a stream is an item: item
``n * streams + s`` is chunk n of stream s in its block, and stream ``r * heads + h`` is head h of
row r. 128 / chunk items fill the lanes together, a pack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kdagen.kernels import gates
from kdagen.kernels.lanes import BF16, F32, quotient
from kdagen.kernels.tiling import LANES, SUBLANES, side_by_side

Where = Callable[[Any], Any]
"""From the number of a grid step to the block of tokens that it takes."""


def padded(width: int) -> int:
    """The width in whole vector registers: a multiple of 128 lanes."""
    return -(-width // LANES) * LANES


@dataclass(frozen=True)
class Geometry:
    """What the cuts of a generated kernel depend on, but for the shapes of its call.

    Attributes:
      chunk: tokens a chunk, C.
      heads, rows: value heads and batch rows of one program.
      chunks: chunks of one grid step.
      layout: of the per-token tensors, "HBTD" or "BTHD".
      exact: products are those of f32 operands, and so is all that stages hand over.
      vmem_limit_bytes: asked of the compiler; None is the chip's default.
      name: of the kernel, as profiles show it.
    """

    chunk: int
    heads: int
    rows: int
    chunks: int
    layout: str
    exact: bool
    vmem_limit_bytes: int | None
    name: str

    @property
    def operand(self) -> Any:
        """The dtype of products and hand-over."""
        return F32 if self.exact else BF16

    @property
    def block(self) -> int:
        """Tokens of one grid step."""
        return self.chunk * self.chunks

    @property
    def streams(self) -> int:
        """Pairs of batch row and value head that a program works on."""
        return self.rows * self.heads

    @property
    def per_pack(self) -> int:
        """Items side by side along the lanes."""
        return LANES // self.chunk

    @property
    def together(self) -> int:
        """Items of a group: of one chunk and of one pack, they advance together."""
        return side_by_side(self.streams, self.chunk)

    @property
    def items(self) -> int:
        return self.streams * self.chunks

    @property
    def packs(self) -> int:
        return self.items // self.per_pack

    def place(self, item: int) -> tuple[int, int, int]:
        """The chunk of the block, the row and the value head of an item, within its program."""
        n, stream = divmod(item, self.streams)
        return n, *divmod(stream, self.heads)


@dataclass(frozen=True)
class Extent:
    """The shapes of a call: B, T, H, HV, K and V."""

    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, layout: str, query: jax.Array, value: jax.Array) -> Extent:
        """From query and value in their layout."""
        if layout == "HBTD":
            heads, batch, tokens, key_dim = query.shape
            value_heads = value.shape[0]
        else:
            batch, tokens, heads, key_dim = query.shape
            value_heads = value.shape[2]
        return cls(batch, tokens, heads, value_heads, key_dim, value.shape[-1])

    @property
    def ratio(self) -> int:
        """Value heads that share a query and key head."""
        return self.value_heads // self.heads


class Cut:
    """A call of one extent, cut as a geometry says: views, block specs and places of blocks."""

    def __init__(self, geometry: Geometry, extent: Extent):
        self.geometry, self.extent = geometry, extent
        self.blocks = pl.cdiv(extent.tokens, geometry.block)
        self.groups = extent.value_heads // geometry.heads
        self.row_groups = extent.batch // geometry.rows
        self.key_heads = max(geometry.heads // extent.ratio, 1)
        """Query and key heads of one program."""
        self.length = max(extent.tokens, geometry.block)
        """Tokens of the padded arrays: a block may hang over an array, not be longer than it."""
        self.flat = geometry.layout == "BTHD" and all(
            heads * width % LANES == 0 or heads == whole
            for heads, whole, width in (
                (self.key_heads, extent.heads, extent.key_dim),
                (geometry.heads, extent.value_heads, extent.key_dim),
                (geometry.heads, extent.value_heads, extent.value_dim),
            )
        )
        """Whether heads lie side by side along the lanes of [B, T, H * D]. A model whose
        projections make that view pays for no transposition; where blocks of it would not be whole
        registers, the tensors are transposed by XLA."""

    def view(self, x: jax.Array) -> jax.Array:
        """A per-token tensor of the caller as blocks are cut from it, padded to ``length``."""
        axis = 2 if self.geometry.layout == "HBTD" else 1
        if self.length > self.extent.tokens:
            pad = [(0, 0)] * x.ndim
            pad[axis] = (0, self.length - self.extent.tokens)
            x = jnp.pad(x, pad)
        if self.geometry.layout == "HBTD":
            return x
        return x.reshape(*x.shape[:2], -1) if self.flat else jnp.moveaxis(x, 2, 0)

    def shape(self, heads: int, width: int) -> tuple[int, ...]:
        """Of the view of a tensor of so many heads."""
        batch = self.extent.batch
        if self.flat:
            return (batch, self.length, heads * width)
        return (heads, batch, self.length, width)

    def unview(self, x: jax.Array, heads: int) -> jax.Array:
        """A result of ``shape`` in the caller's layout, without its padding."""
        tokens = self.extent.tokens
        if self.flat:
            return x[:, :tokens].reshape(self.extent.batch, tokens, heads, -1)
        x = x[:, :, :tokens]
        return jnp.moveaxis(x, 0, 2) if self.geometry.layout == "BTHD" else x

    def tensor(self, width: int, where: Where) -> pl.BlockSpec:
        """Block of a view with the heads of value; grid axes are (row group, group, step)."""
        geometry = self.geometry
        return self._tensor(width, where, geometry.heads, lambda group: group)

    def key_tensor(self, where: Where) -> pl.BlockSpec:
        """Block of a view with the heads of query and key."""
        programs = max(self.extent.ratio // self.geometry.heads, 1)  # that read one key head
        return self._tensor(
            self.extent.key_dim, where, self.key_heads, lambda group: quotient(group, programs)
        )

    def _tensor(self, width: int, where: Where, heads: int, group_of: Where) -> pl.BlockSpec:
        rows, block = self.geometry.rows, self.geometry.block
        if self.flat:
            return pl.BlockSpec(
                (rows, block, heads * width),
                lambda row, group, step: (row, where(step), group_of(group)),
            )
        return pl.BlockSpec(
            (heads, rows, block, width),
            lambda row, group, step: (group_of(group), row, where(step), 0),
        )

    def index(self, item: int, width: int) -> tuple[Any, ...]:
        """Where the [C, width] rows of an item lie in a block of ``tensor``."""
        n, row, head = self.geometry.place(item)
        return self._index(n, row, head, width)

    def key_index(self, item: int) -> tuple[Any, ...]:
        """Where the [C, K] rows of an item lie in a block of ``key_tensor``."""
        n, row, head = self.geometry.place(item)
        return self._index(n, row, head // self.extent.ratio, self.extent.key_dim)

    def _index(self, n: int, row: int, head: int, width: int) -> tuple[Any, ...]:
        chunk = self.geometry.chunk
        tokens = slice(n * chunk, (n + 1) * chunk)
        if self.flat:
            return row, tokens, slice(head * width, (head + 1) * width)
        return head, row, tokens, slice(None)

    def rows_of(self, n: int, row: int, head: Any, width: int) -> tuple[Any, ...]:
        """Where the [C, width] rows of a chunk of one head, which may be a traced number, lie in a
        block of ``tensor`` or ``key_tensor``; lanes of a traced head must be whole registers."""
        if isinstance(head, int) or not self.flat:
            return self._index(n, row, head, width)
        chunk = self.geometry.chunk
        lanes = pl.ds(pl.multiple_of(head * width, LANES), width)
        return row, slice(n * chunk, (n + 1) * chunk), lanes

    @property
    def lanes_as_given(self) -> bool:
        """Whether blocks of beta hold whole registers of tokens of all their batch rows, so that a
        kernel takes it as it is."""
        geometry, extent = self.geometry, self.extent
        return (
            geometry.layout == "HBTD"
            and geometry.block % LANES == 0
            and geometry.block <= extent.tokens
            and geometry.rows == extent.batch
        )

    @property
    def _head_rows(self) -> bool:
        """Whether heads are rows of [HV, T], which is how XLA lays out [HV, 1, T] by itself."""
        heads, extent = self.geometry.heads, self.extent
        return extent.batch == 1 and (heads % SUBLANES == 0 or heads == extent.value_heads)

    def lanes_view(self, beta: jax.Array) -> jax.Array:
        """beta [HV, B, T], for which ``lanes_as_given`` holds, as blocks are cut from it."""
        return beta[:, 0] if self._head_rows else beta

    def lanes(self, where: Where) -> pl.BlockSpec:
        """Block of ``lanes_view``."""
        geometry = self.geometry
        if self._head_rows:
            shape = (geometry.heads, geometry.block)
            return pl.BlockSpec(shape, lambda row, group, step: (group, where(step)))
        return pl.BlockSpec(
            (geometry.heads, geometry.rows, geometry.block),
            lambda row, group, step: (group, row, where(step)),
        )

    def lane_index(self, item: int) -> tuple[Any, ...]:
        """Where the [1, C] lanes of an item lie in a block of ``lanes``."""
        n, row, head = self.geometry.place(item)
        chunk = self.geometry.chunk
        tokens = slice(n * chunk, (n + 1) * chunk)
        if self._head_rows:
            return slice(head, head + 1), tokens
        return head, slice(row, row + 1), tokens

    def lane_rows(self, beta: jax.Array) -> jax.Array:
        """beta as a lane row a pack: [B / rows, groups, blocks, packs, 128] f32, 0 past the end."""
        geometry = self.geometry
        pad = [(0, 0)] * 3
        axis = 2 if geometry.layout == "HBTD" else 1
        pad[axis] = (0, self.blocks * geometry.block - self.extent.tokens)
        beta = jnp.pad(beta.astype(F32), pad)
        heads = (self.groups, geometry.heads)
        batch = (self.row_groups, geometry.rows)
        tokens = (self.blocks, geometry.chunks, geometry.chunk)
        if geometry.layout == "HBTD":
            parts = beta.reshape(*heads, *batch, *tokens).transpose(2, 0, 4, 5, 3, 1, 6)
        else:
            parts = beta.reshape(*batch, *tokens, *heads).transpose(0, 5, 2, 3, 1, 6, 4)
        return parts.reshape(*self.pack_shape(), LANES)

    def states(self, shape: tuple[int, int]) -> pl.BlockSpec:
        """Block of [B, 1, HV, *shape], of every stream of a program; ``state_index`` says where."""
        geometry = self.geometry
        return pl.BlockSpec(
            (geometry.rows, 1, geometry.heads, *shape),
            lambda row, group, step: (row, 0, group, 0, 0),
        )

    def state_index(self, item: int) -> tuple[int, int, int]:
        """Where the stream of an item has its state in a block of ``states``."""
        _, row, head = self.geometry.place(item)
        return row, 0, head

    def pack_shape(self) -> tuple[int, ...]:
        """Leading axes of an array that holds something for every pack."""
        return (self.row_groups, self.groups, self.blocks, self.geometry.packs)

    def per_pack(self, shape: tuple[int, ...], where: Where) -> pl.BlockSpec:
        """Block of an array [*pack_shape, *shape]."""
        zeros = (0,) * (1 + len(shape))
        return pl.BlockSpec(
            (None, None, None, self.geometry.packs, *shape),
            lambda row, group, step: (row, group, where(step), *zeros),
        )

    def chunk_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of an array that holds something for every chunk: [B, HV, chunks, *shape]."""
        extent = self.extent
        chunks = self.blocks * self.geometry.chunks
        return (extent.batch, extent.value_heads, chunks, *shape)

    def per_chunk(self, shape: tuple[int, ...], where: Where) -> pl.BlockSpec:
        """Block of an array of ``chunk_shape``; ``geometry.place`` gives (chunk, row, head)."""
        geometry = self.geometry
        zeros = (0,) * len(shape)
        return pl.BlockSpec(
            (geometry.rows, geometry.heads, geometry.chunks, *shape),
            lambda row, group, step: (row, group, where(step), *zeros),
        )


def widened(x: jax.Array) -> jax.Array:
    """x [rows, D] with zero lanes up to whole registers."""
    missing = padded(x.shape[1]) - x.shape[1]
    if not missing:
        return x
    return jnp.concatenate([x, jnp.zeros((x.shape[0], missing), x.dtype)], axis=1)


def bias(given: jax.Array | None, heads: int, key_dim: int) -> jax.Array:
    """The bias of a raw gate, [HV, K] f32; 0 where there is none."""
    if given is None:
        return jnp.zeros((heads, key_dim), F32)
    return given.astype(F32).reshape(heads, key_dim)


def gate_rows(
    a_log: jax.Array | None, shift: jax.Array | None, heads: int, key_dim: int
) -> jax.Array:
    """``gates.rate``, 1 where there is none, and ``bias`` as rows: [HV, 2, padded K] f32."""
    rates = jnp.ones(heads, F32) if a_log is None else gates.rate(a_log.astype(F32))
    rates = jnp.broadcast_to(rates[:, None], (heads, key_dim))
    rows = jnp.stack([rates, bias(shift, heads, key_dim)], axis=1)
    return jnp.pad(rows, [(0, 0), (0, 0), (0, padded(key_dim) - key_dim)])
