"""The generated kernels behind `implementation="pallas"`: from a checked call to a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from kdagen.chips import CHIPS, Chip, get_chip
from kdagen.problem import Problem
from kdagen.reference.layout import heads_first_shape
from kdagen.reference.options import Options
from kdagen.reference.varying import varying_alike
from kdagen.runtime.arguments import Call
from kdagen.runtime.dispatch import choose, portable_choice
from kdagen.runtime.target import NoKernelError, Target
from kdagen.variant import LANES, Variant, check


@dataclass(frozen=True)
class Kernel:
    """A chosen variant of the fused forward for one problem; hashable, so that jit knows it again.

    Attributes:
      problem, variant: what is computed, and how.
      chip: name of the chip that it is generated for.
      interpret: run by Pallas' interpreter, on any platform.
    """

    problem: Problem
    variant: Variant
    chip: str
    interpret: bool

    def __call__(
        self, operands: dict[str, jax.Array | None], options: Options
    ) -> tuple[jax.Array, jax.Array | None]:
        """Output, in value's shape, and final state [B, 1, HV, K, V] or None."""
        from kdagen.generate import generate, load

        module = load(generate(self.problem, self.variant, get_chip(self.chip)))
        results = module.forward(
            **varying_alike(operands),
            scale=options.scale,
            lower_bound=options.lower_bound,
            interpret=self.interpret,
        )
        return results.output, results.final_state


def problem_of(call: Call) -> Problem:
    """The static facts of a call, as tuning knows them."""
    options, operands = call.options, call.operands
    query, value, gate, beta = (_given(operands, n) for n in ("query", "value", "gate", "beta"))
    value_heads, batch, tokens, value_dim = heads_first_shape(value.shape, options.layout)
    if not options.use_gate_in_kernel:
        kind = "log_decay"
    else:
        kind = "softplus" if options.lower_bound is None else "bounded"
    return Problem(
        tokens=tokens,
        heads=heads_first_shape(query.shape, options.layout)[0],
        batch=batch,
        value_heads=value_heads,
        key_dim=query.shape[-1],
        value_dim=value_dim,
        dtype=query.dtype.name,
        gate=kind,
        lower_bound=options.lower_bound,
        gate_dtype=gate.dtype.name,
        beta_dtype=beta.dtype.name,
        qk_l2norm=options.use_qk_l2norm,
        initial_state=operands["initial_state"] is not None,
        final_state=options.output_final_state,
        layout=options.layout,
        precision=_precision(query.dtype.name),
        # Which kernel serves depends on there being a packing and not on its lengths.
        segments=None if call.boundaries is None else 1,
    )


# What jax.default_matmul_precision may be set to that asks for products above bfloat16.
_ABOVE_BFLOAT16 = ("highest", "float32")


def _precision(dtype: str) -> str:
    """`Problem.precision` of a call made now; float32 has the highest anyway and needs no key."""
    asked = jax.config.values["jax_default_matmul_precision"]
    return "highest" if dtype == "bfloat16" and asked in _ABOVE_BFLOAT16 else "default"


def _given(operands: dict[str, Any], name: str) -> jax.Array:
    return operands[name]


def portable_kernel(call: Call, *, interpret: bool) -> Kernel:
    """A kernel that is legal on every chip, for a trace that does not know its own.

    Interpreted, it has as few chunk-heads in flight as can be: the interpreter compiles the whole
    unrolled program for the host, and nothing is gained by a larger one.

    Raises:
      NoKernelError: there is none.
    """
    problem = problem_of(call)
    choice, chip = portable_choice(problem)
    variant = choice.variant
    if interpret:
        small = replace(variant, heads=1, rows=1, chunks=LANES // variant.chunk)
        variant = small if check(small, problem, chip) is None else variant
    return Kernel(problem, variant, chip.name, interpret)


def kernel_for(call: Call, target: Target) -> Kernel:
    """The kernel that serves a call on a target: on a TPU, compiled; elsewhere, interpreted.

    Raises:
      NoKernelError: no variant is legal for the call, or the chip is not one of those known.
    """
    if not target.is_tpu:
        return portable_kernel(call, interpret=True)
    problem, chip = problem_of(call), _chip_of(target)
    return Kernel(problem, choose(problem, chip).variant, chip.name, interpret=False)


def _chip_of(target: Target) -> Chip:
    for chip in CHIPS.values():
        if target.device_kind in chip.device_kinds:
            return chip
    kinds = ", ".join(kind for chip in CHIPS.values() for kind in chip.device_kinds)
    raise NoKernelError(f"{target.description}; kernels are generated for {kinds}")
