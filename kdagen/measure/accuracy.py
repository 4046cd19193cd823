"""How far a result is from the float64 recurrence, and how far it may be."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

OUTPUTS = ("output", "final_state")
INPUTS = ("query", "key", "value", "initial_state")
GATES = ("gate", "beta")
PARAMETERS = ("a_log", "delta_time_bias")

# By the dtype of query, key and value.
_BOUNDS = {
    "float32": {OUTPUTS: 2e-5, INPUTS: 5e-5, GATES: 2e-4, PARAMETERS: 2e-4},
    "bfloat16": {OUTPUTS: 5e-3, INPUTS: 5e-3, GATES: 8e-3, PARAMETERS: 6e-3},
}
# A sum over this many tokens without decay gathers more roundings than the table allows for.
_LONG = 1024


def bound(
    tensor: str,
    dtype: str,
    *,
    tokens: int = 1,
    undecayed: bool = False,
    ill_conditioned: bool = False,
    beta_above_one: bool = False,
) -> float:
    """The largest ``relative_error`` that a tensor of a call may have.

    Args:
      tensor: "output" or "final_state", or the operand of a gradient: "query", "key", "value",
        "initial_state", "gate", "beta", "a_log" or "delta_time_bias".
      dtype: of query, key and value, "bfloat16" or "float32".
      tokens: T.
      undecayed: the log decay is 0 everywhere.
      ill_conditioned: keys are repeated or nearly parallel, write strength is near 1 or above and
        decay slow.
      beta_above_one: write strengths reach into (1, 2]: a token that is written may be reflected.

    Raises:
      KeyError: an unknown tensor or dtype.
    """
    usual = {name: x for names, x in _BOUNDS[dtype].items() for name in names}[tensor]
    if dtype == "float32":
        return usual * (5 if ill_conditioned else 1)
    if ill_conditioned:
        return 5e-2 if beta_above_one else 2e-2
    if beta_above_one:
        return 1e-2 * max(1.0, sqrt(tokens / _LONG))
    if undecayed and tokens > _LONG and tensor in OUTPUTS:
        return 6e-3
    return usual


def relative_error(x: Any, reference: np.ndarray) -> float:
    """rms(x - reference) / rms(reference), of two arrays of one shape.

    Infinite where x is not finite. Where the reference is 0 everywhere, 0 if |x| < 1e-30 and
    infinite otherwise.

    Raises:
      ValueError: the shapes differ.
    """
    x = np.asarray(x).astype(np.float64)
    if x.shape != reference.shape:
        raise ValueError(f"x: got shape {x.shape}; it must be the reference's {reference.shape}")
    if not np.isfinite(x).all():
        return float("inf")
    size = float(np.sqrt(np.mean(reference**2)))
    if size == 0:
        return 0.0 if np.abs(x).max() < 1e-30 else float("inf")
    return float(np.sqrt(np.mean((x - reference) ** 2))) / size
