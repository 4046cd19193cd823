"""From the gradients of a chunk to those of the operands of the call."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kdagen.kernels import gate_gradients
from kdagen.kernels.backward_chunk import Gradients, Item
from kdagen.kernels.backward_step import Step


def store(
    step: Step, pack: int, items: Sequence[Item], found: Sequence[Gradients], dtype: DTypeLike
) -> None:
    """Stores what is wanted of the gradients of a pack.

    Queries and keys that several value heads share are stored when the last of them comes, so the
    items of a chunk must all come within one grid step.
    """
    kernel, places = step.kernel, step.items(pack)
    whole = []
    for at, item, one in zip(places, items, found, strict=True):
        if kernel.wants("query") and (total := step.summed("query", at, one.query)) is not None:
            whole.append((step.store_query, at, item.query, item.query_norm, total))
        if kernel.wants("key") and (total := step.summed("key", at, one.key)) is not None:
            whole.append((step.store_key, at, item.key, item.key_norm, total))
        if kernel.wants_decay:
            _store_decay(step, at, item, one.log_decay)
    if items[0].query_norm is None:
        for put, at, _, _, total in whole:
            put(at, total)
    elif whole:
        _, _, xs, norms, totals = zip(*whole, strict=True)
        made = gate_gradients.normalized(xs, norms, totals, dtype)
        for (put, at, *_), gradient in zip(whole, made, strict=True):
            put(at, gradient)


def _store_decay(step: Step, at: int, item: Item, log_decay: jax.Array) -> None:
    kernel, gate = step.kernel, item.gate
    by_gate = step.inside(log_decay * gate.by_gate, at)
    if kernel.wants("gate"):
        step.store_gate(at, by_gate)
    if kernel.wants_rows:
        by_rate = None
        if kernel.wants("a_log"):
            if gate.by_log_rate is None:
                by_rate = by_gate * (step.gate(at) + step.gate_rows(at)[1])
            else:
                by_rate = step.inside(log_decay * gate.by_log_rate, at)
            by_rate = jnp.sum(by_rate, axis=0, keepdims=True)
        step.add_rows(at, by_rate, jnp.sum(by_gate, axis=0, keepdims=True))
