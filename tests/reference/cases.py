"""Calls of the operator with random values, their float64 reference, and how far one is off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdagen.measure.accuracy import bound, relative_error
from kdagen.reference.oracle import recurrent_float64_vjp


@dataclass
class Case:
    """One call: operands (float32 or bfloat16, float32 states), static arguments, cotangents."""

    operands: dict[str, jax.Array]
    static: dict[str, Any]
    d_output: jax.Array
    d_state: jax.Array
    boundaries: np.ndarray | None = None
    expected: dict[str, np.ndarray] = field(default_factory=dict)

    def reference(self) -> dict[str, np.ndarray]:
        """Output, final_state and the gradients, in float64."""
        if not self.expected:
            output, state, grads = recurrent_float64_vjp(
                **self.operands,
                **self.static,
                output_cotangent=self.d_output,
                state_cotangent=self.d_state,
                boundaries=self.boundaries,
            )
            self.expected = {"output": output, "final_state": state, **grads}
        return self.expected


def gate_values(rng: np.random.RandomState, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Log decays: a number for a constant, "random" (0 to -5, most near 0) or "resets"."""
    if kind == "random":
        return -5 * rng.rand(*shape) ** 4
    if kind == "resets":
        return np.where(rng.rand(*shape) < 0.1, -1e4, -0.1 * np.abs(rng.randn(*shape)))
    return np.full(shape, float(kind))


def keys(rng: np.random.RandomState, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """ "random", "parallel" (noise of 0.05 per unit-variance direction) or "repeated" keys."""
    if kind == "random":
        return rng.randn(*shape)
    heads, batch, _, width = shape
    direction = rng.randn(heads, batch, 1, width)
    noise = 0.05 if kind == "parallel" else 0.0
    return direction + noise * rng.randn(*shape)


def make_case(
    *,
    gate: str = "random",
    raw: bool = False,
    lower_bound: float | None = None,
    dtype: str = "float32",
    heads: int = 2,
    value_heads: int = 0,
    batch: int = 1,
    tokens: int = 150,
    width_k: int = 48,
    width_v: int = 40,
    key: str = "random",
    beta: float | None = None,
    a_log: float | None = None,
    boundaries: Any = None,
    seed: int = 0,
) -> Case:
    """A case with initial state, final state and L2 normalisation.

    Args:
      gate: see `gate_values`; a raw gate is normal.
      beta: a constant, or None for the sigmoid of a normal.
      a_log: a constant, or None for a normal.
    """
    rng = np.random.RandomState(seed)
    value_heads = value_heads or heads
    n = lambda *shape: rng.randn(*shape)  # noqa: E731
    rows = (value_heads, batch, tokens)
    values = {
        "query": n(heads, batch, tokens, width_k),
        "key": keys(rng, key, (heads, batch, tokens, width_k)),
        "value": n(*rows, width_v),
        "gate": n(*rows, width_k) if raw else gate_values(rng, gate, (*rows, width_k)),
        "beta": 1 / (1 + np.exp(-1.5 * n(*rows))) if beta is None else np.full(rows, beta),
    }
    operands = {name: jnp.asarray(x, dtype) for name, x in values.items()}
    if raw:
        log = 0.5 * n(value_heads) if a_log is None else np.full(value_heads, a_log)
        operands["a_log"] = jnp.asarray(log, "float32")
        operands["delta_time_bias"] = jnp.asarray(0.3 * n(value_heads, width_k), "float32")
    slots = 1 if boundaries is None else np.shape(boundaries)[1] - 1
    state = (batch, slots, value_heads, width_k, width_v)
    operands["initial_state"] = jnp.asarray(n(*state), "float32")
    static = dict(use_qk_l2norm=True, use_gate_in_kernel=raw, lower_bound=lower_bound)
    edges = None if boundaries is None else np.asarray(boundaries, np.int32)
    return Case(
        operands, static, jnp.asarray(n(*rows, width_v), dtype), jnp.asarray(n(*state), "float32"),
        edges,
    )  # fmt: skip


def assert_close(found: dict[str, Any], case: Case, **hardness: Any) -> None:
    """Every tensor of `found` is within its bound, `hardness` being more arguments of it."""
    dtype, reference = case.operands["query"].dtype.name, case.reference()
    errors = {name: relative_error(x, reference[name]) for name, x in found.items()}
    limits = {name: bound(name, dtype, **hardness) for name in found}
    wrong = {n: (errors[n], limits[n]) for n in found if not errors[n] <= limits[n]}
    assert not wrong, f"error and bound: {wrong}; all errors: {errors}"
