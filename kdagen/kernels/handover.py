"""What the relations of a block hand to its recurrence and gradients, one grid step later.

Plain Python: the VMEM that it takes is part of whether a variant is legal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from kdagen.kernels.tiling import LANES

BYTES = {"bfloat16": 2, "float32": 4}

Shapes = Mapping[str, tuple[tuple[int, ...], str]]


def heights(chunk: int, base: int) -> tuple[int, ...]:
    """Rows t of the product of each level, see ``kdagen.kernels.decay_tree.levels``."""
    coarse = (chunk // 2,) * (int(math.log2(chunk)) - int(math.log2(base)))
    return coarse if base == 1 else (*coarse, chunk)


@dataclass(frozen=True)
class Handover:
    """The scratch between the two halves of a backward kernel.

    Attributes:
      chunk, items: tokens of a chunk; chunk-heads of a grid step.
      base: rows of the base blocks of the decay tree.
      dtype, inverse_dtype: of the operands of products; of those above it.
      gradients: whether gradients of queries, keys, gates or write strengths are wanted.
      norms: whether L2 normalisation is to be differentiated.
      gate, rate: whether the gradients of the gate, and of a_log, are wanted.
      corrected: whether corrected values are formed again.
      packed: whether what is of one segment is wanted.
      streams, heads: of a program.
      initial, final: whether segments have initial states of their own, and cotangents of their
        final ones.
      written: whether gradients of queries, keys or gates are wanted.
    """

    chunk: int
    items: int
    base: int
    dtype: str
    inverse_dtype: str
    gradients: bool
    norms: bool
    gate: bool
    rate: bool
    corrected: bool
    packed: bool
    streams: int
    heads: int
    initial: bool
    final: bool
    written: bool

    def shapes(self, key_dim: int, value_dim: int) -> Shapes:
        """Shape and dtype of every array by name, for widths in whole registers.

        keys_to_end: k e; reads: (scale q d; k d) transposed; related: scale Q^T beside N^T; own:
        the diagonal of scale Q where the tree has none, in every lane; write: b in every lane;
        whole: 2^total; the others as in ``kdagen.kernels.backward_item.Item``. Two slots come
        first, then chunk-heads, or packs of them, or pairs of chunk and batch row.
        """
        chunk, items = self.chunk, self.items
        packs = items * chunk // LANES
        token = (items, chunk, key_dim)
        made: dict[str, tuple[tuple[int, ...], str]] = {
            "keys_to_end": (token, self.inverse_dtype),
            "reads": ((items, key_dim, 2 * chunk), self.dtype),
            "related": ((items, chunk, 2 * chunk), self.inverse_dtype),
            "write": ((packs, LANES, value_dim), "float32"),
            "whole": ((items, 1, key_dim), "float32"),
        }
        if self.base == 1:
            made["own"] = ((packs, LANES, value_dim), "float32")
        made["transposed"] = ((packs, LANES, chunk), self.inverse_dtype)
        if self.corrected:
            made["inverse"] = ((packs, chunk, LANES), self.inverse_dtype)
        if self.gradients:
            levels = heights(chunk, self.base)
            made |= dict.fromkeys(("query", "key", "from_start", "to_end"), (token, "float32"))
            made["left"] = ((items, len(levels), chunk, key_dim), "float32")
            if self.base > 1:
                made["right"] = (token, "float32")
            for i, height in enumerate(levels):
                made[f"rows_{i}"] = ((items, 2 * height, key_dim), self.dtype)
                made[f"columns_{i}"] = ((packs, LANES, key_dim), self.dtype)
            if self.norms:
                made |= dict.fromkeys(("query_norm", "key_norm"), (token, "float32"))
            if self.gate:
                made["by_gate"] = (token, "float32")
            if self.rate:
                made["by_log_rate"] = (token, "float32")
        if self.packed:
            chunks = items // self.heads
            made["of_one_segment"] = ((chunks, chunk, chunk), "float32")
            if self.base > 1:
                split = 1 if self.inverse_dtype == "float32" else 2
                made["reached"] = ((chunks, chunk, 2 * split * chunk), "bfloat16")
        return {name: ((2, *shape), dtype) for name, (shape, dtype) in made.items()}

    def within(self, key_dim: int, value_dim: int) -> Shapes:
        """Shape and dtype of what states of segments take, by name: see
        ``kdagen.kernels.backward_states``; nothing where they have none."""
        if not (self.initial or self.final):
            return {}
        chunk, items = self.chunk, self.items
        state = (key_dim, value_dim)
        made: dict[str, tuple[tuple[int, ...], str]] = {
            "before": ((2, items, chunk, key_dim), "float32"),
            "reads_within": ((2, items, key_dim, 2 * chunk), self.dtype),
            "both": ((items, 2 * chunk, value_dim), self.inverse_dtype),
            "d_after": ((self.streams, *state), "float32"),
            "d_out": ((self.heads, *state), "float32"),
        }
        if self.final:
            made["keys_within"] = ((2, items, chunk, key_dim), self.inverse_dtype)
            made["written_within"] = ((items, chunk, value_dim), "float32")
            made["left_within"] = ((items, *state), "float32")
            made["d_in"] = ((self.heads, *state), "float32")
        if self.final and self.written:
            made["after"] = ((2, items, chunk, key_dim), "float32")
        if self.initial and self.written:
            made["state_in"] = ((self.heads, *state), "float32")
        if self.written:
            made["written"] = ((items, chunk, value_dim), "float32")
        return made

    def bytes(self, key_dim: int, value_dim: int) -> int:
        """VMEM of all arrays; a row by itself takes a register."""
        total = 0
        every = (self.shapes(key_dim, value_dim), self.within(key_dim, value_dim))
        for shape, dtype in itertools.chain(*(shapes.values() for shapes in every)):
            *outer, rows, lanes = shape
            tile = 8 * 4 // BYTES[dtype]
            padded = -(-rows // tile) * tile * (-(-lanes // LANES) * LANES)
            total += math.prod(outer) * padded * BYTES[dtype]
        return total
