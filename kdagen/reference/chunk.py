"""One chunk of Kimi Delta Attention: relations between its tokens, their solution, the new state.

With a_t = ln(alpha_t), D[t, j] = exp(sum of a over j < s <= t) per channel and D[t] = D[t, -1]:

    L[t,j]   = beta_t * sum_c k[t,c] k[j,c] D[t,j,c]         j <  t
    Aqk[t,j] = sum_c q[t,c] k[j,c] D[t,j,c]                  j <= t, q already scaled
    Y        = (I + L)^-1 beta (v - (k D[t]) S)
    O        = (q D[t]) S + Aqk Y
    S'       = D[C-1] S + (k D[C-1,j])^T Y

The decays are unbounded (a reset is -1e4), so D[t,j] is never formed from a difference of
cumulative sums. A binary tree of boundaries serves instead: at the boundary between two blocks of
h rows, a row t of the right block carries exp(sum from the boundary to t), a row j of the left
block exp(sum from j+1 to the boundary). Both are sums of what lies between, at most 0, and each
pair j < t meets at exactly one boundary. In the gradient every term reaches just the a_s with
j < s <= t, so nothing has to cancel there either.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


def matmul(
    a: jax.Array, b: jax.Array, *, transpose_a: bool = False, transpose_b: bool = False
) -> jax.Array:
    """a @ b over the last two axes in full float32, leading axes being the batch."""
    batch = tuple(range(a.ndim - 2))
    contract = (
        (a.ndim - 2 if transpose_a else a.ndim - 1,),
        (b.ndim - 1 if transpose_b else b.ndim - 2,),
    )
    return lax.dot_general(
        a, b, (contract, (batch, batch)), precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


class Level(NamedTuple):
    """Sums of the log decay inside blocks of h rows; both [..., C / h, h, K].

    prefix: from the block's first row to t, inclusive.
    suffix: from row j + 1 to the block's last.
    """

    prefix: jax.Array
    suffix: jax.Array


def block_sums(log_decay: jax.Array) -> list[Level]:
    """Levels h = 1, 2, 4 ... C of [..., C, K], each from the one below by adding block totals."""
    levels = [Level(log_decay[..., :, None, :], jnp.zeros_like(log_decay[..., :, None, :]))]
    while levels[-1].prefix.shape[-3] > 1:
        prefix, suffix = (_pairs(x) for x in levels[-1])
        total = prefix[..., -1:, :]
        left, right = total[..., 0, :, :], total[..., 1, :, :]
        levels.append(
            Level(
                jnp.concatenate([prefix[..., 0, :, :], prefix[..., 1, :, :] + left], axis=-2),
                jnp.concatenate([suffix[..., 0, :, :] + right, suffix[..., 1, :, :]], axis=-2),
            )
        )
    return levels


def _pairs(x: jax.Array) -> jax.Array:
    """[..., n, h, K] to [..., n / 2, 2, h, K]."""
    return x.reshape(*x.shape[:-3], x.shape[-3] // 2, 2, *x.shape[-2:])


def decayed_products(
    query: jax.Array, key: jax.Array, levels: list[Level]
) -> tuple[jax.Array, jax.Array]:
    """Strictly lower [..., C, C] of sum_c x[t,c] key[j,c] D[t,j,c], for x = key and x = query.

    Args:
      query, key: [..., C, K] float32.
      levels: of the log decay, from `block_sums`.
    """
    zero = jnp.zeros_like(key[..., None, :1])
    of_key, of_query = zero, zero
    for level in levels[:-1]:
        blocks, rows = level.prefix.shape[-3:-1]
        q, k = (_pairs(x.reshape(*x.shape[:-2], blocks, rows, x.shape[-1])) for x in (query, key))
        after = jnp.exp(_pairs(level.prefix)[..., 1, :, :])
        before = jnp.exp(_pairs(level.suffix)[..., 0, :, :])
        rights = jnp.concatenate([k[..., 1, :, :] * after, q[..., 1, :, :] * after], axis=-2)
        products = matmul(rights, k[..., 0, :, :] * before, transpose_b=True)
        of_key = _merge(of_key, products[..., :rows, :])
        of_query = _merge(of_query, products[..., rows:, :])
    return of_key[..., 0, :, :], of_query[..., 0, :, :]


def _merge(diagonal: jax.Array, below: jax.Array) -> jax.Array:
    """Lower triangular blocks of h rows [..., n, h, h] to those of 2h rows [..., n / 2, 2h, 2h]."""
    pair = _pairs(diagonal)
    top = jnp.concatenate([pair[..., 0, :, :], jnp.zeros_like(below)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, pair[..., 1, :, :]], axis=-1)], axis=-2)


def unit_lower_inverse(strict: jax.Array) -> jax.Array:
    """(I + L)^-1 of strictly lower L [..., C, C], by merging the inverses of diagonal blocks.

    [[A, 0], [X, B]]^-1 = [[A^-1, 0], [-B^-1 X A^-1, B^-1]], from blocks of one row up.
    """
    size = strict.shape[-1]
    inverse = jnp.ones((*strict.shape[:-1], 1, 1), strict.dtype)
    rows = 1
    while rows < size:
        pairs = size // (2 * rows)
        tiles = strict.reshape(*strict.shape[:-2], pairs, 2, rows, pairs, 2, rows)
        below = jnp.stack([tiles[..., n, 1, :, n, 0, :] for n in range(pairs)], axis=-3)
        pair = _pairs(inverse)
        below = matmul(matmul(pair[..., 1, :, :], below), pair[..., 0, :, :])
        inverse = _merge(inverse, -below)
        rows *= 2
    return inverse[..., 0, :, :]


@jax.custom_vjp
def solve_unit_lower(strict: jax.Array, rhs: jax.Array) -> jax.Array:
    """Y of (I + L) Y = rhs, for strictly lower L [..., C, C] and rhs [..., C, V]."""
    return matmul(unit_lower_inverse(strict), rhs)


def _solve_forward(strict: jax.Array, rhs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    inverse = unit_lower_inverse(strict)
    solved = matmul(inverse, rhs)
    return solved, (inverse, solved)


def _solve_backward(
    residuals: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # d rhs = A^T dY and dL = -A^T dA A^T = -(A^T dY) Y^T: no derivative of the inverse.
    inverse, solved = residuals
    d_rhs = matmul(inverse, cotangent, transpose_a=True)
    return -jnp.tril(matmul(d_rhs, solved, transpose_b=True), -1), d_rhs


solve_unit_lower.defvjp(_solve_forward, _solve_backward)


def chunk_step(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Output of a chunk and the state after it.

    A row with query, key, beta and log decay 0 has output 0 and leaves the state as it was.

    Args:
      query, key, log_decay: [..., C, K] float32, C a power of two, query already scaled.
      value: [..., C, V] float32.
      beta: [..., C] float32.
      state: [..., K, V] float32, before the chunk.

    Returns:
      output [..., C, V] and state [..., K, V], float32.
    """
    levels = block_sums(log_decay)
    from_start = jnp.exp(levels[-1].prefix[..., 0, :, :])
    to_end = jnp.exp(levels[-1].suffix[..., 0, :, :])
    of_key, of_query = decayed_products(query, key, levels)
    rows = key.shape[-2]
    reads = matmul(jnp.concatenate([key * from_start, query * from_start], axis=-2), state)
    beta = beta[..., None]
    solved = solve_unit_lower(beta * of_key, beta * (value - reads[..., :rows, :]))
    own = jnp.sum(query * key, axis=-1, keepdims=True)
    output = reads[..., rows:, :] + matmul(of_query, solved) + own * solved
    whole = from_start[..., -1, :, None]
    return output, whole * state + matmul(key * to_end, solved, transpose_a=True)
