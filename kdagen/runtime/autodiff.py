"""The custom VJP that all implementations share: residuals, and gradients of what was asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from kdagen.reference.packing import Packing
from kdagen.reference.varying import summed_like
from kdagen.runtime.implementations import Computed, Cotangents, Implementation, Kept, Operands

Outputs = tuple[jax.Array, jax.Array | None]

CHECKPOINT_NAME = "kda_{}"
"""Of whatever is kept for the gradient: operands by their names, and what a forward keeps."""

STATES_NAME = CHECKPOINT_NAME.format("chunk_states")


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    """What residuals hold beside arrays.

    Attributes:
      implementation: settled, that of the forward.
      wanted: names of the operands to differentiate.
    """

    implementation: Implementation
    wanted: tuple[str, ...]


def _once_differentiable(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays, which raises NotImplementedError when it is differentiated."""
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            "kimi_delta_attention can be differentiated once only: its gradient has no derivative"
        )

    return guarded


@functools.partial(jax.jit, static_argnums=(2, 3))
def _forward(
    operands: Operands, packing: Packing | None, implementation: Implementation, keep: bool
) -> Computed:
    return implementation.forward(operands, packing, keep)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _backward(
    operands: Operands,
    packing: Packing | None,
    kept: Kept,
    cotangents: Cotangents,
    implementation: Implementation,
    wanted: tuple[str, ...],
) -> dict[str, jax.Array]:
    return implementation.backward(operands, packing, kept, cotangents, wanted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(implementation: Implementation, operands: Operands, packing: Packing | None) -> Outputs:
    """Output in value's shape and final state [B, N, HV, K, V] (None unless it is asked for).

    Args:
      implementation: how.
      operands: as in `kdagen.reference.chunked.forward`.
      packing: of segments, or None.
    """
    found = _forward(operands, packing, implementation.settled(False), False)
    return found.output, found.final_state


def _attend_forward(
    implementation: Implementation, operands: Any, packing: Any
) -> tuple[Outputs, Any]:
    values = {name: None if x is None else x.value for name, x in operands.items()}
    wanted = tuple(name for name, x in operands.items() if x is not None and x.perturbed)
    places = jax.tree.map(lambda x: x.value, packing)
    settled = implementation.settled(bool(wanted))

    def run(values: Operands, places: Packing | None) -> Computed:
        return _forward(values, places, settled, bool(wanted))

    found = _once_differentiable(run)(values, places)
    saved, kept = (
        {n: None if x is None else checkpoint_name(x, CHECKPOINT_NAME.format(n)) for n, x in xs}
        for xs in (values.items(), found.kept.items())
    )
    outputs = found.output, found.final_state
    return outputs, (saved, places, kept, _Static(settled, wanted))


def _attend_backward(
    implementation: Implementation, residuals: Any, cotangents: Any
) -> tuple[Any, None]:
    operands, places, kept, static = residuals
    given = Cotangents(*(None if isinstance(x, SymbolicZero) else x for x in cotangents))
    if not static.wanted or (given.output is None and given.final_state is None):
        return dict.fromkeys(operands), None

    def run(*arrays: Any) -> dict[str, jax.Array]:
        return _backward(*arrays, static.implementation, static.wanted)

    found = _once_differentiable(run)(operands, places, kept, given)
    grads = {name: summed_like(x, operands[name]) for name, x in found.items()}
    return {name: grads.get(name) for name in operands}, None


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
