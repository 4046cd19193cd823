"""The helpers of kernels, called as plain functions in float32 or bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# A product in bf16 is wrong by 2e-3.
BOUND_F32 = 1e-6


def name_of(argument: Any) -> str:
    """A dtype, or anything else, in the name of a test."""
    return getattr(argument, "__name__", str(argument))


@functools.cache
def compiled(function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """For the CPU, hardly optimised."""
    fast = {"xla_backend_optimization_level": 0}
    return jax.jit(functools.partial(function, **static), compiler_options=fast)


def run(function: Callable[..., Any], *operands: Any, **static: Any) -> Any:
    """``function(*operands, **static)`` as float64."""
    made = compiled(function, **static)(*operands)
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), made)


def error(x: np.ndarray, reference: np.ndarray) -> float:
    """rms(x - reference) / rms(reference); infinite where x is not finite."""
    assert x.shape == reference.shape
    if not np.isfinite(x).all():
        return np.inf
    return float(np.sqrt(np.mean((x - reference) ** 2) / np.mean(reference**2)))


DECAYS = ("zero", "slow", "-20", "resets", "mixed")


def log_decays(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Log decays in natural units, f32: ``resets`` in a tenth of the entries."""
    rng = np.random.default_rng(1)
    drawn = {
        "zero": np.zeros(shape),
        "slow": np.full(shape, -1e-3),
        "-20": np.full(shape, -20.0),
        "resets": np.where(rng.random(shape) < 0.1, -1e4, -0.05 * rng.random(shape)),
        "mixed": np.where(
            rng.random(shape) < 0.02,
            -1e4,
            -rng.permutation(np.geomspace(1e-3, 20.0, shape[-1])) * rng.random(shape),
        ),
    }
    return drawn[kind].astype("float32")
