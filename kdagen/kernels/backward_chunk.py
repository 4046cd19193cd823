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
from kdagen.kernels.backward_item import Item, Pack
from kdagen.kernels.lanes import (
    F32,
    FULL,
    NT,
    SPLIT,
    beside,
    dot,
    index,
    parts,
    rows,
    stack,
)


def correct(
    item: Item, value: jax.Array, dtype: DTypeLike, inverse_dtype: DTypeLike
) -> Generator[None, None, None]:
    """E again, from the state. Yields after every product."""
    decayed = item.key * item.from_start
    read = dot(decayed, item.state(), dtype=dtype)
    yield
    residual = value - read
    change = dot(item.inverse(), residual, dtype=inverse_dtype)
    yield
    corrected = residual + change
    item.corrected = lambda: corrected


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
    Yields after every product, and before one whose operands it has made.
    """
    passes = FULL if dtype == F32 else SPLIT
    own = item.own
    after = d_state[stream].astype(inverse_dtype)
    item.d_state = after
    inner = dot(
        item.related[:, : item.chunk],
        item.d_output(inverse_dtype),
        dtype=inverse_dtype,
        passes=passes,
    )
    outer = dot(item.keys_to_end, after, dtype=inverse_dtype, passes=passes)
    yield
    item.d_written = inner + outer
    if own is not None:
        item.d_written = item.d_written + own * item.d_output(F32)
    if (more := item.written_within) is not None:
        item.d_written = item.d_written + more
    scaled = item.d_written * item.write
    yield
    change = dot(item.transposed, scaled, dtype=inverse_dtype)
    yield
    d_residual = scaled + change
    if put is not None:
        put(d_residual)
    item.both = stack([item.d_output(inverse_dtype), (-d_residual).astype(inverse_dtype)])
    item.keep("both", item.both)
    yield
    update, d_strength = _update(item, strengths, dtype, inverse_dtype)
    yield
    if d_strength is not None:
        item.d_strength = item.d_written + d_strength
    whole = jnp.broadcast_to(item.whole, (8, item.whole.shape[1]))
    if (more := item.left_within) is not None:
        update = update + more
    d_state[stream] = d_state[stream] * jnp.transpose(whole)[:, 0:1] + update


def _update(
    item: Item, strengths: bool, dtype: DTypeLike, inverse_dtype: DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    """(scale q d)^T dout - (k d)^T dR, and -N^T dR if it is wanted."""
    if not strengths:
        return dot(item.reads, item.both, dtype=dtype), None
    related = item.related
    keys = jnp.where(index(related.shape, 1) >= item.chunk, related.astype(F32), 0.0)
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
    """Of one chunk-head, [C, KP] f32 each; of queries and keys as normalised.

    That of the log decay is ``sums``, and ``whole`` [1, KP] for each of its tokens.
    """

    query: Any
    key: Any
    sums: decay_gradients.Sums
    whole: Any


def gradients(
    pack: Pack, base: int, scale: float, dtype: DTypeLike, inverse_dtype: DTypeLike
) -> Generator[None, None, list[Gradients]]:
    """Gradients of a pack whose recurrences are done.

    Where keys are nearly parallel, dQ and dN alternate along a row as the corrected values do, and
    add up to little: they are formed, and applied, in ``inverse_dtype`` as those are. Yields after
    every product, and before one whose operands it has made.
    """
    passes = FULL if dtype == F32 else SPLIT
    items = pack.items
    chunk, key_dim = items[0].chunk, items[0].whole.shape[1]
    tree = decay_tree.levels(chunk, base)
    products = [_with_written(item, inverse_dtype, passes) for item in items]
    yield
    writes = [jnp.transpose(rows(made, 2 * chunk, key_dim)) for made in products]
    on_diagonal = index((chunk, chunk), 0) == index((chunk, chunk), 1)
    own, cuts = [], []
    for item, made in zip(items, products, strict=True):
        d_query, d_key = rows(made, 0, chunk), rows(made, chunk, chunk)
        if (alike := item.of_one_segment) is None:
            d_query = d_query * scale
        else:
            d_query, d_key = d_query * (alike * scale), d_key * alike
        own.append(jnp.where(on_diagonal, d_query, 0.0).astype(dtype))
        cuts.append(decay_gradients.cuts(d_query, d_key, tree, inverse_dtype))
    yield
    diagonal = gate_gradients.lane_sums(stack(own), key_dim, dtype)
    related = [
        decay_gradients.products(cut, item, inverse_dtype, passes)
        for item, cut in zip(items, cuts, strict=True)
    ]
    reads = [dot(item.both, item.state(), NT, inverse_dtype, passes) for item in items]
    kept = [_along_values(item.state(), item.d_state, inverse_dtype) for item in items]
    yield
    results = []
    for x, item in enumerate(items):
        found = decay_gradients.gradients(related[x], item, tree)
        query = rows(reads[x], 0, chunk) * (item.from_start * scale)
        key = rows(reads[x], chunk, chunk) * item.from_start
        written_key = writes[x] * item.to_end
        later, earlier = item.query * query + item.key * key, item.key * written_key
        mine = rows(diagonal, x * chunk, chunk)
        results.append(
            Gradients(
                query + found.query + mine * item.key,
                key + found.key + written_key + mine * item.query,
                decay_gradients.sums(
                    later, earlier, found.terms, tree, inverse_dtype, item.reached
                ),
                item.whole * kept[x],
            )
        )
    return results


def _with_written(item: Item, dtype: DTypeLike, passes: int) -> jax.Array:
    """(dout; -dR; dS') P^T [2C + K, C] f32.

    The gradient of a decay may hang on a few pairs of tokens, whose products are small by chance: P
    is taken in two parts.
    """
    written = item.corrected() * item.write
    item.keep("written", written)
    # dS' P^T beside them costs no weights of its own, as P dS'^T would
    every = stack([item.both, item.d_state])
    if dtype == F32:
        return dot(every, written, NT, dtype, passes)
    high, low = parts(written, F32, SPLIT)
    return dot(every, high, NT, dtype) + dot(every, low, NT, dtype)


def _along_values(state: jax.Array, d_state: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Sum over V of S times dS', both [K, V]: [1, K] f32, by the MXU as a row."""
    if dtype == F32:
        product = jnp.sum(state.astype(F32) * d_state.astype(F32), axis=1, keepdims=True)
        return rows(jnp.transpose(jnp.broadcast_to(product, (state.shape[0], 8))), 0, 1)
    product = state.astype(F32) * d_state.astype(F32)
    split = beside(parts(product, F32, SPLIT))
    return rows(dot(jnp.ones((8, split.shape[1]), dtype), split, NT, dtype), 0, 1)
