"""Runs cases through the public function, compiled once for each shape and kind."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from kdagen.runtime.kda import kimi_delta_attention
from tests.reference.cases import Case

PER_TOKEN = ("query", "key", "value", "gate", "beta")


def call(operands: dict[str, Any], **static: Any) -> tuple[jax.Array, jax.Array]:
    """The public function on operands by name."""
    rest = {name: x for name, x in operands.items() if name not in PER_TOKEN}
    return kimi_delta_attention(*(operands[name] for name in PER_TOKEN), **rest, **static)


@functools.lru_cache(maxsize=64)
def _compiled(static: tuple[tuple[str, Any], ...], gradients: bool) -> Any:
    options = dict(static)

    def run(operands, cu_seqlens, d_output, d_state):
        def forward(operands):
            return call(operands, cu_seqlens=cu_seqlens, output_final_state=True, **options)

        if not gradients:
            output, state = forward(operands)
            return {"output": output, "final_state": state}
        (output, state), pull = jax.vjp(forward, operands)
        return {"output": output, "final_state": state, **pull((d_output, d_state))[0]}

    # hardly optimised, since it runs for a moment
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def results(case: Case, *, gradients: bool = True, **options: Any) -> dict[str, jax.Array]:
    """Output, final_state and (unless told otherwise) gradients of a case."""
    run = _compiled(tuple(sorted({**case.static, **options}.items())), gradients)
    edges = None if case.boundaries is None else jnp.asarray(case.boundaries)
    return run(case.operands, edges, case.d_output, case.d_state)


def moved(tensors, layout, *ways):
    """Tensors by name, in layout "BTHD" those per token with an axis moved."""
    names = PER_TOKEN if layout == "BTHD" else ()
    return {n: jnp.moveaxis(x, *ways) if n in names else x for n, x in tensors.items()}


def masked(case, where, x):
    """The case with every operand and cotangent of some tokens [B, T] what `x` makes of it."""

    def some(tensor):
        there = where.reshape(1, *where.shape, *[1] * (tensor.ndim - 3))
        return jnp.where(there, x(tensor), tensor)

    operands = {n: some(t) if n in PER_TOKEN else t for n, t in case.operands.items()}
    return dataclasses.replace(case, operands=operands, d_output=some(case.d_output))
