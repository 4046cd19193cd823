"""A small set of variants and problems that holds every pair of values of two axes."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

from kdagen.problem import Problem
from kdagen.variant import Variant, check
from tests.kernels.calls import CHIP

# Packs decide how long a kernel compiles for the CPU, tokens how long the float64 recurrence runs.
_MOST_PACKS, _MOST_BLOCK_TOKENS = 4, 256
_CANDIDATES = 1500

AXES: dict[str, tuple[Any, ...]] = {
    "factorisation": (
        ("log_decay", "unbounded", 8),
        ("softplus", "unbounded", 8),
        ("bounded", "unbounded", 8),
        ("bounded", "bounded", 16),
        ("bounded", "bounded", 32),
    ),
    "heads": ((1, 1), (2, 1), (8, 4), (12, 2)),
    "batch": (1, 2),
    "states": ((False, False), (True, False), (False, True), (True, True)),
    "qk_l2norm": (False, True),
    "gate_dtype": ("bfloat16", "float32"),
    "beta_dtype": ("bfloat16", "float32"),
    "ragged": (False, True),
    "chunk": (32, 64, 128),
    "chunks": (1, 2, 4),
    "inverse_block": (2, 4, 8),
    "weight_depth": (64, 128),
    "order": ("rir", "irr", "mix"),
    "ends": (0, 1, 2),
    "recurrence_span": (1, 4, 9),
    "inverse_span": (1, 3),
    "relation_span": (0, 5),
    "lag": (0, 1),
}


def case(point: dict[str, Any]) -> tuple[Problem, Variant]:
    """The problem and the variant of one value an axis."""
    gate, decay, sub_block = point["factorisation"]
    all_heads, heads = point["heads"]
    plain = ("chunk", "chunks", "inverse_block", "weight_depth", "order", "lag", "ends")
    spans = ("recurrence_span", "inverse_span", "relation_span")
    variant = Variant(
        heads=heads,
        decay=decay,
        sub_block=sub_block,
        **{name: point[name] for name in (*plain, *spans)},
    )
    rest = variant.chunk // 2 + 3 if point["ragged"] else 0
    initial_state, final_state = point["states"]
    problem = Problem(
        tokens=2 * variant.block_tokens + rest,
        heads=all_heads,
        gate=gate,
        lower_bound=-5.0 if gate == "bounded" else None,
        initial_state=initial_state,
        final_state=final_state,
        **{name: point[name] for name in ("batch", "qk_l2norm", "gate_dtype", "beta_dtype")},
    )
    return problem, variant


def _pairs(point: dict[str, Any]) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(sorted(point.items()), 2))


@functools.cache
def cases() -> tuple[tuple[Problem, Variant], ...]:
    """Points that hold every pair of values among random legal points, greedily chosen."""
    rng = random.Random(0)
    candidates = []
    while len(candidates) < _CANDIDATES:
        point = {name: rng.choice(values) for name, values in AXES.items()}
        problem, variant = case(point)
        small = variant.packs <= _MOST_PACKS and variant.block_tokens <= _MOST_BLOCK_TOKENS
        if small and check(variant, problem, CHIP) is None:
            candidates.append((point, _pairs(point)))
    missing = set().union(*(pairs for _, pairs in candidates))
    chosen = []
    while missing:
        point, pairs = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(case(point))
        missing -= pairs
    return tuple(chosen)
