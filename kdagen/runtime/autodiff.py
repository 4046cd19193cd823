"""The custom VJP that all implementations share: residuals, and gradients of what was asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from kdagen.reference import chunked
from kdagen.reference.options import Options
from kdagen.reference.recurrent import recurrent
from kdagen.reference.varying import as_varying, summed_like, varying_axes
from kdagen.runtime.target import warn_once

Operands = dict[str, jax.Array | None]
Outputs = tuple[jax.Array, jax.Array | None]

_NO_BACKWARD = (
    "kimi_delta_attention has no backward kernel in this version: the gradient of a Pallas forward "
    "runs on 'xla_chunked'"
)
STATES_NAME = "kda_chunk_states"
INPUT_NAME = "kda_{}"


@dataclass(frozen=True)
class Rule:
    """How a call is computed; static and hashable.

    Attributes:
      implementation: "pallas", "xla_chunked", "recurrent", or "by_platform": the kernel where the
        program is lowered for a TPU, the chunk form where it is not.
      options: the static part of the call.
      kernel: for the first and the last, a hashable function from (operands, options) to (output,
        final state).
      notes: what is to be told should the program be lowered for a TPU.
    """

    implementation: str
    options: Options
    kernel: Callable[[Operands, Options], Outputs] | None = None
    notes: tuple[str, ...] = ()


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Names of the operands to differentiate; static, so that residuals can hold it."""

    names: tuple[str, ...]


def _once_differentiable(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays, which raises NotImplementedError when it is differentiated."""
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            "kimi_delta_attention can be differentiated once only: its gradient has no derivative"
        )

    return guarded


def _told_on_tpu(operands: Operands, notes: tuple[str, ...]) -> Operands:
    """The operands; a program with them warns of `notes` when it is lowered for a TPU."""
    from kdagen.runtime.lowering import told_on_tpu

    beta = operands["beta"]
    assert beta is not None
    return {**operands, "beta": told_on_tpu(beta, notes)}


@functools.partial(jax.jit, static_argnums=(2, 3))
def _forward(
    operands: Operands, boundaries: jax.Array | None, rule: Rule, keep_states: bool
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    options = rule.options
    if rule.notes:
        operands = _told_on_tpu(operands, rule.notes)
    if rule.implementation == "recurrent":
        reached, state = recurrent(operands, boundaries, options)
        return reached, state if options.output_final_state else None, None
    if rule.implementation == "pallas":
        assert rule.kernel is not None
        return *rule.kernel(operands, options), None
    if rule.implementation == "by_platform":
        kernel = rule.kernel
        assert kernel is not None
        return *jax.lax.platform_dependent(
            operands,
            tpu=lambda operands: kernel(operands, options),
            default=lambda operands: chunked.forward(operands, None, options)[:2],
        ), None  # fmt: skip
    output, final, states = chunked.forward(operands, boundaries, options, keep_states=keep_states)
    assert output is not None
    return output, final, states


@functools.partial(jax.jit, static_argnums=(3, 4))
def _backward(
    operands: Operands,
    boundaries: jax.Array | None,
    given: tuple[jax.Array | None, jax.Array | None, jax.Array | None],
    rule: Rule,
    wanted: tuple[str, ...],
) -> dict[str, jax.Array]:
    states, d_output, d_final = given
    if rule.implementation == "by_platform":
        operands = _told_on_tpu(operands, (_NO_BACKWARD,))
    if rule.implementation != "recurrent":
        return chunked.backward(
            operands, boundaries, states, d_output, d_final, wanted, rule.options
        )

    def run(moving: Operands) -> tuple[jax.Array, jax.Array]:
        return recurrent({**operands, **moving}, boundaries, rule.options)

    # All vary alike, so that JAX adds no sum over mesh axes inside the loops.
    axes = varying_axes(operands, boundaries, d_output, d_final)
    output, pull = jax.vjp(run, as_varying({name: operands[name] for name in wanted}, axes))
    fill = lambda x, like: jax.numpy.zeros_like(like) if x is None else x  # noqa: E731
    cotangents = (fill(d_output, output[0]), fill(d_final, output[1]))
    return pull(as_varying(cotangents, axes))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(rule: Rule, operands: Operands, boundaries: jax.Array | None) -> Outputs:
    """Output in value's shape and final state [B, N, HV, K, V] (None unless it is asked for).

    Args:
      rule: how.
      operands: as in `kdagen.reference.chunked.forward`.
      boundaries: int32 [B, N + 1] or None.
    """
    output, final, _ = _forward(operands, boundaries, rule, False)
    return output, final


def _attend_forward(rule: Rule, operands: Any, boundaries: Any) -> tuple[Outputs, Any]:
    values = {name: None if x is None else x.value for name, x in operands.items()}
    wanted = tuple(name for name, x in operands.items() if x is not None and x.perturbed)
    edges = None if boundaries is None else boundaries.value
    keep = rule.implementation == "xla_chunked" and rule.options.residuals == "save"
    if wanted and rule.implementation == "pallas":
        warn_once(_NO_BACKWARD)

    def run(values: Operands, edges: jax.Array | None) -> Any:
        return _forward(values, edges, rule, keep and bool(wanted))

    output, final, states = _once_differentiable(run)(values, edges)
    kept = {
        name: None if x is None else checkpoint_name(x, INPUT_NAME.format(name))
        for name, x in values.items()
    }
    if states is not None:
        states = checkpoint_name(states, STATES_NAME)
    return (output, final), (kept, edges, states, _Wanted(wanted))


def _attend_backward(rule: Rule, residuals: Any, cotangents: Any) -> tuple[Any, None]:
    operands, edges, states, wanted = residuals
    d_output, d_final = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    if not wanted.names or (d_output is None and d_final is None):
        return dict.fromkeys(operands), None

    def run(operands: Operands, edges: jax.Array | None, given: Any) -> dict[str, jax.Array]:
        return _backward(operands, edges, given, rule, wanted.names)

    found = _once_differentiable(run)(operands, edges, (states, d_output, d_final))
    grads = {name: summed_like(x, operands[name]) for name, x in found.items()}
    return {name: grads.get(name) for name in operands}, None


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
