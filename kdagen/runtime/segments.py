"""Packed sequences: segment ids or cumulative lengths in, where the segments lie out."""

from __future__ import annotations

import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kdagen.reference.packing import Packing


def pack_segments(
    segment_ids: Any = None,
    *,
    cu_seqlens: Any = None,
    max_num_segments: int | None = None,
    batch: int = 1,
    tokens: int | None = None,
) -> Packing:
    """What `kimi_delta_attention` finds out about its segments, for several calls at once.

    A stack of layers that share a packing pays once if the result is passed as `segment_ids` to
    every one of them. It is a pytree of arrays: it may cross jit, scan and checkpoint.

    Args:
      segment_ids, max_num_segments: [B, T] integers and the number N of segment slots; or
      cu_seqlens, batch, tokens: [N + 1] or [B, N + 1] integers, B and T. The arrays are as in
        `kimi_delta_attention`, and may be traced. What is given beside them has to agree.

    Raises:
      ValueError: both or neither are given, something is missing, or they break the rules.
      TypeError: an argument of a wrong type.
    """
    if (segment_ids is None) == (cu_seqlens is None):
        raise ValueError("segment_ids: give either them or cu_seqlens")
    slots = slot_count(max_num_segments)
    if cu_seqlens is not None:
        if tokens is None:
            raise ValueError("tokens: got None; cu_seqlens need the sequence length T")
        tokens = count("tokens", tokens)
        integers("cu_seqlens", cu_seqlens)
        if cu_seqlens.ndim == 2 and batch == 1:
            batch = cu_seqlens.shape[0]
        lengths_shape(cu_seqlens, batch)
        _agrees("max_num_segments", slots, cu_seqlens.shape[-1] - 1)
        boundaries, valid = boundaries_from_lengths(cu_seqlens, batch, tokens)
        return Packing.of(boundaries, tokens, valid)
    if integers("segment_ids", segment_ids).ndim != 2:
        raise ValueError(f"segment_ids: got shape {segment_ids.shape}; it must be [B, T]")
    if slots is None:
        raise ValueError("max_num_segments: got None; segment_ids need the number of segment slots")
    _agrees("tokens", tokens, segment_ids.shape[1])
    boundaries, valid = boundaries_from_ids(segment_ids, slots)
    return Packing.of(boundaries, segment_ids.shape[1], valid)


def array(name: str, x: Any) -> Any:
    """x, an array.

    Raises:
      TypeError: it is none.
    """
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name}: got {type(x).__name__}; it must be a jax.Array or numpy.ndarray")
    return x


def integers(name: str, x: Any) -> Any:
    """x, an array of integers.

    Raises:
      TypeError, ValueError: it is none.
    """
    if not jnp.issubdtype(array(name, x).dtype, jnp.integer):
        raise ValueError(f"{name}: got dtype {x.dtype}; it must be an integer type")
    return x


def slot_count(x: Any) -> int | None:
    """`max_num_segments` of a call.

    Raises:
      TypeError, ValueError: no integer of 1 or more.
    """
    return None if x is None else count("max_num_segments", x)


def count(name: str, x: Any) -> int:
    """x, a number of something.

    Raises:
      TypeError, ValueError: no integer of 1 or more.
    """
    if not isinstance(x, numbers.Integral) or isinstance(x, bool):
        raise TypeError(f"{name}: got {x!r}; it must be an integer")
    if x < 1:
        raise ValueError(f"{name}: got {x}; it must be 1 or more")
    return int(x)


def _agrees(name: str, given: int | None, number: int) -> None:
    if given is not None and given != number:
        raise ValueError(f"{name}: got {given}; it must be {number}, as in the array")


def lengths_shape(cu_seqlens: Any, batch: int) -> None:
    """Holds the shape of cumulative lengths of B rows.

    Raises:
      ValueError: it is neither [B, N + 1] nor, for one row, [N + 1].
    """
    shape = tuple(cu_seqlens.shape)
    if not (len(shape) == 2 and shape[0] == batch) and not (len(shape) == 1 and batch == 1):
        takes = f"[B, N + 1] with B = {batch}" + (", or [N + 1]" if batch == 1 else "")
        raise ValueError(f"cu_seqlens: got shape {shape}; it must be {takes}")
    if shape[-1] < 2:
        raise ValueError(f"cu_seqlens: got shape {shape}; it must hold 2 boundaries or more")


def _comparable(x: jax.Array) -> jax.Array:
    """Integers to compare with a length: short ones would wrap it, long ones stay long."""
    return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x


def is_concrete(x: Any) -> bool:
    """Whether the values can be looked at while tracing."""
    return not isinstance(x, jax.core.Tracer)


