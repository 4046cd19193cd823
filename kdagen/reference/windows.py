"""Where the chunks of a packed or plain sequence lie, and how their rows are read and written.

A chunk never spans two segments: every segment is cut from its own first token, so that the last
chunk of a segment may be short. Tensors stay where they are and as they are laid out; a chunk reads
a window of C rows at its first token, masks what is not its own, and writes back just its own rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kdagen.reference.layout import heads_first, in_layout

LARGEST_CHUNK = 64


@dataclass(frozen=True)
class Windows:
    """The chunks of a call.

    Attributes:
      chunk: rows of a window, C.
      tokens: sequence length T.
      bound: static upper bound of the number of chunks.
      count: chunks to be walked, the most of any batch row; traced if there are segments.
      start, length, slot: int32 [bound, B], first token, rows and segment of every chunk, rows
        being 0 past a batch row's own chunks; None without segments.
      first, last: bool [bound, B], whether it begins or ends its segment; None without segments.
      layout: of the tensors that windows are cut from: "HBTD" or "BTHD".
    """

    chunk: int
    tokens: int
    bound: int
    count: int | jax.Array
    start: jax.Array | None = None
    length: jax.Array | None = None
    slot: jax.Array | None = None
    first: jax.Array | None = None
    last: jax.Array | None = None
    layout: str = "HBTD"

    @property
    def token_axis(self) -> int:
        """Axis of the tokens in a tensor of `layout`; that of the batch is the one before."""
        return 2 if self.layout == "HBTD" else 1

    @property
    def padded_tokens(self) -> int:
        """Rows that a tensor needs for every window to lie inside it."""
        return self.bound * self.chunk if self.start is None else self.tokens + self.chunk

    def pad(self, x: jax.Array) -> jax.Array:
        """A tensor as windows are cut from it: padded to padded_tokens, [H, B, T', ...], or
        [B, T', H * D] of layout "BTHD", as a projection gives it; the rows added are never looked
        at."""
        if self.layout == "BTHD":
            x = x.reshape(*x.shape[:2], -1)
        more = self.padded_tokens - self.tokens
        sides = [(0, more if axis == self.token_axis else 0) for axis in range(x.ndim)]
        return jnp.pad(x, sides) if more else x

    def cut(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `pad`, for a tensor that had `shape`."""
        return lax.slice_in_dim(x, 0, self.tokens, axis=self.token_axis).reshape(shape)

    def live(self, i: jax.Array) -> jax.Array:
        """bool [B or 1, C]: the rows of window i that are the chunk's own."""
        row = jnp.arange(self.chunk, dtype=jnp.int32)[None]
        if self.length is None:
            return i * self.chunk + row < self.tokens
        return row < self.length[i][:, None]

    def take(self, x: jax.Array, i: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Rows [H, B, C, ...] of window i of what `pad` made of a tensor of `shape`."""
        rows = self._slice(x, i)
        if self.layout == "BTHD":
            rows = rows.reshape(*rows.shape[:2], *shape[2:])
        return heads_first(rows, self.layout)

    def put(self, x: jax.Array, i: jax.Array, rows: jax.Array) -> jax.Array:
        """`x` with the chunk's own rows of window i replaced; the inverse of `take`."""
        axis = self.token_axis
        rows = in_layout(rows, self.layout)
        if self.layout == "BTHD":
            rows = rows.reshape(*rows.shape[:2], -1)
        if self.start is None:
            return lax.dynamic_update_slice_in_dim(x, rows, i * self.chunk, axis=axis)
        own = [1] * x.ndim
        own[axis - 1 : axis + 1] = -1, self.chunk
        rows = jnp.where(self.live(i).reshape(own), rows, self._slice(x, i))
        if x.shape[axis - 1] == 1:
            return lax.dynamic_update_slice_in_dim(x, rows, self.start[i, 0], axis=axis)
        paste = lambda x, rows, at: lax.dynamic_update_slice_in_dim(x, rows, at, axis=axis - 1)  # noqa: E731
        batched = jax.vmap(paste, in_axes=(axis - 1, axis - 1, 0), out_axes=axis - 1)
        return batched(x, rows, self.start[i])

    def _slice(self, x: jax.Array, i: jax.Array) -> jax.Array:
        """The rows of window i as they lie in `x`."""
        axis = self.token_axis
        if self.start is None:
            return lax.dynamic_slice_in_dim(x, i * self.chunk, self.chunk, axis=axis)
        if x.shape[axis - 1] == 1:
            return lax.dynamic_slice_in_dim(x, self.start[i, 0], self.chunk, axis=axis)
        cut = lambda row, at: lax.dynamic_slice_in_dim(row, at, self.chunk, axis=axis - 1)  # noqa: E731
        return jax.vmap(cut, in_axes=(axis - 1, 0), out_axes=axis - 1)(x, self.start[i])


def chunk_size(tokens: int) -> int:
    """64, or the next power of two for a shorter sequence."""
    return min(LARGEST_CHUNK, 1 << (tokens - 1).bit_length())


def plan(tokens: int, boundaries: jax.Array | None, layout: str = "HBTD") -> Windows:
    """The windows of T tokens, cut at boundaries int32 [B, N + 1] if there are any."""
    chunk = chunk_size(tokens)
    if boundaries is None:
        bound = -(-tokens // chunk)
        return Windows(chunk, tokens, bound, bound, layout=layout)
    slots = boundaries.shape[1] - 1
    # sum of ceil(l / C) over at most m segments that are not empty and hold T tokens together
    busy = min(slots, tokens)
    bound = (tokens - busy) // chunk + busy
    sizes = boundaries[:, 1:] - boundaries[:, :-1]
    chunks_up_to = jnp.cumsum((sizes + chunk - 1) // chunk, axis=1, dtype=jnp.int32)
    counts = chunks_up_to[:, -1]
    index = jnp.arange(bound, dtype=jnp.int32)
    find = jax.vmap(lambda edges: jnp.searchsorted(edges, index, side="right"))
    slot = jnp.minimum(find(chunks_up_to).astype(jnp.int32), slots - 1)
    of_slot = lambda x: jnp.take_along_axis(x, slot, axis=1)  # noqa: E731
    begin, end = of_slot(boundaries[:, :-1]), of_slot(boundaries[:, 1:])
    before = of_slot(chunks_up_to - (sizes + chunk - 1) // chunk)
    start = begin + (index[None] - before) * chunk
    busy_here = index[None] < counts[:, None]
    length = jnp.where(busy_here, jnp.minimum(end - start, chunk), 0)
    first = busy_here & (start == begin)
    last = busy_here & (start + length == end)
    start = jnp.where(busy_here, start, 0)
    return Windows(
        chunk, tokens, bound, jnp.max(counts), start.T, length.T, slot.T, first.T, last.T, layout
    )
