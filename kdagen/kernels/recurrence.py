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

from kdagen.kernels.lanes import BF16, F32, FULL, SPLIT, dot, stack


@dataclass
class Handover:
    """What the earlier stages left in scratch for one chunk-head; each call reads it once.

    Operands of a product are in its dtype, or wider; see ``advance``.

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
    keep: Callable[[jax.Array], None] | None = None,
    dtype: DTypeLike = BF16,
    inverse_dtype: DTypeLike = BF16,
) -> Generator[None, None, None]:
    """Takes one chunk: emits its output [C, V] f32 and replaces ``state[head]`` [K, V] f32.

    ``keep``, if given, takes the corrected values E [C, V] as they go into the last product.

    Operands of the first product are rounded to ``dtype``, those of the other two to
    ``inverse_dtype``. Where keys are nearly parallel, corrected values that are large and alternate
    add up to little: rounding them, or what they are multiplied with, to bf16 costs as much as an
    inverse in bf16 does. Beside a first product in bf16, f32 is split in two bf16 parts: there six
    passes give no digit more than three. Yields after each of the three products.
    """
    passes = FULL if dtype == F32 else SPLIT
    seen = dot(handover.decayed(), state[head], dtype=dtype)
    yield
    chunk = seen.shape[0] // 2
    residual = handover.value() - seen[chunk:]
    corrected = dot(handover.inverse(), residual, dtype=inverse_dtype, passes=passes)
    if keep is not None:
        keep(corrected)
    yield
    decay = handover.decay()
    ahead = stack([handover.relations(), handover.keys_to_end()])
    update = dot(ahead, corrected, dtype=inverse_dtype, passes=passes)
    yield
    emit(seen[:chunk] + update[:chunk])
    state[head] = state[head] * decay + update[chunk:]
