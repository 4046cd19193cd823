"""The backward of one chunk, from the cotangents of its output and of the state after it.

With E the corrected values, P = diag(b) E what is written, X = (I + N diag(b))^-1, q and k the
normalised queries and keys, d the decay from the chunk's start and e that to its end, the forward
is

  R = v - (k d) S,   E = X R,   out = scale ((q d) S + Q P),   S' = diag(2^total) S + (k e)^T P

and its cotangents, in the order in which they are computed:

  dP = scale Q^T dout + (k e) dS'
  dR = X^T diag(b) dP                                            = dv
  dS = diag(2^total) dS' + (scale q d)^T dout - (k d)^T dR
  Z  = dP - N^T dR                                               b: sum over V of E Z
  dQ = scale tril(dout P^T),  dN = -tril(dR P^T, -1)

The first three depend on the chunk after it and are the recurrence; the rest is not. Everything
that enters the gradient of a decay reaches it with one sign, through rows t >= s or columns j < s
of token s, so nothing is formed that has to cancel: the diagonal of dQ, which has no decay, is kept
out of it, and so is what of the state's write is not decayed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kdagen.kernels import decay_gradients, decay_tree, gate_gradients
from kdagen.kernels.inverse import on_diagonal
from kdagen.kernels.lanes import (
    F32,
    FULL,
    NT,
    SPLIT,
    choose,
    dot,
    index,
    quotient,
    remainder,
    rows,
    stack,
)
from kdagen.kernels.tiling import LANES


@dataclass
class Item:
    """What the stages of one chunk-head hand to one another.

    Attributes:
      query, key: [C, KP] f32, normalised where the call asks for it.
      query_norm, key_norm: [C, KP] f32, what they were normalised by, or None.
      gate: the activated gate, a ``gate_gradients.Gate``.
      decays: its factors, ``decay_tree.Decays``.
      d_output: reads it, [C, VP] f32.
      state: reads it, [KP, VP].
      write: [C, 1] f32, b.
      keys_to_end: [C, KP], k e.
      reads: [KP, 2C], (scale q d; k d) transposed.
      related: [C, 2C], scale Q^T beside N^T.
      inverse: [C, C], X - I; transposed: [C, C], its transpose.
      d_written: [C, VP] f32, first the part of dP that does not depend on dS', then all of dP.
      d_state: [KP, VP], dS'.
      both: [2C, VP], dout above -dR.
      corrected: reads E, [C, VP] f32.
      d_strength: [C, VP] f32, Z.
    """

    query: Any = None
    key: Any = None
    query_norm: Any = None
    key_norm: Any = None
    gate: Any = None
    decays: Any = None
    d_output: Any = None
    state: Any = None
    write: Any = None
    keys_to_end: Any = None
    reads: Any = None
    related: Any = None
    inverse: Any = None
    transposed: Any = None
    d_written: Any = None
    d_state: Any = None
    both: Any = None
    corrected: Any = None
    d_strength: Any = None


@dataclass
class Pack:
    """A pack of chunk-heads, and what they share.

    Attributes:
      items: its chunk-heads.
      operands: of their relations.
      relations: [C, 128] f32, -N diag(b).
    """

    items: list[Item]
    operands: Any = None
    relations: Any = None


def relate(
    pack: Pack, beta: jax.Array, scale: float, dtype: DTypeLike, inverse_dtype: DTypeLike
) -> Generator[None, None, None]:
    """Relations of a pack, and what its recurrence takes. Queries, keys and decays are there.

    ``beta`` [1, 128] f32 is that of the pack. Yields after every product.
    """
    items = pack.items
    every = [item.decays for item in items]
    tree = every[0].levels
    pack.operands = decay_tree.operands(
        [item.query for item in items], [item.key for item in items], every, dtype
    )
    yield
    query, key = decay_tree.relations(pack.operands, tree, dtype)
    own = None
    if not decay_tree.has_diagonal(tree):
        products = stack([item.query * item.key for item in items])
        value_dim = items[0].d_output().shape[1]
        own = gate_gradients.lane_sums(products, value_dim, dtype) * scale
    yield
    pack.relations = key * -beta
    chunk = query.shape[0]
    across = jnp.transpose(stack([query * scale, key])).astype(inverse_dtype)
    for x, item in enumerate(items):
        relations = rows(across, x * chunk, chunk)
        decays = item.decays
        item.keys_to_end = (item.key * decays.to_end).astype(inverse_dtype)
        reads = [item.query * (decays.from_start * scale), item.key * decays.from_start]
        item.reads = jnp.transpose(stack(reads)).astype(dtype)
        item.related = relations
        d_output = item.d_output()
        passes = FULL if dtype == F32 else SPLIT
        item.d_written = dot(relations[:, :chunk], d_output, dtype=inverse_dtype, passes=passes)
        if own is not None:
            item.d_written = item.d_written + rows(own, x * chunk, chunk) * d_output
    yield


def set_inverse(pack: Pack, inverse: jax.Array) -> None:
    """Hands the inverse [C, 128] of a pack to its items, less the identity.

    What it leaves as it is, most of what it is applied to, is spared the rounding of an operand.
    """
    chunk = inverse.shape[0]
    inverse = jnp.where(on_diagonal(chunk), 0.0, inverse.astype(F32))
    across = jnp.transpose(inverse)
    for x, item in enumerate(pack.items):
        item.inverse = inverse[:, x * chunk : (x + 1) * chunk]
        item.transposed = rows(across, x * chunk, chunk)


def correct(
    item: Item, value: jax.Array, dtype: DTypeLike, inverse_dtype: DTypeLike
) -> Generator[None, None, None]:
    """E again, from the state. Yields after every product."""
    decayed = item.key * item.decays.from_start
    residual = value - dot(decayed, item.state(), dtype=dtype)
    yield
    corrected = residual + dot(item.inverse, residual, dtype=inverse_dtype)
    item.corrected = lambda: corrected
    yield


def recur(
    item: Item,
    d_state: Any,
    stream: int,
    put: Callable[[jax.Array], None] | None,
    strengths: bool,
    dtype: DTypeLike,
    inverse_dtype: DTypeLike,
) -> Generator[None, None, None]:
    """dP and dR of a chunk; replaces ``d_state[stream]`` [KP, VP] f32.

    ``put`` stores dR, the gradient of the values. ``strengths`` says whether Z is wanted.
    Yields after every product.
    """
    item.d_state = d_state[stream].astype(inverse_dtype)
    passes = FULL if dtype == F32 else SPLIT
    item.d_written = item.d_written + dot(
        item.keys_to_end, item.d_state, dtype=inverse_dtype, passes=passes
    )
    yield
    scaled = item.d_written * item.write
    d_residual = scaled + dot(item.transposed, scaled, dtype=inverse_dtype)
    item.both = stack([item.d_output(), -d_residual]).astype(inverse_dtype)
    if put is not None:
        put(d_residual)
    yield
    update, change = _update(item, strengths, dtype, inverse_dtype)
    if change is not None:
        item.d_strength = item.d_written + change
    whole = jnp.broadcast_to(jnp.exp2(item.decays.total), (8, item.key.shape[1]))
    d_state[stream] = d_state[stream] * jnp.transpose(whole)[:, 0:1] + update
    yield


def _update(
    item: Item, strengths: bool, dtype: DTypeLike, inverse_dtype: DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    """(scale q d)^T dout - (k d)^T dR, and -N^T dR if it is wanted."""
    if not strengths:
        return dot(item.reads, item.both, dtype=dtype), None
    own = index(item.related.shape, 1) >= item.related.shape[0]
    keys = jnp.where(own, item.related.astype(F32), 0.0)
    if inverse_dtype != dtype:
        change = dot(keys, item.both, dtype=inverse_dtype, passes=SPLIT)
        return dot(item.reads, item.both, dtype=dtype), change
    product = dot(stack([item.reads, keys.astype(dtype)]), item.both, dtype=dtype)
    split = item.reads.shape[0]
    return product[:split], product[split:]


def write_gradient(pack: Pack) -> Generator[None, None, jax.Array]:
    """Gradient [1, 128] f32 of the write strengths of a pack. Yields once."""
    product = stack([item.d_strength * item.corrected() for item in pack.items])
    # by the XLU and in f32: with a fast decay a few tokens are all that counts
    sums = jnp.sum(product, axis=1, keepdims=True)
    yield
    return rows(jnp.transpose(jnp.broadcast_to(sums, (product.shape[0], 8))), 0, 1)


@dataclass
class Gradients:
    """Of one chunk-head, [C, KP] f32 each; of queries and keys as normalised."""

    query: Any = None
    key: Any = None
    log_decay: Any = None


def gradients(
    pack: Pack, scale: float, dtype: DTypeLike, inverse_dtype: DTypeLike
) -> Generator[None, None, list[Gradients]]:
    """Gradients of a pack whose recurrences are done. Yields after every product.

    Where keys are nearly parallel, dQ and dN alternate along a row as the corrected values do, and
    add up to little: they are formed, and applied, in ``inverse_dtype`` as those are.
    """
    passes = FULL if dtype == F32 else SPLIT
    items = pack.items
    chunk, key_dim = items[0].key.shape
    columns = stack([item.corrected() * item.write for item in items]).astype(inverse_dtype)
    # dS' P^T beside them costs no weights of its own, as P dS'^T would
    products = [
        dot(stack([item.both, item.d_state]), columns, NT, inverse_dtype, passes) for item in items
    ]
    yield
    owner = quotient(index(products[0].shape, 1), chunk)
    related = choose(products, owner)
    d_query, d_key = rows(related, 0, chunk) * scale, rows(related, chunk, chunk)
    writes = jnp.transpose(rows(related, 2 * chunk, key_dim))
    row, column = index((chunk, LANES), 0), remainder(index((chunk, LANES), 1), chunk)
    diagonals = jnp.where(row == column, d_query, 0.0)
    owner = rows(owner, 0, chunk)
    own = stack([jnp.where(owner == x, diagonals, 0.0) for x in range(len(items))])
    diagonal = gate_gradients.lane_sums(own, key_dim, dtype)
    reads = [dot(item.both, item.state(), NT, inverse_dtype, passes) for item in items]
    yield
    inner = decay_gradients.gradients(
        d_query, d_key,
        [item.query for item in items], [item.key for item in items],
        pack.operands, [item.decays for item in items], inverse_dtype, passes,
    )  # fmt: skip
    yield
    made = []
    for x, item in enumerate(items):
        decays, found = item.decays, inner[x]
        query = rows(reads[x], 0, chunk) * (decays.from_start * scale)
        key = rows(reads[x], chunk, chunk) * decays.from_start
        written_key = rows(writes, x * chunk, chunk) * decays.to_end
        later, earlier = item.query * query + item.key * key, item.key * written_key
        kept = item.state().astype(F32) * item.d_state.astype(F32)
        kept = jnp.broadcast_to(jnp.sum(kept, axis=1, keepdims=True), (key_dim, 8))
        whole = jnp.exp2(decays.total) * rows(jnp.transpose(kept), 0, 1)
        mine = rows(diagonal, x * chunk, chunk)
        made.append(
            Gradients(
                query + found.query + mine * item.key,
                key + found.key + written_key + mine * item.query,
                decay_gradients.decay_gradient(
                    later, earlier, found.terms, decays.levels, inverse_dtype, passes
                )
                + whole,
            )
        )
    yield
    return made
