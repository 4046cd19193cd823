"""From relations and inverse to output and state, one chunk of one head.

With E the corrected values and b the write strengths of the chunk,

  (I + N diag(b)) E = v - (k 2^G) S
  out = (q 2^G) S + Q diag(b) E
  S'  = diag(2^total) S + (k 2^(total - G))^T diag(b) E

b has been folded into the columns of Q, N and the transposed keys, so it never stands as a column.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import jax
from jax.typing import DTypeLike

from kdagen.kernels.lanes import BF16, dot, stack


@dataclass
class Handover:
    """What the earlier stages left in scratch for one chunk-head; each call reads it once.

    Operands of a product are in its dtype, or wider.

    Attributes:
      decayed: [2C, K], (q 2^G) above (k 2^G).
      value: [C, V] f32.
      inverse: [C, C], (I + N diag(b))^-1.
      relations: [C, C], Q diag(b).
      keys_to_end: [K, C], (k 2^(total - G))^T diag(b).
      decay: [K, 1] f32, 2^total.
    """

    decayed: Callable[[], jax.Array]
    value: Callable[[], jax.Array]
    inverse: Callable[[], jax.Array]
    relations: Callable[[], jax.Array]
    keys_to_end: Callable[[], jax.Array]
    decay: Callable[[], jax.Array]


def advance(
    handover: Handover,
    state,
    head: int,
    emit: Callable[[jax.Array], None],
    *,
    dtype: DTypeLike = BF16,
    inverse_dtype: DTypeLike = BF16,
) -> Generator[None, None, None]:
    """Takes one chunk: emits its output [C, V] f32 and replaces ``state[head]`` [K, V] f32.

    Operands of the products are rounded to ``dtype``, those of the one with the inverse to
    ``inverse_dtype``. Yields after each of its three products.
    """
    seen = dot(handover.decayed(), state[head], dtype=dtype)
    yield
    chunk = seen.shape[0] // 2
    residual = handover.value() - seen[chunk:]
    corrected = dot(handover.inverse(), residual, dtype=inverse_dtype).astype(dtype)
    yield
    decay = handover.decay()
    update = dot(stack([handover.relations(), handover.keys_to_end()]), corrected, dtype=dtype)
    yield
    emit(seen[:chunk] + update[:chunk])
    state[head] = state[head] * decay + update[chunk:]
