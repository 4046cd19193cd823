"""The inverse of I - A for strictly lower A, chunk-heads side by side along the lanes.

Diagonal 16-row blocks of all chunk-heads of a pack lie in one [16, 128] value, so that one
product serves eight of them. From 16 rows up, two inverses X and Z of neighbouring diagonal blocks
and the block B below the first merge by

  [X 0; Z B X  Z]
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kdagen.kernels.lanes import (
    BF16,
    F32,
    choose,
    dot,
    index,
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
    takes fewer rows. Operands are rounded to ``dtype``.
    """

    def __init__(self, depth: int, dtype: DTypeLike):
        self.depth = depth
        self.dtype = dtype
        self.slices = LANES // depth
        self.group = quotient(index((BASE, LANES), 1), BASE)

    def left(self, a: jax.Array) -> jax.Array:
        a = a.astype(self.dtype)
        return stack([a[:, self.depth * i : self.depth * (i + 1)] for i in range(self.slices)])

    def right(self, b: jax.Array) -> jax.Array:
        b = b.astype(self.dtype)
        blocks = self.depth // BASE
        place = remainder(self.group, blocks)
        return stack([jnp.where(place == j, b, jnp.zeros_like(b)) for j in range(blocks)])

    def dot(self, left: jax.Array, right: jax.Array) -> jax.Array:
        return dot(left, right, dtype=self.dtype)

    def gather(self, product: jax.Array) -> jax.Array:
        pieces = [rows(product, BASE * i, BASE) for i in range(self.slices)]
        return choose(pieces, quotient(self.group, self.depth // BASE))


def invert(
    load: Callable[[int, int], jax.Array],
    chunk: int,
    block: int,
    depth: int,
    *,
    dtype: DTypeLike = BF16,
) -> Generator[None, None, jax.Array]:
    """(I - A)^-1 [C, 128] of a pack, formed and given in ``dtype``.

    ``load(start, count)`` reads rows of its A [C, 128] f32.

    Diagonal blocks of ``block`` rows come first: for 2 they are I + A, for 4 and 8 a Neumann
    product (I + A)(I + A^2)(I + A^4). Yields after every product.
    """
    compact = yield from _base_blocks(load, chunk, block, _BlockProduct(depth, dtype))
    return (yield from _merge(compact, load, chunk, dtype))


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
        power = product.gather(product.dot(product.left(inner), product.right(inner)))
        yield
        done = 2
        while 2 * done < block:
            both = product.dot(stack([product.left(x), product.left(power)]), product.right(power))
            yield
            half = both.shape[0] // 2
            x = x + product.gather(rows(both, 0, half))
            power = product.gather(rows(both, half, half))
            done *= 2
        x = x + product.gather(product.dot(product.left(x), product.right(power)))
        yield
    size = block
    while size < BASE:
        below = ~same_block(row, column, size) & same_block(row, column, 2 * size)
        half_way = product.gather(
            product.dot(product.left(x), product.right(jnp.where(below, a, 0.0)))
        )
        yield
        x = x + product.gather(product.dot(product.left(half_way), product.right(x)))
        yield
        size *= 2
    return x


def _merge(x: jax.Array, load, chunk: int, dtype: DTypeLike) -> Generator[None, None, jax.Array]:
    size = BASE
    while size < chunk:
        pairs = LANES // (2 * size)
        lane = index((size, LANES), 1)
        first = remainder(quotient(lane, size), 2) == 0
        narrow = x.astype(dtype)
        below = choose(
            [load((2 * i + 1) * size, size) for i in range(chunk // (2 * size))],
            quotient(remainder(lane, chunk), 2 * size),
        )

        def gather(product: jax.Array, lane=lane, size=size, pairs=pairs) -> jax.Array:
            pieces = [rows(product, size * i, size) for i in range(pairs)]
            return choose(pieces, quotient(lane, 2 * size))

        second = stack([narrow[:, (2 * i + 1) * size : (2 * i + 2) * size] for i in range(pairs)])
        half_way = gather(dot(second, below, dtype=dtype)).astype(dtype)
        yield
        left = stack([half_way[:, 2 * i * size : (2 * i + 1) * size] for i in range(pairs)])
        corner = gather(dot(left, narrow, dtype=dtype))
        yield
        x = stack([jnp.where(first, x, 0.0), jnp.where(first, corner, x)])
        size *= 2
    return x.astype(dtype)
