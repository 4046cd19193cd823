"""Packed sequences, and a process that compiles their kernels.

Run as a program it writes, as JSON to the path it is given, what the compiler says of the forward
and the backward kernel of each, and where it puts what a small step reads beside them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from kdagen.chips import Chip, get_chip
from kdagen.compiler import aot
from kdagen.compiler.aot import CompileError
from kdagen.compiler.schedule import Schedule
from kdagen.gradient import variant as gradient
from kdagen.gradient.variant import BackwardVariant
from kdagen.measure import offline
from kdagen.problem import Problem
from kdagen.runtime.kda import kimi_delta_attention
from kdagen.variant import Variant, check, vmem_bytes
from tests.kernels.backward_points import compiled as compiled_backward

LONG = Problem(
    tokens=1048576, heads=2, gate="bounded", lower_bound=-5.0, qk_l2norm=True, segments=4096
)  # fmt: skip
STATES = dataclasses.replace(
    LONG, tokens=8192, segments=25, initial_state=True, final_state=True, residuals="save"
)
EXACT = {"dtype": "float32", "gate_dtype": "float32", "beta_dtype": "float32"}
WIDE = {"inverse_block": 4, "inverse_dtype": "float32"}

# Chip and problem, and what the variants of both kernels, and that of the backward, are beside two
# heads and 16 rows a sub-block.
POINTS: dict[str, tuple[str, Problem, dict[str, Any], dict[str, Any]]] = {
    "a million tokens": ("v7x", LONG, {}, {}),
    "states": ("v7x", STATES, {}, {"keep_corrected": True}),
    "states, in 16 MiB": ("v5e", STATES, {}, {"keep_corrected": True}),
    "wide states, in 16 MiB": (
        "v5e", dataclasses.replace(STATES, key_dim=129, value_dim=60, layout="BTHD"),
        {}, {"keep_corrected": True},
    ),
    "final states in float32": (
        "v7x", dataclasses.replace(STATES, initial_state=False, **EXACT), WIDE, {},
    ),
}  # fmt: skip


def _found(kernel: Schedule, estimate: int) -> dict[str, int]:
    return {
        "vmem_bytes": kernel.vmem_bytes,
        "estimated_bytes": estimate,
        "vmem_limit_bytes": kernel.vmem_limit_bytes,
    }


def forward(problem: Problem, chip: Chip, parameters: dict[str, Any], _: Any) -> dict[str, int]:
    states = gradient.states_dtype(problem) if problem.residuals == "save" else "none"
    variant = Variant(**{"heads": 2, "sub_block": 16, "states": states, **parameters})
    assert check(variant, problem, chip) is None
    (kernel,) = (s for s in offline.compiled(problem, variant, chip) if s.is_kernel)
    return _found(kernel, vmem_bytes(variant, problem, chip))


def backward(
    problem: Problem, chip: Chip, parameters: dict[str, Any], kept: dict[str, Any]
) -> dict[str, int]:
    variant = BackwardVariant(**{"heads": 2, "sub_block": 16, **parameters, **kept})
    assert gradient.check(variant, problem, chip) is None
    kernel = compiled_backward(problem, variant, chip)
    return _found(kernel, gradient.vmem_bytes(variant, problem, chip))


def outcome(run: Callable[..., dict[str, int]], name: str) -> dict[str, Any]:
    chip, problem, *parameters = POINTS[name]
    try:
        return run(problem, get_chip(chip), *parameters)
    except CompileError as error:
        return {"refused": error.message}


KERNELS = {"forward": forward, "backward": backward}

SHORT = (2, 1, 256, 128)


def step(query: Any, key: Any, value: Any, gate: Any, beta: Any, segment_ids: Any) -> Any:
    """A packed call and its gradient, and what reads the operands once more."""

    def attended(*tensors: Any) -> Any:
        output, _ = kimi_delta_attention(
            *tensors, segment_ids=segment_ids, max_num_segments=3, implementation="pallas"
        )
        return output

    tensors = (2 * query, 3 * key, 2 * value, gate, beta)
    output, pull = jax.vjp(attended, *tensors)
    return output, pull(output), sum(tensors[:4])


def in_vmem(chip: Chip) -> dict[str, list[bool]]:
    """By kernel of ``step``, whether all of an operand lies in VMEM, of those of ``SHORT``."""
    wide = (SHORT, "bfloat16")
    args = [wide] * 4 + [(SHORT[:3], "bfloat16"), (SHORT[1:3], "int32")]
    text = aot.compile_for(chip, step, args).text
    made = dict(re.findall(r"%(\S+) = (\S+) ", text))
    shape = "bf16[" + ",".join(map(str, SHORT)) + "]"
    found = {}
    for kernel, operands in re.findall(r"%(kda_[a-z]+)\S* = [^%]*custom-call\(([^)]*)\)", text):
        layouts = [made[name] for name in re.findall(r"%([\w.-]+)", operands)]
        found[kernel] = ["S(1)" in layout for layout in layouts if layout.startswith(shape)]
    return found


if __name__ == "__main__":
    found = {
        kernel: {name: outcome(run, name) for name in POINTS} for kernel, run in KERNELS.items()
    }
    found |= {"in_vmem": in_vmem(get_chip("v7x"))}
    Path(sys.argv[1]).write_text(json.dumps(found))
