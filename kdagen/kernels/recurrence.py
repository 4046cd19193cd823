"""From relations and inverse to output and state, one chunk of heads side by side.

With E the corrected values and b the write strengths of the chunk,

  (I + N diag(b)) E = v - (k 2^G) S
  out = (q 2^G) S + Q diag(b) E
  S'  = diag(2^total) S + (k 2^(total - G))^T diag(b) E

b has been folded into the columns of Q, N and the transposed keys, so it never stands as a column.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

from kdagen.kernels.lanes import BF16, F32, FULL, SPLIT, diagonal, dot, stack


@dataclass
class Handover:
    """What the earlier stages left in scratch for one chunk of each of n streams that stand side by
    side along the lanes; each call reads it once.

    Operands of a product are in its dtype, or wider; see ``advance``.

    Attributes:
      decayed: n of [2C, K], (q 2^G) above (k 2^G).
      value: n of [C, V] f32.
      inverse: [C, nC], (I + N diag(b))^-1 - I.
      relations: [C, nC], Q diag(b).
      keys_to_end: [K, nC], (k 2^(total - G))^T diag(b).
      decay: n of [K, 1] f32, 2^total.
      seen, left: n of [2C, V] f32 to be added to what is seen of the states, and n of [K, V] f32 to
        be added to the states that are left; None for nothing.
    """

    decayed: Sequence[Callable[[], jax.Array]]
    value: Sequence[Callable[[], jax.Array]]
    inverse: Callable[[], jax.Array]
    relations: Callable[[], jax.Array]
    keys_to_end: Callable[[], jax.Array]
    decay: Sequence[Callable[[], jax.Array]]
    seen: Sequence[Callable[[], jax.Array]] | None = None
    left: Sequence[Callable[[], jax.Array]] | None = None


def advance(
    handover: Handover,
    state,
    streams: Sequence[Any],
    emit: Callable[[int, jax.Array], None],
    *,
    keep: Callable[[int, jax.Array], None] | None = None,
    dtype: DTypeLike = BF16,
    inverse_dtype: DTypeLike = BF16,
) -> Generator[None, None, None]:
    """Takes one chunk of n streams: emits the output [C, V] f32 of the i-th, ``emit(i, output)``,
    and replaces ``state[streams[i]]`` [K, V] f32, ``streams`` being indices of any kind.

    ``keep``, if given, takes the corrected values E [C, V] as they go into the last product.

    What is multiplied with something of a stream's own tokens stands block-diagonal, so that the
    lanes of a pack need not be taken apart; two blocks of 64 rows cost the MXU no more together
    than one by one.

    Operands of the first product are rounded to ``dtype``, those of the other two to
    ``inverse_dtype``. Where keys are nearly parallel, corrected values that are large and alternate
    add up to little: rounding them, or what they are multiplied with, to bf16 costs as much as an
    inverse in bf16 does. Beside a first product in bf16, f32 is split in two bf16 parts: there six
    passes give no digit more than three. Yields after each of the three products.
    """
    passes = FULL if dtype == F32 else SPLIT
    made = [
        dot(read(), state[stream], dtype=dtype)
        for read, stream in zip(handover.decayed, streams, strict=True)
    ]
    if handover.seen is not None:
        made = [seen + more() for seen, more in zip(made, handover.seen, strict=True)]
    yield
    chunk, width = made[0].shape[0] // 2, made[0].shape[1]
    residuals = [read() - seen[chunk:] for read, seen in zip(handover.value, made, strict=True)]
    narrow = residuals
    if inverse_dtype == BF16:
        narrow = [residual.astype(BF16) for residual in residuals]
    change = dot(handover.inverse(), diagonal(narrow), dtype=inverse_dtype, passes=passes)

    def of(x: jax.Array, i: int) -> jax.Array:
        return x[:, i * width : (i + 1) * width]

    # what the inverse leaves as it is, most of it, is spared the rounding of the product's operand
    corrected = [residual + of(change, i) for i, residual in enumerate(residuals)]
    if keep is not None:
        for i, x in enumerate(corrected):
            keep(i, x)
    yield
    decays = [read() for read in handover.decay]
    ahead = stack([handover.relations(), handover.keys_to_end()])
    blocks = diagonal([x.astype(inverse_dtype) for x in corrected])
    update = dot(ahead, blocks, dtype=inverse_dtype, passes=passes)
    yield
    for i, stream in enumerate(streams):
        emit(i, made[i][:chunk] + of(update, i)[:chunk])
        written = of(update, i)[chunk:]
        if handover.left is not None:
            written = written + handover.left[i]()
        state[stream] = state[stream] * decays[i] + written
