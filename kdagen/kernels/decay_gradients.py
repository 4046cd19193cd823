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

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kdagen.kernels import decay_tree
from kdagen.kernels.backward_item import Item
from kdagen.kernels.decay_tree import Level
from kdagen.kernels.gate_gradients import parts
from kdagen.kernels.lanes import BF16, F32, dot, index, rows, same_block, stack
from kdagen.kernels.relations import alternate
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


def cuts(
    d_query: jax.Array, d_key: jax.Array, tree: Sequence[Level], dtype: DTypeLike
) -> list[tuple[jax.Array, jax.Array]]:
    """Per level, of dQ and dN [C, C] f32 the rows t, one above the other [2 height, C], and their
    transpose; 0 where the pair is not of the level."""
    made = []
    for level in tree:
        # a mask itself does not take the cuts of rows
        mine = level.compact(level.pairs(d_query.shape[1]).astype(F32)) > 0.0
        cut = stack([jnp.where(mine, level.compact(d), 0.0) for d in (d_query, d_key)])
        cut = cut.astype(dtype)
        made.append((cut, jnp.transpose(cut)))
    return made


def products(
    given: Sequence[tuple[jax.Array, jax.Array]], item: Item, dtype: DTypeLike, passes: int
) -> list[tuple[jax.Array, jax.Array]]:
    """Per level, of what ``cuts`` gives: those with the rows j, [2 height, K], and of its transpose
    with the rows t, [C, K]."""
    operand = functools.partial(dot, dtype=dtype, passes=passes)
    return [
        (operand(cut, item.columns(i)), operand(across, item.rows(i)))
        for i, (cut, across) in enumerate(given)
    ]


def gradients(
    made: Sequence[tuple[jax.Array, jax.Array]], item: Item, tree: Sequence[Level]
) -> Gradients:
    """From the ``products`` of a chunk-head."""
    zero = jnp.zeros_like(made[0][1])
    found = Gradients(zero, zero, [])
    for i, level in enumerate(tree):
        _take(i, level, found, item, *made[i])
    return found


def _take(
    i: int, level: Level, one: Gradients, item: Item, both: jax.Array, down: jax.Array
) -> None:
    """Adds the products of one level: rows t of queries above those of keys, and rows j."""
    query, key = (rows(both, side * level.height, level.height) for side in range(2))
    left = item.left(i)
    if level.base:
        one.terms.append(_base_terms(item.rows(i), item.columns(i), query, key, down))
        one.query = one.query + query * left
        one.key = one.key + key * left + down * item.right
    elif level.half >= SUBLANES:
        _take_halves(level, one, item, left, query, key, down)
    else:
        zero = jnp.zeros_like(down)
        query = alternate(zero, level.natural(query), level.half) * left
        key = alternate(down, level.natural(key), level.half) * left
        one.terms.append(item.query * query + item.key * key)
        one.query, one.key = one.query + query, one.key + key


def _take_halves(
    level: Level,
    one: Gradients,
    item: Item,
    left: jax.Array,
    query: jax.Array,
    key: jax.Array,
    down: jax.Array,
) -> None:
    """Adds the products of one level half-block by half-block: half of the rows have no part in
    the gradient of the queries."""
    query, key = level.natural(query), level.natural(key)
    queries, keys, terms = [], [], []
    for start in range(0, item.chunk, level.block):
        first = functools.partial(rows, start=start, count=level.half)
        second = functools.partial(rows, start=start + level.half, count=level.half)
        mine, later = second(query) * second(left), second(key) * second(left)
        earlier = first(down) * first(left)
        queries += [first(one.query), second(one.query) + mine]
        keys += [first(one.key) + earlier, second(one.key) + later]
        terms.append(first(item.key) * earlier)
        terms.append(second(item.query) * mine + second(item.key) * later)
    one.query, one.key = stack(queries), stack(keys)
    one.terms.append(stack(terms))


def _base_terms(
    left: jax.Array, right: jax.Array, query: jax.Array, key: jax.Array, down: jax.Array
) -> jax.Array:
    """What rows of a base block add to the gradients of decays, those j with a minus.

    They are formed with the operands as they went into the products, rounded: then what a pair adds
    as a row and takes as a column is the same to the last digits of f32.
    """
    chunk = query.shape[0]
    left, right = left.astype(F32), right.astype(F32)
    return rows(left, 0, chunk) * query + rows(left, chunk, chunk) * key - right * down


@dataclass
class Sums:
    """The gradient of the log decay of each token, but for one product.

    Attributes:
      ones: [C, n] f32, 0 and 1; rows: [n, K]: the factors of that product.
      rest: [C, K] f32 to be added, or None; carried: [1, K] f32 for each block of the coarsest
        level that ``rest`` is in, or None.
    """

    ones: jax.Array
    rows: jax.Array
    rest: jax.Array | None
    carried: Sequence[jax.Array | None]

    def beside(self, product: jax.Array) -> jax.Array:
        """The gradient [C, K] f32."""
        found = product if self.rest is None else self.rest + product
        if self.carried[0] is None:
            return found
        size = found.shape[0] // len(self.carried)
        shape = (size, found.shape[1])
        return found + stack([jnp.broadcast_to(x, shape) for x in self.carried if x is not None])


def within(given: Sums, dtype: DTypeLike, passes: int) -> jax.Array:
    """Its product [C, K] f32."""
    return dot(given.ones.astype(BF16), given.rows, dtype=dtype, passes=passes)


def sums(
    later: jax.Array,
    earlier: jax.Array,
    terms: Sequence[jax.Array],
    tree: Sequence[Level],
    dtype: DTypeLike,
    reached: jax.Array | None = None,
) -> Sums:
    """Gradient of the log decay of each token s, but for one product.

    It is the sum of ``later`` [C, K] over rows t >= s, that of ``earlier`` over rows j < s, and
    that of ``terms`` within the halves of their levels. From the whole chunk down, the halves of a
    block exchange totals: the right one gives its ``later`` to all tokens of the left, the left
    one its ``earlier`` to all of the right; then the terms of their level join in.

    ``reached`` is that of a packed chunk with a base.
    """
    chunk = later.shape[0]
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
        split = 1 if dtype == F32 else 2
        both = stack([parts(late + terms[-1], split), parts(early, split)])
        if reached is None:
            reached = decay_tree.reaching(chunk, tree[-1].block, split)
        return Sums(reached, both, None, carried)
    return Sums(*_exchanged(late, early, terms[len(coarse) :], tree[len(coarse) :], dtype), carried)


def _exchanged(
    later: jax.Array,
    earlier: jax.Array,
    terms: Sequence[jax.Array],
    tree: Sequence[Level],
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rest of ``sums`` within blocks of eight rows, the exchanges as one product: its factors,
    and what is to be added. For a product in bf16 what is summed is split in two bf16 parts."""
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
    ones = jnp.concatenate([x.astype(F32) for x in reached], axis=1)
    if dtype == F32:
        return ones, stack(given), later
    return jnp.concatenate([ones] * 2, axis=1), parts(stack(given), 2), later
