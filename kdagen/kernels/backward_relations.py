"""The part of the backward of a chunk that waits for nothing: decay factors and relations.

What it finds goes to the recurrence and the gradients of the same block, one grid step later, see
``kdagen.kernels.handover``.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kdagen.kernels import decay_tree, gate_gradients
from kdagen.kernels.backward_step import Step
from kdagen.kernels.inverse import on_diagonal
from kdagen.kernels.lanes import F32, rows, stack
from kdagen.kernels.tiling import LANES


@dataclass
class Entering:
    """One chunk-head of the entering block.

    Attributes:
      query, key: [C, KP] f32, as given.
      query_norm, key_norm: [C, KP] f32, what they are normalised by, or None.
      gate: the activated gate, a ``gate_gradients.Gate``.
      sums: those of its log decay that ``decay_tree.sums`` gives.
    """

    query: Any
    key: Any
    query_norm: Any
    key_norm: Any
    gate: Any
    sums: Any


def relate(
    step: Step,
    pack: int,
    entered: Sequence[Entering],
    dtype: DTypeLike,
    inverse_dtype: DTypeLike,
) -> Generator[None, None, jax.Array]:
    """Decay factors and relations of a pack; gives N [C, 128] f32. Yields after every product."""
    for item in entered:
        if item.query_norm is not None:
            item.query, item.key = item.query * item.query_norm, item.key * item.key_norm
    base = step.kernel.handover.base
    decays = [decay_tree.Decays(item.sums, base) for item in entered]
    tree = decays[0].levels
    operands = decay_tree.operands(
        [item.query for item in entered], [item.key for item in entered], decays, dtype
    )
    places = step.items(pack)
    if step.segments is not None:
        for at, decay in zip(places, decays, strict=True):
            decay.from_start = step.segments.incoming(decay.from_start, at)
            decay.to_end = step.segments.outgoing(decay.to_end, at)
            decay.total = step.segments.through(decay.total, at)
    column = jnp.transpose(jnp.broadcast_to(step.beta(pack), (8, LANES)))[:, 0:1]
    step.hand_over("write", pack, jnp.broadcast_to(column, (LANES, step.d_state.shape[2])))
    for at, item, decay in zip(places, entered, decays, strict=True):
        _hand_over(step, at, item, decay, dtype)
    if step.kernel.wants_chunk:
        for i in range(len(tree)):
            step.hand_over(f"columns_{i}", pack, operands.right[i])
            for at, left in zip(places, operands.left[i], strict=True):
                step.hand_over(f"rows_{i}", at, left)
    yield
    products = decay_tree.products(operands, dtype)
    own = None
    if not decay_tree.has_diagonal(tree):
        own = stack([item.query * item.key for item in entered])
        own = gate_gradients.lane_sums(own, step.d_state.shape[2], dtype)
    yield
    if own is not None:
        step.hand_over("own", pack, own * step.scale)
    query, key = decay_tree.assemble(products, tree)
    if step.segments is not None:
        query, key = (step.segments.related(x, pack) for x in (query, key))
    chunk = query.shape[0]
    across = jnp.transpose(stack([query * step.scale, key]).astype(inverse_dtype))
    for x, at in enumerate(places):
        step.hand_over("related", at, rows(across, x * chunk, chunk))
    yield
    return key


def hand_over_inverse(step: Step, pack: int, inverse: jax.Array, dtype: DTypeLike) -> None:
    """Of a pack, [C, 128], less the identity: what it leaves as it is, most of what it is applied
    to, is spared the rounding of an operand."""
    inverse = jnp.where(on_diagonal(inverse.shape[0]), 0.0, inverse.astype(F32)).astype(dtype)
    step.hand_over("transposed", pack, jnp.transpose(inverse))
    if step.kernel.wants_chunk and not step.kernel.keep_corrected:
        step.hand_over("inverse", pack, inverse)


def _hand_over(
    step: Step, at: int, item: Entering, decay: decay_tree.Decays, dtype: DTypeLike
) -> None:
    kernel = step.kernel
    step.hand_over("whole", at, jnp.exp2(decay.total))
    step.hand_over("keys_to_end", at, item.key * decay.to_end)
    reads = stack([item.query * (decay.from_start * step.scale), item.key * decay.from_start])
    step.hand_over("reads", at, jnp.transpose(reads.astype(dtype)))
    if not kernel.wants_chunk:
        return
    step.hand_over("query", at, item.query)
    step.hand_over("key", at, item.key)
    step.hand_over("from_start", at, decay.from_start)
    step.hand_over("to_end", at, decay.to_end)
    for i, factor in enumerate(decay.left):
        step.hand_over("left", at, factor, i)
    if kernel.handover.base > 1:
        step.hand_over("right", at, decay.right[-1])
    if kernel.handover.norms:
        step.hand_over("query_norm", at, item.query_norm)
        step.hand_over("key_norm", at, item.key_norm)
    if kernel.wants_decay:
        step.hand_over("by_gate", at, item.gate.by_gate)
    if kernel.wants("a_log"):
        step.hand_over("by_log_rate", at, item.gate.by_log_rate)
