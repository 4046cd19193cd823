"""Errors of tokamax's kernels and of kdagen's on the same data, all in Pallas' interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

TOKENS = 256
KIND = "moderate"
SEEDS = range(6)
OPERANDS = ("query", "key", "value", "gate", "beta", "a_log", "delta_time_bias")


def errors(problem: Any, theirs: Callable[..., Any], ours: Callable[..., Any]) -> Iterator[str]:
    """Lines on the output and the gradients of both forwards.

    Errors are those of ``accuracy.relative_error`` against the token recurrence in float64, for
    random cotangents of the output.

    Args:
      problem: of many heads, with a raw gate.
      theirs, ours: of operands in the order of ``OPERANDS``, delta_time_bias being [HV * K].
    """
    from jax.experimental.pallas import tpu as pltpu

    from kdagen.measure import accuracy, kinds, verify_steps

    problem = dataclasses.replace(problem, tokens=TOKENS)
    steps = [differentiated(forward) for forward in (theirs, ours)]
    # by tensor, a pair a draw: of all heads together, and of a_log of each head
    found: dict[str, list[list[float]]] = {}
    single: list[list[np.ndarray]] = []
    for seed in SEEDS:
        values = kinds.draw(problem, (kinds.Kind(KIND),), seed)
        given = verify_steps.cotangents(problem, seed)
        operands = [values[name] for name in OPERANDS]
        with told_chip(), pltpu.force_tpu_interpret_mode():
            got = [step(operands, given["d_output"]) for step in steps]
        for name, expected in verify_steps.reference(problem, values, given).items():
            pair = [np.asarray(x[name]).reshape(expected.shape) for x in got]
            both = [accuracy.relative_error(x, expected) for x in pair]
            found.setdefault(name, []).append(both)
            if name == "a_log":
                single.append([np.abs(x - expected) / np.abs(expected) for x in pair])
    yield (
        f"errors against float64 in interpret mode: {problem.heads} heads of {TOKENS} tokens, K = "
        f"{problem.key_dim}, V = {problem.value_dim}, {problem.dtype}, {problem.gate} gate; the "
        f"median of {len(SEEDS)} draws"
    )
    for name, draws in found.items():
        tokamax, kdagen = np.median(draws, axis=0)
        bound = accuracy.bound(name, problem.dtype)
        yield f"  {name:16} tokamax {tokamax:.1e}   kdagen {kdagen:.1e}   bound {bound:.0e}"
    # one sum over tokens and channels, which may happen to cancel
    over = (np.array(single) > accuracy.bound("a_log", problem.dtype)).mean(axis=(0, 2))
    yield f"  a_log of 1 head  above its bound: tokamax {over[0]:.0%}   kdagen {over[1]:.0%}"


def differentiated(forward: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Output and gradients, by the name of the operand, of operands and a cotangent."""
    import jax

    @jax.jit
    def step(operands, d_output):
        output, pull = jax.vjp(forward, *operands[:-1], operands[-1].reshape(-1))
        return {"output": output, **dict(zip(OPERANDS, pull(d_output), strict=True))}

    return step


def told_chip() -> Any:
    """A context in which ``pltpu.get_tpu_info()`` answers for a TPU, which tokamax asks of it. What
    TPU makes no difference to its numbers."""
    from unittest import mock

    from jax.experimental.pallas import tpu as pltpu

    version = pltpu.ChipVersion.TPU_V6E
    return mock.patch.object(pltpu, "get_tpu_info", lambda: pltpu.get_tpu_info_for_chip(version, 1))
