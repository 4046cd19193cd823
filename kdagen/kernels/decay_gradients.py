"""Gradients through the relations of ``kdagen.kernels.decay_tree``.

With dQ and dN of one level, f the factors of its rows t and g those of its rows j,

  d q_t = f_t * sum_j dQ[t, j] (g_j k_j),         d k_t = f_t * sum_j dN[t, j] (g_j k_j)
  d k_j = g_j * sum_t dQ[t, j] (f_t q_t) + dN[t, j] (f_t k_t)

A term of a level reaches the decay of the tokens that its factor holds and of no others, tokens s
<= t of the right half for a row t and tokens s > j of the left half for a row j. So it is summed
within its half, and nothing is formed that has to cancel, except within a base block, whose pairs
reach every token of the block with both signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kdagen.kernels.decay_tree import Decays, Level, Operands
from kdagen.kernels.gate_gradients import parts
from kdagen.kernels.lanes import (
    BF16,
    F32,
    dot,
    index,
    quotient,
    remainder,
    rows,
    same_block,
    stack,
)
from kdagen.kernels.relations import _alternate as alternate
from kdagen.kernels.tiling import SUBLANES


@dataclass
class Gradients:
    """Of one chunk-head, from its relations: [C, K] f32 each.

    Attributes:
      query, key: of queries and keys.
      terms: per level, what each row adds to the gradient of the decays that it reaches.
    """

    query: jax.Array
    key: jax.Array
    terms: list[jax.Array]


def gradients(
    d_query: jax.Array,
    d_key: jax.Array,
    queries: Sequence[jax.Array],
    keys: Sequence[jax.Array],
    given: Operands,
    decays: Sequence[Decays],
    dtype: DTypeLike,
    passes: int,
) -> list[Gradients]:
    """Of each chunk-head of a pack, from dQ and dN [C, 128] f32, of which pairs t > j count."""
    chunk, count = d_query.shape[0], len(decays)
    zero = jnp.zeros((chunk, keys[0].shape[1]), F32)
    found = [Gradients(zero, zero, []) for _ in decays]
    for i, level in enumerate(decays[0].levels):
        mine = level.pairs()
        cut = stack([level.compact(jnp.where(mine, d, 0.0)) for d in (d_query, d_key)])
        owner = quotient(index(cut.shape, 1), chunk)
        own = [cut] if count == 1 else [jnp.where(owner == x, cut, 0.0) for x in range(count)]
        lefts = dot(stack(own), given.right[i], dtype=dtype, passes=passes)
        across = jnp.transpose(cut)
        height = level.height
        for x, decay in enumerate(decays):
            one = found[x]
            query, key = (
                level.natural(rows(lefts, (2 * x + side) * height, height)) for side in range(2)
            )
            down = dot(rows(across, x * chunk, chunk), given.left[i][x], dtype=dtype, passes=passes)
            if level.base:
                one.terms.append(_base_terms(given, i, x, query, key, down))
                query, key = query * decay.left[i], key * decay.left[i]
                key = key + down * decay.right[i]
            else:
                query = alternate(zero, query, level.half) * decay.left[i]
                key = alternate(down, key, level.half) * decay.left[i]
                one.terms.append(queries[x] * query + keys[x] * key)
            one.query, one.key = one.query + query, one.key + key
    return found


def _base_terms(
    given: Operands, i: int, x: int, query: jax.Array, key: jax.Array, down: jax.Array
) -> jax.Array:
    """What rows of a base block add to the gradients of decays, those j with a minus.

    They are formed with the operands as they went into the products, rounded: then what a pair adds
    as a row and takes as a column is the same to the last digits of f32.
    """
    chunk = query.shape[0]
    left = given.left[i][x].astype(F32)
    right = rows(given.right[i], x * chunk, chunk).astype(F32)
    return rows(left, 0, chunk) * query + rows(left, chunk, chunk) * key - right * down


def decay_gradient(
    later: jax.Array,
    earlier: jax.Array,
    terms: Sequence[jax.Array],
    tree: Sequence[Level],
    dtype: DTypeLike,
    passes: int,
) -> jax.Array:
    """Gradient [C, K] f32 of the log decay of each token s.

    It is the sum of ``later`` [C, K] over rows t >= s, that of ``earlier`` over rows j < s, and
    that of ``terms`` within the halves of their levels. From the whole chunk down, the halves of a
    block exchange totals: the right one gives its ``later`` to all tokens of the left, the left
    one its ``earlier`` to all of the right; then the terms of their level join in.
    """
    chunk, key_dim = later.shape
    blocks = [(later, earlier)]
    carried: list[jax.Array | None] = [None]
    coarse = [level for level in tree if not level.base and level.block > SUBLANES]
    for i, level in enumerate(coarse):
        half = level.half
        after: list[tuple[jax.Array, jax.Array]] = []
        totals: list[jax.Array | None] = []
        for (late, early), total, start in zip(
            blocks, carried, range(0, chunk, level.block), strict=True
        ):
            first, second = rows(terms[i], start, half), rows(terms[i], start + half, half)
            given = [
                jnp.sum(rows(late, half, half), axis=0, keepdims=True),
                jnp.sum(rows(early, 0, half), axis=0, keepdims=True),
            ]
            totals += given if total is None else [x + total for x in given]
            after.append((rows(late, 0, half), rows(early, 0, half) + first))
            after.append((rows(late, half, half) + second, rows(early, half, half)))
        blocks, carried = after, totals
    late, early = (stack([block[side] for block in blocks]) for side in range(2))
    if tree[-1].base:
        found = _within(late, terms[-1], early, tree[-1].block, dtype, passes)
    else:
        found = _exchanged(late, early, terms[len(coarse) :], tree[len(coarse) :], dtype, passes)
    if carried[0] is None:
        return found
    size = chunk // len(carried)
    return found + stack([jnp.broadcast_to(x, (size, key_dim)) for x in carried if x is not None])


def _exchanged(
    later: jax.Array,
    earlier: jax.Array,
    terms: Sequence[jax.Array],
    tree: Sequence[Level],
    dtype: DTypeLike,
    passes: int,
) -> jax.Array:
    """The rest of ``decay_gradient`` within blocks of eight rows, the exchanges as one product."""
    chunk = later.shape[0]
    given, reached = [], []
    row, column = index((chunk, chunk), 0), index((chunk, chunk), 1)
    zero = jnp.zeros_like(later)
    for level, term in zip(tree, terms, strict=True):
        half = level.half
        given.append(alternate(earlier, later, half))
        reached.append(same_block(row, column, level.block) & ~same_block(row, column, half))
        later = later + alternate(zero, term, half)
        earlier = earlier + alternate(term, zero, half)
    ones = jnp.concatenate([x.astype(F32) for x in reached], axis=1).astype(BF16)
    return later + dot(ones, stack(given), dtype=dtype, passes=passes)


def _within(
    later: jax.Array,
    base: jax.Array,
    earlier: jax.Array,
    block: int,
    dtype: DTypeLike,
    passes: int,
) -> jax.Array:
    """Sum of ``later`` and ``base`` [C, K] over rows t >= s plus that of ``earlier`` over rows j <
    s, of the block of rows that holds s, f32. Only the terms of ``base`` may cancel."""
    chunk = later.shape[0]
    split = 1 if dtype == F32 else 2
    shape = (chunk, (split + 1) * chunk)
    row, lane = index(shape, 0), index(shape, 1)
    column, last = remainder(lane, chunk), quotient(lane, split * chunk) == 1
    below = (last & (column < row)) | (~last & (column >= row))
    reached = below & same_block(row, column, block)
    both = stack([parts(later + base, split), earlier.astype(dtype)])
    return dot(reached.astype(F32).astype(BF16), both, dtype=dtype, passes=passes)