def boundaries_from_ids(
    segment_ids: Any, slots: int
) -> tuple[jax.Array | np.ndarray, jax.Array | None]:
    """Boundaries int32 [B, N + 1] of segment ids [B, T], and which rows are valid.

    Slot s is id s + 1. Ids do not decrease, may skip values, and are 0 (padding) at the end only.
    boundaries[b, s] is the first token of slot s, or where it would be; boundaries[b, N] is the
    number of tokens that are not padding.

    Args:
      segment_ids: integers [B, T], concrete or traced.
      slots: N.

    Returns:
      boundaries, and bool [B] for traced ids: False for a row that breaks the rules, whose
      boundaries are all 0 then. None for concrete ids, which were checked.

    Raises:
      ValueError: concrete ids that decrease, are negative or exceed N.
    """
    if is_concrete(segment_ids):
        ids: Any = np.asarray(segment_ids).astype(np.int64)
        if ids.size and (ids.min() < 0 or ids.max() > slots):
            raise ValueError(
                f"segment_ids: got ids from {ids.min()} to {ids.max()}; they must be 0 (padding) "
                f"to {slots}, the number of segment slots"
            )
        ordered: Any = np.where(ids == 0, slots + 1, ids)
        wrong = np.argwhere(ordered[:, 1:] < ordered[:, :-1])
        if len(wrong):
            row, at = (int(i) for i in wrong[0])
            raise ValueError(
                f"segment_ids: row {row} goes from {ids[row, at]} to {ids[row, at + 1]} at token "
                f"{at + 1}; ids must not decrease, and 0 (padding) must come at the end only"
            )
        edges: Any = np.arange(1, slots + 2)
        return np.stack([np.searchsorted(row, edges) for row in ordered]).astype(np.int32), None
    given = _comparable(segment_ids)
    in_range = jnp.all((given >= 0) & (given <= slots), axis=1)
    ids = given.astype(jnp.int32)
    ordered = jnp.where(ids == 0, slots + 1, ids)
    valid = in_range & jnp.all(ordered[:, 1:] >= ordered[:, :-1], axis=1)
    edges = jnp.arange(1, slots + 2, dtype=jnp.int32)
    found = jax.vmap(lambda row: jnp.searchsorted(row, edges))(ordered).astype(jnp.int32)
    return jnp.where(valid[:, None], found, 0), valid


def boundaries_from_lengths(
    cu_seqlens: Any, batch: int, tokens: int
) -> tuple[jax.Array | np.ndarray, jax.Array | None]:
    """Boundaries int32 [B, N + 1] of cumulative lengths [N + 1] or [B, N + 1], and valid rows.

    They start at 0, do not decrease and end at T or before; what follows is padding.

    Returns:
      as `boundaries_from_ids`.

    Raises:
      ValueError: concrete lengths that break the rules.
    """
    if is_concrete(cu_seqlens):
        edges = np.asarray(cu_seqlens).astype(np.int64)
        edges = edges[None] if edges.ndim == 1 else edges
        if (edges[:, 0] != 0).any():
            raise ValueError(f"cu_seqlens: got {edges[:, 0].tolist()} first; it must start with 0")
        if (edges[:, 1:] < edges[:, :-1]).any():
            raise ValueError("cu_seqlens: got values that decrease; they must not")
        if edges.max() > tokens:
            raise ValueError(
                f"cu_seqlens: got a last value of {edges.max()}; it may be at most T = {tokens}"
            )
        return np.broadcast_to(edges, (batch, edges.shape[1])).astype(np.int32), None
    given: Any = _comparable(cu_seqlens[None] if cu_seqlens.ndim == 1 else cu_seqlens)
    rising = jnp.all(given[:, 1:] >= given[:, :-1], axis=1)
    valid = rising & (given[:, 0] == 0) & (given[:, -1] <= tokens)
    return jnp.where(valid[:, None], given, 0).astype(jnp.int32), valid


_TOGETHER = 64
"""Tokens or slots that are written at a time."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def without_rows(x: jax.Array, valid: jax.Array, axis: int) -> jax.Array:
    """x with NaN in the batch rows that are not valid, in place: as a rule there are none, and a
    product would pass over all of it. Cotangents pass as they are; to an implementation such a row
    is all padding, whose gradients are 0.

    Args:
      x: with the batch rows along ``axis``, and tokens or slots along the next.
      valid: bool [B].
    """
    first = jnp.argsort(valid)  # those that are not
    # some of a row at a time: all of it would be made beforehand, whether it is needed or not
    size = min(x.shape[axis + 1], _TOGETHER)
    pieces = -(-x.shape[axis + 1] // size)
    missing = jnp.full((*x.shape[:axis], 1, size, *x.shape[axis + 2 :]), jnp.nan, x.dtype)

    def clear(i: jax.Array, x: jax.Array) -> jax.Array:
        start = [jnp.zeros_like(i)] * x.ndim
        start[axis], start[axis + 1] = first[i // pieces], i % pieces * size
        return lax.dynamic_update_slice(x, missing, start)

    return lax.fori_loop(0, jnp.sum(~valid) * pieces, clear, x)


def _without_rows_forward(x: jax.Array, valid: jax.Array, axis: int) -> tuple[jax.Array, None]:
    return without_rows(x, valid, axis), None


def _without_rows_backward(axis: int, residuals: None, cotangent: Any) -> tuple[Any, None]:
    return cotangent, None


without_rows.defvjp(_without_rows_forward, _without_rows_backward)
