"""Packed sequences as every implementation takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packing:
    """Where the segments of B rows of T tokens lie, in N slots.

    Attributes:
      boundaries: int32 [B, N + 1], the first token of each slot's segment, and the number of tokens
        that are no padding.
      spans: int32 [B, 2, T], for every token the first one of its segment and the first one behind
        it; padding is a segment of its own, up to T.
      valid: bool [B], False for rows that break the rules; None if all are known to keep them.
    """

    boundaries: Any
    spans: Any
    valid: Any = None

    @property
    def lengths(self) -> Any:
        """int32 [B], tokens of a row that are no padding."""
        return self.boundaries[:, -1]

    @property
    def slots(self) -> int:
        """N."""
        return self.boundaries.shape[1] - 1

    @classmethod
    def of(cls, boundaries: Any, tokens: int, valid: Any = None) -> Packing:
        """From boundaries [B, N + 1], NumPy's or JAX's; what they are, the spans are."""
        known = isinstance(boundaries, np.ndarray)
        return cls(boundaries, (_spans if known else _traced_spans)(boundaries, tokens), valid)


def _spans(boundaries: np.ndarray, tokens: int) -> np.ndarray:
    at = np.arange(tokens)
    found = np.empty((len(boundaries), 2, tokens), np.int32)
    for spans, edges in zip(found, boundaries, strict=True):
        slot = np.searchsorted(edges, at, side="right")
        spans[0], spans[1] = edges[slot - 1], np.append(edges, tokens)[slot]
    return found


def _traced_spans(boundaries: jax.Array, tokens: int) -> jax.Array:
    """In O(T + N): no token looks for its segment, the segments are spread over the tokens."""
    row = jnp.arange(boundaries.shape[0])[:, None]
    begins = jnp.zeros((boundaries.shape[0], tokens), bool)
    begins = begins.at[row, boundaries].set(True, mode="drop")
    at = jnp.arange(tokens, dtype=jnp.int32)
    first = lax.cummax(jnp.where(begins, at, 0), axis=1)
    behind = lax.cummin(jnp.where(begins, at, tokens)[:, 1:], axis=1, reverse=True)
    behind = jnp.pad(behind, [(0, 0), (0, 1)], constant_values=tokens)
    return jnp.stack([first, behind], axis=1)
