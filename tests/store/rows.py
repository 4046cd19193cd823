"""Rows for tests of the store and of what reads it."""

from __future__ import annotations

import dataclasses
from typing import Any

from kdagen.chips import get_chip
from kdagen.gradient.step import Step, paired
from kdagen.problem import Problem
from kdagen.space import default_variant
from kdagen.store.rows import Environment, Result, TensorError
from kdagen.store.tuned import Store
from kdagen.variant import Variant

ENVIRONMENT = Environment(
    chip="v6e",
    jax="0.10.2",
    jaxlib="0.10.2",
    libtpu="0.0.42",
    kdagen="0.1.0",
    generator="a" * 64,
    model="b" * 64,
)
PROBLEM = Problem(tokens=2048, heads=8, gate="bounded", lower_bound=-5.0, qk_l2norm=True)
DEFAULT = default_variant(PROBLEM, get_chip("v6e"))
FASTER = dataclasses.replace(DEFAULT, sub_block=16, recurrence_span=7)
TRAINED = dataclasses.replace(PROBLEM, residuals="tuned")
STEP = paired(TRAINED, DEFAULT, (get_chip("v6e"),))
CHECKED = {"output": TensorError(3e-3, 5e-3), "final_state": TensorError(2e-3, 5e-3)}


def result(of: Variant | Step = DEFAULT, /, **changes: Any) -> Result:
    """A good result of a variant."""
    fields: dict[str, Any] = {
        "variant": of.to_json(),
        "variant_id": f"id-{of.to_json()}",
        "source": "compiler",
        "status": "ok",
        "is_default": of == DEFAULT,
        "seconds": 1e-4,
        "modelled_seconds": 1e-4,
        "model_error": 0.05,
        "loop_bundles": 5000,
        "spills": 10,
        "dma_in_bytes": 1 << 24,
        "dma_out_bytes": 1 << 22,
        "floor_bytes": 20 << 20,
        "floor_seconds": 2e-5,
        "vmem_used_bytes": 12 << 20,
        "vmem_limit_bytes": 32 << 20,
    }
    return Result(**{**fields, **changes})


def step_result(of: Step = STEP, /, **changes: Any) -> Result:
    """A good result of a training step."""
    fields: dict[str, Any] = {
        "seconds": 5e-4,
        "forward_seconds": 1e-4,
        "backward_seconds": 4e-4,
        "residual_bytes": 0 if of.residuals == "rematerialize" else 8 << 20,
        "is_default": of == STEP,
    }
    return result(of, **{**fields, **changes})


def tuned(store: Store, environment: Environment = ENVIRONMENT, **changes: Any) -> tuple[int, int]:
    """A default and a faster, checked winner; the ids of environment and problem."""
    where = store.put_environment(environment), store.put_problem(PROBLEM, "small")
    store.put_result(*where, result())
    winner = result(FASTER, **{"seconds": 8e-5, "errors": CHECKED, **changes})
    store.put_result(*where, winner)
    store.choose(*where, winner.source, winner.variant_id)
    return where
