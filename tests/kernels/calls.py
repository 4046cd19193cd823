"""Calls of generated kernels in interpret mode, on gates of every kind, against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdagen.chips import get_chip
from kdagen.generate import generate, load
from kdagen.measure import operands
from kdagen.measure.verify import BOUNDS
from kdagen.problem import Problem
from kdagen.reference.oracle import recurrent_float64
from kdagen.variant import Variant, check

CHIP = get_chip("v6e")
BOUND = BOUNDS["bfloat16"]

# Log decays of -c a token, resets of -1e4 in a tenth of the tokens and, in "mixed", every strength
# from hardly any to e^-20 in neighbouring channels, with resets of single channels.
LOG_DECAYS = ("0.001", "0.05", "1", "5", "20", "resets", "mixed", "zero or above")
# Rate and bias of a raw gate: moderate, slow, fast, of a rate beyond e^88, fast and slow channels
# side by side, and one of the two at random in every token.
RAW = ("moderate", "slow", "fast", "largest rate", "fast and slow channels", "fast and slow tokens")


def traceable(problem: Problem, variant: Variant) -> Callable[..., Any]:
    """``forward`` of the array operands, for the interpreter."""
    violation = check(variant, problem, CHIP)
    assert violation is None, violation
    module = load(generate(problem, variant, CHIP))
    return functools.partial(module.forward, **operands.scalars(problem), interpret=True)


@functools.cache
def compiled(problem: Problem, variant: Variant) -> Callable[..., Any]:
    """``traceable``, compiled for the CPU: hardly optimised, since it runs for a moment."""
    return jax.jit(
        traceable(problem, variant), compiler_options={"xla_backend_optimization_level": 0}
    )


def call(problem: Problem, variant: Variant, values: dict[str, Any]) -> dict[str, Any]:
    """Output, and final state where the problem asks for it."""
    got = compiled(problem, variant)(*(values.get(name) for name in operands.inputs(problem)))
    return {
        name: x for name, x in zip(("output", "final_state"), got, strict=True) if x is not None
    }


def reference(problem: Problem, values: dict[str, Any]) -> dict[str, np.ndarray]:
    """The same in float64."""
    output, state = recurrent_float64(
        **values,
        lower_bound=problem.lower_bound,
        use_gate_in_kernel=problem.gate != "log_decay",
        use_qk_l2norm=problem.qk_l2norm,
    )
    return {"output": output, "final_state": state} if problem.final_state else {"output": output}


def kinds(problem: Problem) -> tuple[str, ...]:
    """The kinds of gates that ``draw`` knows for a problem."""
    return LOG_DECAYS if problem.gate == "log_decay" else RAW


def draw(problem: Problem, kind: str, seed: int = 0) -> dict[str, Any]:
    """Operands of ``operands.draw``, with a gate of one of ``kinds(problem)``."""
    values = operands.draw(problem, seed)
    rng = np.random.default_rng(seed)
    shape = values["gate"].shape
    heads, key_dim = shape[0], shape[-1]
    if problem.gate == "log_decay":
        return values | {"gate": jnp.asarray(_log_decay(rng, kind, shape), problem.gate_dtype)}
    raw, rate = rng.standard_normal(shape), np.zeros(heads)
    bias = rng.standard_normal((heads, key_dim))
    if kind == "slow":
        rate, bias = rate - 3, bias - 6
    elif kind == "fast":
        rate, bias = rate + 2, bias + 4
    elif kind == "largest rate":
        rate, raw = rate + 90, 10 * raw
    elif kind == "fast and slow channels":
        bias = np.where(rng.random(bias.shape) < 0.5, -9.0, 9.0)
    elif kind == "fast and slow tokens":
        raw = np.where(rng.random(shape) < 0.5, -9.0, 9.0)
    return values | {
        "gate": jnp.asarray(raw, problem.gate_dtype),
        "a_log": jnp.asarray(rate, "float32"),
        "delta_time_bias": jnp.asarray(bias, "float32"),
    }


def _log_decay(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    if kind == "resets":
        return np.where(rng.random((*shape[:-1], 1)) < 0.1, -1e4, -0.05 * rng.random(shape))
    if kind == "mixed":
        strength = rng.permutation(np.geomspace(1e-3, 20.0, shape[-1]))
        return np.where(rng.random(shape) < 0.02, -1e4, -strength * rng.random(shape))
    if kind == "zero or above":
        return rng.choice([0.0, 0.5, -0.01], shape)
    return np.full(shape, -float(kind))


def relative_error(x: Any, reference: np.ndarray) -> float:
    """rms(x - reference) / rms(reference); infinite where x is not finite."""
    x = np.asarray(x).astype(np.float64)
    assert x.shape == reference.shape, (x.shape, reference.shape)
    if not np.isfinite(x).all():
        return float("inf")
    return float(np.sqrt(np.mean((x - reference) ** 2) / np.mean(reference**2)))


def errors(problem: Problem, variant: Variant, values: dict[str, Any]) -> dict[str, float]:
    """The relative error of each result."""
    expected = reference(problem, values)
    got = call(problem, variant, values)
    assert got.keys() == expected.keys()
    return {name: relative_error(got[name], x) for name, x in expected.items()}


def assert_close(found: dict[str, dict[str, float]], bound: float = BOUND) -> None:
    """``found`` holds errors by kind of gate and by tensor."""
    wrong = {
        (kind, name): error
        for kind, tensors in found.items()
        for name, error in tensors.items()
        if not error <= bound
    }
    assert not wrong, f"above {bound}: {wrong}"
