"""Calls of generated backward kernels in interpret mode, on data of every kind, and in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdagen.chips import get_chip
from kdagen.generate import load
from kdagen.gradient.source import generate
from kdagen.gradient.variant import BackwardVariant, Request, check, states_dtype
from kdagen.kernels.geometry import padded
from kdagen.measure import kinds, operands
from kdagen.problem import Problem
from kdagen.reference.oracle import recurrent_float64, recurrent_float64_vjp

CHIP = get_chip("v6e")
OPERANDS = ("query", "key", "value", "gate", "beta", "a_log", "delta_time_bias")


def traceable(problem: Problem, variant: BackwardVariant, request: Request) -> Callable[..., Any]:
    """``backward`` of the array operands, for the interpreter."""
    violation = check(variant, problem, CHIP)
    assert violation is None, violation
    module = load(generate(problem, request, variant, CHIP))
    return functools.partial(module.backward, **operands.scalars(problem), interpret=True)


@functools.cache
def compiled(problem: Problem, variant: BackwardVariant, request: Request) -> Callable[..., Any]:
    """``traceable``, compiled for the CPU: hardly optimised, since it runs for a moment."""
    return jax.jit(
        traceable(problem, variant, request),
        compiler_options={"xla_backend_optimization_level": 0},
    )


@dataclasses.dataclass(frozen=True)
class Data:
    """Operands of a call, cotangents of its results, and the states at the start of its chunks."""

    values: dict[str, Any]
    d_output: Any
    d_final: Any
    states: dict[int, Any]


def draw(
    problem: Problem,
    given: Sequence[kinds.Kind],
    chunk: int,
    seed: int = 0,
    decays: Sequence[float] | None = None,
    values: dict[str, Any] | None = None,
) -> Data:
    """Random data, a head of each kind in turn, or with these log decays head by head, or these
    values; states are those of the float64 recurrence."""
    values = values or kinds.draw(problem, given, seed)
    if decays is not None:
        gate = values["gate"]
        constant = jnp.asarray(np.reshape(decays, (-1, 1, 1, 1)), gate.dtype)
        values = values | {"gate": jnp.broadcast_to(constant, gate.shape)}
    rng = np.random.default_rng(seed + 1)
    output = (problem.value_heads, problem.batch, problem.tokens, problem.value_dim)
    state = (problem.batch, 1, problem.value_heads, problem.key_dim, problem.value_dim)
    return Data(
        values,
        jnp.asarray(rng.standard_normal(output), problem.dtype),
        # of the size of what one token adds to it, so that neither hides the errors of the other
        jnp.asarray(problem.key_dim**-0.5 * rng.standard_normal(state), "float32"),
        {chunk: _states(problem, values, chunk)},
    )


def static(problem: Problem) -> dict[str, Any]:
    return {
        "lower_bound": problem.lower_bound,
        "use_gate_in_kernel": problem.gate != "log_decay",
        "use_qk_l2norm": problem.qk_l2norm,
    }


def _states(problem: Problem, values: dict[str, Any], chunk: int) -> np.ndarray:
    """[B, HV, chunks, K, V] float64."""
    whole = {name: values.get(name) for name in ("a_log", "delta_time_bias")}
    state = values.get("initial_state")
    if state is None:
        shape = (problem.batch, 1, problem.value_heads, problem.key_dim, problem.value_dim)
        state = np.zeros(shape)
    found = []
    for start in range(0, problem.tokens, chunk):
        found.append(np.asarray(state, np.float64)[:, 0])
        part = {name: values[name][:, :, start : start + chunk] for name in OPERANDS[:5]}
        _, state = recurrent_float64(**part, **whole, **static(problem), initial_state=state)
    return np.stack(found, axis=2)


def arguments(
    problem: Problem, variant: BackwardVariant, request: Request, data: Data
) -> list[Any]:
    """The array arguments of ``backward``, without segments; states rounded as they are kept, 0
    beyond."""
    found = data.states[variant.chunk]
    chunks = -(-problem.tokens // variant.block_tokens) * variant.chunks
    shape = (*found.shape[:2], chunks, padded(problem.key_dim), padded(problem.value_dim))
    states = np.zeros(shape)
    states[:, :, : found.shape[2], : problem.key_dim, : problem.value_dim] = found
    return [
        *(data.values.get(name) for name in OPERANDS),
        *(None for _ in ("spans", "boundaries", "initial_state")),
        jnp.asarray(states, states_dtype(problem)),
        None,
        None,
        data.d_output if request.output_cotangent else None,
        data.d_final if request.state_cotangent else None,
    ]


def call(
    problem: Problem, variant: BackwardVariant, data: Data, request: Request | None = None
) -> dict[str, Any]:
    """The gradients that the request, all of them by default, asks for."""
    request = request or Request.everything(problem)
    return compiled(problem, variant, request)(*arguments(problem, variant, request, data))


def reference(problem: Problem, data: Data, request: Request | None = None) -> dict[str, Any]:
    """The same in float64."""
    request = request or Request.everything(problem)
    _, _, grads = recurrent_float64_vjp(
        **data.values,
        **static(problem),
        output_cotangent=data.d_output if request.output_cotangent else None,
        state_cotangent=data.d_final if request.state_cotangent else None,
    )
    return {name: grads[name] for name in request.wanted}
