"""The generated kernels behind `implementation="pallas"`: from a checked call to a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from kdagen.chips import CHIPS, Chip, get_chip
from kdagen.gradient.step import Step, keeping, of_first, paired
from kdagen.gradient.variant import Request
from kdagen.problem import TUNED, Problem
from kdagen.reference.layout import heads_first_shape
from kdagen.reference.options import PER_TOKEN, Options
from kdagen.reference.packing import Packing
from kdagen.reference.varying import varying_alike
from kdagen.runtime.arguments import Call
from kdagen.runtime.batching import over_rows
from kdagen.runtime.dispatch import choose, portable_choice
from kdagen.runtime.implementations import Chunked, Computed, Cotangents, Kept, Operands
from kdagen.runtime.target import NoKernelError, Target, warn_once
from kdagen.space import default_variant
from kdagen.variant import LANES, Variant, VariantError, check


@dataclass(frozen=True)
class Fused:
    """The fused kernels for one problem.

    Attributes:
      problem, options: what is computed. Of a step, value heads that share a query and key head may
        be too many for one program of its gradient: the problem is then that of as many heads, and
        each value head is given a copy.
      chip: name of the chip that they are generated for.
      interpret: run by Pallas' interpreter, on any platform.
      forward_variant: how the forward of a call that is not differentiated runs; None until it is
        settled.
      step: how a differentiated call runs; None until it is settled, and where no backward kernel
        serves, whose gradient is then that of the chunk form.
      portable: legal on every chip.
      required: only a kernel will do, for the gradient as well.
    """

    problem: Problem
    options: Options
    chip: str
    interpret: bool = False
    forward_variant: Variant | None = None
    step: Step | None = None
    portable: bool = False
    required: bool = False

    def settled(self, differentiated: bool) -> Fused:
        """With tuned variants, or those that there are: `kdagen.runtime.dispatch.choose`."""
        if differentiated:
            try:
                return self._with_step()
            except NoKernelError as error:
                if self.required:
                    raise
                warn_once(f"the gradient of kimi_delta_attention runs on 'xla_chunked': {error}")
        chosen = self.forward_variant or choose(self.problem, get_chip(self.chip)).variant
        assert isinstance(chosen, Variant)
        return replace(self, forward_variant=chosen)

    def _with_step(self) -> Fused:
        try:
            return replace(self, step=self._chosen_step())
        except NoKernelError:
            if self.problem.heads == self.problem.value_heads:
                raise
        apart = replace(self, problem=replace(self.problem, heads=self.problem.value_heads))
        return replace(apart, step=apart._chosen_step())

    def _chosen_step(self) -> Step:
        problem = replace(self.problem, residuals=self.options.residuals or TUNED)
        chip = _INTERPRETED if self.interpret else get_chip(self.chip)
        if self.forward_variant is None:
            chosen = choose(problem, chip).variant
            assert isinstance(chosen, Step)
            return chosen
        chips = (chip, *CHIPS.values()) if self.portable else (chip,)
        try:
            return paired(problem, self.forward_variant, chips, small=self.interpret)
        except VariantError as error:
            raise NoKernelError(str(error)) from error

    def forward(self, operands: Operands, packing: Packing | None, keep: bool) -> Computed:
        operands = self._copied(operands) | _told(packing)
        if self.step is None:
            assert self.forward_variant is not None
            results = self._forward(self.problem, self.forward_variant, operands)
        else:
            # both policies run the same forward but for what it keeps, and so give the same bits
            step = self.step if keep else replace(self.step, residuals="rematerialize")
            results = self._forward(of_first(self.problem, step), step.first, operands)
        kept = {name: x for name, x in results.items() if name in _KEPT and x is not None}
        output = results["output"]
        assert output is not None
        return Computed(output, results["final_state"], kept)

    def _forward(self, problem: Problem, variant: Variant, operands: Operands) -> Operands:
        from kdagen.generate import generate, load

        module = load(generate(problem, variant, get_chip(self.chip)))

        def run(operands: Operands) -> Operands:
            results = module.forward(**operands, **self._constants())
            return {_FIELDS.get(name, name): x for name, x in results._asdict().items()}

        return over_rows(run, self._rows())(varying_alike(operands))

    def backward(
        self,
        operands: Operands,
        packing: Packing | None,
        kept: Kept,
        cotangents: Cotangents,
        wanted: tuple[str, ...],
    ) -> dict[str, jax.Array]:
        if self.step is None:
            chunked = Chunked(self.options)
            return chunked.backward(operands, packing, kept, cotangents, wanted)
        from kdagen.generate import load
        from kdagen.gradient import source

        problem = keeping(self.problem)
        copied = self._copied(operands) | _told(packing)
        if not kept:
            found = self._forward(problem, self.step.forward, copied)
            kept = {name: x for name, x in found.items() if name in _KEPT and x is not None}
        request = Request.of(
            wanted,
            output_cotangent=cotangents.output is not None,
            state_cotangent=cotangents.final_state is not None,
        )
        chip = get_chip(self.chip)
        module = load(source.generate(problem, request, self.step.backward, chip))
        taken = [*PER_TOKEN, "a_log", "delta_time_bias", *_told(packing)]
        given = {name: copied[name] for name in taken}
        given["initial_state"] = None if packing is None else copied["initial_state"]
        given |= {argument: kept.get(name) for name, argument in _KEPT.items()}
        given |= {"d_output": cotangents.output, "d_final": cotangents.final_state}

        def run(arguments: Operands) -> Operands:
            return module.backward(**arguments, **self._constants())

        found = over_rows(run, self._rows())(varying_alike(given))
        return self._summed(found, _given(operands, "query"))

    def _copies(self, query: jax.Array) -> tuple[int, int]:
        """How many value heads are given a copy of a query and key head, and the axis of heads."""
        axis = 0 if self.options.layout == "HBTD" else 2
        return self.problem.heads // query.shape[axis], axis

    def _copied(self, operands: Operands) -> Operands:
        """With queries and keys of as many heads as the problem has."""
        copies, axis = self._copies(_given(operands, "query"))
        if copies == 1:
            return operands
        return operands | {
            name: jnp.repeat(_given(operands, name), copies, axis) for name in ("query", "key")
        }

    def _summed(self, gradients: dict[str, jax.Array], query: jax.Array) -> dict[str, jax.Array]:
        """With those of queries and keys summed over the value heads that share them."""
        copies, axis = self._copies(query)
        if copies == 1:
            return gradients

        def summed(x: jax.Array) -> jax.Array:
            parted = x.reshape(*x.shape[:axis], -1, copies, *x.shape[axis + 1 :])
            return parted.sum(axis + 1, dtype=jnp.float32).astype(x.dtype)

        shared = gradients.keys() & {"query", "key"}
        return gradients | {name: summed(gradients[name]) for name in shared}

    def _constants(self) -> dict[str, Any]:
        return {
            "scale": self.options.scale,
            "lower_bound": self.options.lower_bound,
            "interpret": self.interpret,
        }

    def _rows(self) -> dict[str, int]:
        """The axis of the batch rows in every array that has them."""
        per_token = (*PER_TOKEN, "output", "corrected", "d_output")
        of_row = (
            "initial_state", "final_state", "chunk_states", "states", "inverse", "d_final",
            "spans", "boundaries",
        )  # fmt: skip
        axis = 1 if self.options.layout == "HBTD" else 0
        return {**dict.fromkeys(per_token, axis), **dict.fromkeys(of_row, 0)}


# What a forward keeps, by its name for `checkpoint_name`, and what the backward calls it.
_KEPT = {"chunk_states": "states", "inverse": "inverse", "corrected": "corrected"}
_FIELDS = {argument: name for name, argument in _KEPT.items()}


def _told(packing: Packing | None) -> Operands:
    """What the kernels are told of segments."""
    if packing is None:
        return {"spans": None, "boundaries": None}
    return {"spans": packing.spans, "boundaries": packing.boundaries}


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
        segments=None if call.packing is None else 1,
    )


# What jax.default_matmul_precision may be set to that asks for products above bfloat16.
_ABOVE_BFLOAT16 = {
    **dict.fromkeys(("high", "tensorfloat32", "BF16_BF16_F32_X3", "TF32_TF32_F32"), "high"),
    **dict.fromkeys(
        ("highest", "float32", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "F32_F32_F32"), "highest"
    ),
}


def _precision(dtype: str) -> str:
    """`Problem.precision` of a call made now; float32 has the highest anyway and needs no key."""
    asked = jax.config.values["jax_default_matmul_precision"]
    return _ABOVE_BFLOAT16.get(asked, "default") if dtype == "bfloat16" else "default"


def _given(operands: dict[str, Any], name: str) -> jax.Array:
    return operands[name]


# The interpreter has no VMEM to run out of.
_INTERPRETED = replace(get_chip("v6e"), default_vmem_limit_bytes=1 << 40, usable_vmem_bytes=1 << 40)


def interpreted_kernel(call: Call) -> Fused:
    """Kernels for the interpreter, which are of no chip.

    They have as few chunk-heads in flight as can be: the interpreter compiles the whole unrolled
    program for the host, and nothing is gained by a larger one.

    Raises:
      NoKernelError: there is none.
    """
    problem = problem_of(call)
    variant = _default(problem, _INTERPRETED)
    small = replace(variant, heads=1, rows=1, chunks=LANES // variant.chunk, ends=0)
    variant = small if check(small, problem, _INTERPRETED) is None else variant
    chip = _INTERPRETED.name
    return Fused(problem, call.options, chip, True, variant, required=_required(call))


def portable_kernel(call: Call) -> Fused:
    """Kernels that are legal on every chip, for a trace that does not know its own.

    Raises:
      NoKernelError: there is none.
    """
    problem = problem_of(call)
    choice, chip = portable_choice(problem)
    variant = choice.variant
    assert isinstance(variant, Variant)
    return Fused(
        problem, call.options, chip.name, False, variant, portable=True, required=_required(call)
    )


def kernel_for(call: Call, target: Target) -> Fused:
    """The kernel that serves a call on a target: on a TPU, compiled; elsewhere, interpreted.

    Raises:
      NoKernelError: no variant is legal for the call, or the chip is not one of those known.
    """
    if not target.is_tpu:
        return interpreted_kernel(call)
    problem, chip = problem_of(call), _chip_of(target)
    _default(problem, chip)  # raises where there is none
    return Fused(problem, call.options, chip.name, required=_required(call))


def _default(problem: Problem, chip: Chip) -> Variant:
    try:
        return default_variant(problem, chip)
    except VariantError as error:
        raise NoKernelError(str(error)) from error


def _required(call: Call) -> bool:
    return call.implementations == ("pallas",)


def _chip_of(target: Target) -> Chip:
    for chip in CHIPS.values():
        if target.device_kind in chip.device_kinds:
            return chip
    kinds = ", ".join(kind for chip in CHIPS.values() for kind in chip.device_kinds)
    raise NoKernelError(f"{target.description}; kernels are generated for {kinds}")
