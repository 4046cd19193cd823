"""From the gradients of a chunk to those of the operands of the call."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kdagen.kernels import decay_gradients, gate_gradients
from kdagen.kernels.backward_chunk import Gradients
from kdagen.kernels.backward_item import Item
from kdagen.kernels.backward_step import Step
from kdagen.kernels.lanes import F32, FULL, SPLIT, rows, stack


def store(
    step: Step,
    pack: int,
    items: Sequence[Item],
    found: Sequence[Gradients],
    dtype: DTypeLike,
    inverse_dtype: DTypeLike,
) -> Generator[None, None, None]:
    """Stores what is wanted of the gradients of a pack. Yields before its products and after them.

    Queries and keys that several value heads share are stored when the last of them comes, so the
    items of a chunk must all come within one grid step.
    """
    kernel, whole = step.kernel, []
    places = step.items(pack)
    for at, item, one in zip(places, items, found, strict=True):
        for name, gradient in (("query", one.query), ("key", one.key)):
            if kernel.wants(name) and (total := step.summed(name, at, gradient)) is not None:
                whole.append((name, at, item, total))
    norms = kernel.handover.norms and bool(whole)
    if norms:
        along = stack([getattr(item, name) * total for name, _, item, total in whole])
        along = along.astype(dtype)
    yield
    if norms:
        along = gate_gradients.lane_sums(along, along.shape[1], dtype)
    passes = FULL if dtype == F32 else SPLIT
    within = [
        decay_gradients.within(one.sums, inverse_dtype, passes) if kernel.wants_decay else None
        for one in found
    ]
    yield
    for i, (name, at, item, total) in enumerate(whole):
        if norms:
            x, norm = getattr(item, name), getattr(item, f"{name}_norm")
            mine = rows(along, i * x.shape[0], x.shape[0])
            total = gate_gradients.normalized(x, norm, total, mine)
        (step.store_query if name == "query" else step.store_key)(at, total)
    for at, item, one, sums in zip(places, items, found, within, strict=True):
        if sums is not None:
            _store_decay(step, at, item, one.sums.beside(sums) + one.whole)


def _store_decay(step: Step, at: int, item: Item, log_decay: jax.Array) -> None:
    kernel = step.kernel
    by_gate = step.inside(log_decay * item.by_gate, at)
    if kernel.wants("gate"):
        step.store_gate(at, by_gate)
    if kernel.wants_rows:
        by_rate = None
        if kernel.wants("a_log"):
            by_rate = step.inside(log_decay * item.by_log_rate, at)
            by_rate = jnp.sum(by_rate, axis=0, keepdims=True)
        step.add_rows(at, by_rate, jnp.sum(by_gate, axis=0, keepdims=True))
