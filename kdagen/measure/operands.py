"""The operands of one call of a generated forward kernel: their shapes, bytes and drawn values."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import numpy as np

from kdagen.kernels.segment_walk import Table
from kdagen.kernels.tiling import LANES
from kdagen.problem import Problem
from kdagen.reference.packing import Packing
from kdagen.variant import Variant

BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}

_PER_TOKEN = ("query", "key", "value", "gate")
_WITH_HEADS = (*_PER_TOKEN, "beta", "output", "corrected", "d_output")
"""Operands, results and gradients that the layout arranges."""

Shaped = dict[str, tuple[tuple[int, ...], str]]
Given = tuple[tuple[int, ...], str] | None


def inputs(problem: Problem) -> dict[str, Given]:
    """Shape and dtype name of every array argument of ``forward`` in its order, None if absent.

    query, key [H, B, T, K]; value [HV, B, T, V]; gate [HV, B, T, K]; beta [HV, B, T], or in layout
    "BTHD" [B, T, H, K] and so on; a_log [HV] and delta_time_bias [HV, K] for a raw gate;
    initial_state [B, N, HV, K, V] if there is one; spans [B, 2, T] and boundaries [B, N + 1] of
    ``kdagen.kernels.packing`` if there are segments.
    """
    value_heads = problem.value_heads
    raw = problem.gate != "log_decay"
    state = (problem.batch, problem.slots, value_heads, problem.key_dim, problem.value_dim)

    def tokens_of(heads: int, *width: int) -> tuple[int, ...]:
        if problem.layout == "BTHD":
            return (problem.batch, problem.tokens, heads, *width)
        return (heads, problem.batch, problem.tokens, *width)

    return {
        "query": (tokens_of(problem.heads, problem.key_dim), problem.dtype),
        "key": (tokens_of(problem.heads, problem.key_dim), problem.dtype),
        "value": (tokens_of(value_heads, problem.value_dim), problem.dtype),
        "gate": (tokens_of(value_heads, problem.key_dim), problem.gate_dtype),
        "beta": (tokens_of(value_heads), problem.beta_dtype),
        "a_log": ((value_heads,), "float32") if raw else None,
        "delta_time_bias": ((value_heads, problem.key_dim), "float32") if raw else None,
        "initial_state": (state, "float32") if problem.initial_state else None,
        **packing_inputs(problem),
    }


def packing_inputs(problem: Problem) -> dict[str, Given]:
    """Those of ``inputs`` that tell of segments."""
    packed = problem.packed
    return {
        "spans": ((problem.batch, 2, problem.tokens), "int32") if packed else None,
        "boundaries": ((problem.batch, problem.slots + 1), "int32") if packed else None,
    }


def boundaries(problem: Problem) -> np.ndarray | None:
    """Those of the segments, [B, N + 1] int32, alike in all rows; None without segments."""
    segments = problem.segments
    if segments is None:
        return None
    if isinstance(segments, int):
        edges = np.arange(segments + 1) * problem.tokens // segments
    else:
        edges = np.cumsum([0, *segments])
    return np.tile(edges.astype(np.int32), (problem.batch, 1))


def lengths(problem: Problem) -> list[int]:
    """Tokens of every row that are no padding; empty without segments."""
    found = boundaries(problem)
    return [] if found is None else found[:, -1].tolist()


def numbers(problem: Problem, block_tokens: int) -> list[list[int]]:
    """What kernels of packed sequences are told in SMEM, vector by vector."""
    found = boundaries(problem)
    if found is None:
        return []
    told = [lengths(problem)]
    if problem.segment_states:
        table = Table(problem.slots, -(-problem.tokens // block_tokens), block_tokens)
        told.append(table.made(found).tolist())
    return told


def packing(problem: Problem) -> dict[str, Any]:
    """Values of ``packing_inputs``."""
    found = boundaries(problem)
    if found is None:
        return {}
    made = Packing.of(found, problem.tokens)
    return {"spans": made.spans, "boundaries": found}


def projected(problem: Problem) -> dict[str, Given]:
    """``inputs`` as the projections of a model give them: in layout "BTHD" with the heads side by
    side, [B, T, H * D], which is another arrangement in memory than [B, T, H, D]."""
    return side_by_side(problem, inputs(problem))


def side_by_side(problem: Problem, given: dict[str, Given]) -> dict[str, Given]:
    """Shapes by name, in layout "BTHD" with the heads of what is per token side by side."""
    if problem.layout == "HBTD":
        return given
    flat = dict(given)
    for name in (*_PER_TOKEN, "corrected", "d_output"):
        shaped = given.get(name)
        if shaped is not None:
            (batch, tokens, heads, width), dtype = shaped
            flat[name] = ((batch, tokens, heads * width), dtype)
    return flat


def in_layout(values: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """Operands of layout "HBTD" in that of the problem."""
    import jax.numpy as jnp

    if problem.layout == "HBTD":
        return values
    return {n: jnp.moveaxis(x, 0, 2) if n in _WITH_HEADS else x for n, x in values.items()}


def from_layout(values: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """The inverse of ``in_layout``; what is None stays so."""
    if problem.layout == "HBTD":
        return values
    return {
        name: x if x is None or name not in _WITH_HEADS else np.moveaxis(np.asarray(x), 2, 0)
        for name, x in values.items()
    }


def outputs(problem: Problem) -> Shaped:
    """Shape and dtype name of what ``forward`` returns: output, shaped as value, and the final
    state [B, N, HV, K, V] if the problem asks for it."""
    given = inputs(problem)["value"]
    assert given is not None
    result: Shaped = {"output": given}
    if problem.final_state:
        shape = (problem.batch, problem.slots, problem.value_heads)
        state = (*shape, problem.key_dim, problem.value_dim)
        result["final_state"] = (state, "float32")
    return result


def scalars(problem: Problem) -> dict[str, Any]:
    """The keyword arguments of ``forward`` that are compile-time constants."""
    return {"scale": problem.key_dim**-0.5, "lower_bound": problem.lower_bound}


def floor_bytes(problem: Problem) -> int:
    """HBM bytes of a call that reads each operand once and writes each result once."""
    arrays = [*inputs(problem).values(), *outputs(problem).values()]
    return sum(prod(shape) * BYTES[dtype] for shape, dtype in filter(None, arrays))


def residual_bytes(problem: Problem, variant: Variant) -> int:
    """HBM bytes of what a forward keeps for a backward, see ``kdagen.kernels.forward.Results``."""
    whole = lambda width: -(-width // LANES) * LANES  # noqa: E731
    streams = problem.batch * problem.value_heads
    chunks = -(-problem.tokens // variant.block_tokens) * variant.chunks
    operand = BYTES[problem.operand]
    total = 0
    if variant.states != "none":
        state = whole(problem.key_dim) * whole(problem.value_dim) * BYTES[variant.states]
        total += streams * chunks * state
    if variant.keep_inverse:
        total += streams * chunks * variant.chunk**2 * operand
    if variant.keep_corrected:
        total += streams * problem.tokens * problem.value_dim * operand
    if variant.keep_gate:
        total += streams * problem.tokens * problem.key_dim * 4
    return total


def draw(problem: Problem, seed: int) -> dict[str, Any]:
    """Random values of ``inputs`` in layout "HBTD" as JAX arrays, rounded to their dtypes.

    Queries and keys are of unit length where the kernel does not normalise them, beta lies in
    (0, 1). Gates span what the kind of gate allows: a bounded one reaches both of its ends; an
    unbounded one goes from hardly any decay in the first head to e^-20 a token in the last, and a
    log decay has a reset of -1e4 in one token of 50.
    """
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)
    problem = dataclasses.replace(problem, layout="HBTD")
    wanted = {name: given for name, given in inputs(problem).items() if given is not None}
    told = packing(problem)
    values = {
        name: rng.standard_normal(shape) for name, (shape, _) in wanted.items() if name not in told
    }
    if not problem.qk_l2norm:
        for name in ("query", "key"):
            values[name] /= np.linalg.norm(values[name], axis=-1, keepdims=True)
    values["beta"] = 1.0 / (1.0 + np.exp(-values["beta"]))
    strength = np.geomspace(1e-3, 20.0, problem.value_heads)
    if problem.gate == "log_decay":
        decay = -strength[:, None, None, None] * rng.random(values["gate"].shape)
        resets = rng.random((*values["gate"].shape[:3], 1)) < 0.02
        values["gate"] = np.where(resets, -1e4, decay)
    elif problem.gate == "softplus":
        values["a_log"] = np.log(strength)
    else:
        values["gate"] *= 4.0
        values["a_log"] *= 0.5
    return {name: jnp.asarray(x, wanted[name][1]) for name, x in (values | told).items()}
