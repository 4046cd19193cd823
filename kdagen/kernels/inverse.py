"""The inverse of I - A for strictly lower A, chunk-heads side by side along the lanes.

Diagonal 16-row blocks of all chunk-heads of a pack lie in one [16, 128] value, so that one
product serves eight of them. From 16 rows up, two inverses X and Z of neighbouring diagonal blocks
and the block B below the first merge by

  [X 0; Z B X  Z]
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kdagen.kernels.lanes import (
    BF16,
    F32,
    FULL,
    Parts,
    choose,
    dot_parts,
    index,
    parts,
    quotient,
    remainder,
    rows,
    same_block,
    stack,
)
from kdagen.kernels.tiling import BASE_BLOCK as BASE
from kdagen.kernels.tiling import LANES


class _BlockProduct:
    """Products of [16, 128] values that hold eight 16x16 blocks, block by block.

    ``depth`` lanes (64 or 128) share a weight: a shallow weight is cheaper to load, a deep one
    takes fewer rows. ``dtype`` and ``passes`` are those of ``dot``.
    """

    def __init__(self, depth: int, dtype: DTypeLike, passes: int):
        self.depth, self.dtype, self.passes = depth, dtype, passes
        self.slices = LANES // depth
        self.group = quotient(index((BASE, LANES), 1), BASE)

    def __call__(self, lefts: Sequence[jax.Array], right: jax.Array) -> list[jax.Array]:
        """The product of each of ``lefts`` with ``right``, one product of the MXU."""
        # parts are made of the dense values, before they are laid out
        split = [parts(left, self.dtype, self.passes) for left in lefts]
        made = dot_parts(
            tuple(stack([self._left(x) for x in same]) for same in zip(*split, strict=True)),
            tuple(self._right(x) for x in parts(right, self.dtype, self.passes)),
        )
        height = BASE * self.slices
        return [self._gather(rows(made, i * height, height)) for i in range(len(lefts))]

    def _left(self, a: jax.Array) -> jax.Array:
        return stack([a[:, self.depth * i : self.depth * (i + 1)] for i in range(self.slices)])

    def _right(self, b: jax.Array) -> jax.Array:
        blocks = self.depth // BASE
        place = remainder(self.group, blocks)
        return stack([jnp.where(place == j, b, jnp.zeros_like(b)) for j in range(blocks)])

    def _gather(self, product: jax.Array) -> jax.Array:
        pieces = [rows(product, BASE * i, BASE) for i in range(self.slices)]
        return choose(pieces, quotient(self.group, self.depth // BASE))


def invert(
    load: Callable[[int, int], jax.Array],
    chunk: int,
    block: int,
    depth: int,
    *,
    dtype: DTypeLike = BF16,
    passes: int = FULL,
    less_identity: bool = False,
) -> Generator[None, None, jax.Array]:
    """(I - A)^-1 [C, 128] of a pack, given in ``dtype``, in which (and in how many ``passes``, see
    ``dot``) its products are; less I, if so asked.

    ``load(start, count)`` reads rows of its A [C, 128] f32.

    Diagonal blocks of ``block`` rows come first: for 2 they are I + A, for 4 and 8 a Neumann
    product (I + A)(I + A^2)(I + A^4). With keys that are nearly alike, powers of A
    outgrow the inverse in blocks of 8: its error is up to 50 times that of blocks of 2 or 4, which
    are equally good. Yields after every product.
    """
    compact = yield from _base_blocks(load, chunk, block, _BlockProduct(depth, dtype, passes))
    made = yield from _merge(compact, load, chunk, dtype, passes)
    if less_identity:
        made = jnp.where(on_diagonal(chunk), 0.0, made)
    return made.astype(dtype)


def on_diagonal(chunk: int) -> jax.Array:
    """Where the diagonals of a pack lie: bool [C, 128]."""
    row, lane = index((chunk, LANES), 0), index((chunk, LANES), 1)
    return row == remainder(lane, chunk)


def _base_blocks(
    load, chunk: int, block: int, product: _BlockProduct
) -> Generator[None, None, jax.Array]:
    row, lane = index((BASE, LANES), 0), index((BASE, LANES), 1)
    column = remainder(lane, BASE)
    block_row = quotient(remainder(lane, chunk), BASE)
    a = choose([load(BASE * i, BASE) for i in range(chunk // BASE)], block_row)
    eye = (row == column).astype(F32)
    inner = jnp.where(same_block(row, column, block), a, 0.0)
    x = eye + inner
    if block > 2:
        (power,) = product([inner], inner)
        yield
        done = 2
        while 2 * done < block:
            more, power = product([x, power], power)
            yield
            x = x + more
            done *= 2
        x = x + product([x], power)[0]
        yield
    size = block
    while size < BASE:
        below = ~same_block(row, column, size) & same_block(row, column, 2 * size)
        (half_way,) = product([x], jnp.where(below, a, 0.0))
        yield
        x = x + product([half_way], x)[0]
        yield
        size *= 2
    return x


def _merge(
    x: jax.Array, load, chunk: int, dtype: DTypeLike, passes: int
) -> Generator[None, None, jax.Array]:
    size = BASE
    while size < chunk:
        pairs = LANES // (2 * size)
        lane = index((size, LANES), 1)
        first = remainder(quotient(lane, size), 2) == 0
        narrow = parts(x, dtype, passes)
        below = choose(
            [load((2 * i + 1) * size, size) for i in range(chunk // (2 * size))],
            quotient(remainder(lane, chunk), 2 * size),
        )

        def stacked(split: Parts, offset: int, size=size) -> Parts:
            starts = range(offset, LANES, 2 * size)
            return tuple(stack([x[:, start : start + size] for start in starts]) for x in split)

        def gather(product: jax.Array, lane=lane, size=size, pairs=pairs) -> jax.Array:
            pieces = [rows(product, size * i, size) for i in range(pairs)]
            return choose(pieces, quotient(lane, 2 * size))

        below_parts = parts(below, dtype, passes)
        half_way = parts(gather(dot_parts(stacked(narrow, size), below_parts)), dtype, passes)
        yield
        corner = gather(dot_parts(stacked(half_way, 0), narrow))
        yield
        x = stack([jnp.where(first, x, 0.0), jnp.where(first, corner, x)])
        size *= 2
    return x
