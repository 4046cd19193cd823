"""Points across the space of backward kernels, and a process that compiles them for every chip.

Run as a program it writes, as JSON to the path it is given, per chip and point: the constraint that
``check`` names, or the VMEM the compiler used, or what the compiler said when it refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax

from kdagen.chips import CHIPS, Chip
from kdagen.compiler import aot
from kdagen.compiler.schedule import Schedule, read_schedules
from kdagen.generate import load
from kdagen.gradient.shapes import inputs
from kdagen.gradient.source import generate
from kdagen.gradient.variant import BackwardVariant, Request, check, default_variant, vmem_bytes
from kdagen.measure import operands
from kdagen.problem import Problem

LOG_DECAY = Problem(tokens=1, heads=2)
SOFTPLUS = dataclasses.replace(LOG_DECAY, gate="softplus", qk_l2norm=True)
BOUNDED = dataclasses.replace(SOFTPLUS, gate="bounded", lower_bound=-5.0)
STATES = {"initial_state": True, "final_state": True}
EXACT = {"dtype": "float32", "gate_dtype": "float32", "beta_dtype": "float32"}
EXACT_VARIANT = {"heads": 2, "sub_block": 1, "inverse_block": 2, "inverse_dtype": "float32"}
KEPT = {"keep_inverse": True, "keep_corrected": True}

# What a point changes of a problem, its variant (None is the chip's default), and the rest of
# tokens after two blocks.
POINTS: dict[str, tuple[Problem, dict[str, Any], dict[str, Any] | None, int]] = {
    "log decays": (LOG_DECAY, STATES, {"heads": 2, "sub_block": 1}, 0),
    "log decays in float32": (
        LOG_DECAY, {"gate_dtype": "float32"}, {"heads": 2, "sub_block": 1}, 7,
    ),
    "softplus, short chunks": (
        SOFTPLUS, {"heads": 4}, {"heads": 4, "chunk": 32, "sub_block": 1}, 0,
    ),
    "softplus, long chunks": (
        SOFTPLUS, {"heads": 1},
        {"heads": 1, "chunk": 128, "sub_block": 1, "inverse_block": 4, "inverse_dtype": "float32"},
        5,
    ),
    "bounded, kept": (BOUNDED, {"heads": 4}, {"heads": 4, "sub_block": 16, **KEPT}, 0),
    "bounded, long chunks, kept": (
        BOUNDED, {}, {"heads": 2, "chunk": 128, "sub_block": 16, **KEPT}, 0,
    ),
    "two chunks of one head": (
        BOUNDED, {"heads": 1, **STATES}, {"heads": 1, "chunks": 2, "inverse_block": 4}, 0,
    ),
    "two rows": (BOUNDED, {"batch": 2}, {"heads": 1, "rows": 2, "weight_depth": 128}, 1),
    "heads that share a key": (BOUNDED, {"heads": 1, "value_heads": 2}, {"heads": 2}, 0),
    "wide, the other layout": (
        BOUNDED, {"key_dim": 129, "value_dim": 256, "layout": "BTHD"},
        {"heads": 2}, 0,
    ),
    "float32": (SOFTPLUS, {**EXACT, **STATES}, EXACT_VARIANT, 0),
    "hard keys": (
        SOFTPLUS, {"precision": "high", **STATES},
        {"heads": 2, "chunk": 128, "sub_block": 1, "inverse_block": 4, "inverse_dtype": "float32"},
        0,
    ),
    "hard keys, bounded": (
        BOUNDED, {"precision": "high", **STATES},
        {"heads": 2, "chunk": 128, "inverse_block": 4, "inverse_dtype": "float32"}, 3,
    ),
    "products of float32": (
        BOUNDED, {"precision": "highest", **STATES},
        {"heads": 2, "inverse_block": 4, "inverse_dtype": "float32", "keep_inverse": True}, 0,
    ),
    "the default of many heads": (BOUNDED, {"heads": 8, **STATES}, None, 0),
}  # fmt: skip


def point(name: str, chip: Chip) -> tuple[Problem, BackwardVariant]:
    base, facts, parameters, rest = POINTS[name]
    heads = facts.get("heads", base.heads)
    problem = dataclasses.replace(base, **{"tokens": 8192, "value_heads": heads, **facts})
    variant = (
        default_variant(problem, chip) if parameters is None else BackwardVariant(**parameters)
    )
    return dataclasses.replace(problem, tokens=2 * variant.block_tokens + rest), variant


def compiled(problem: Problem, variant: BackwardVariant, chip: Chip) -> Schedule:
    """The kernel of all gradients.

    Raises:
      aot.CompileError: the compiler refused.
    """
    request = Request.everything(problem)
    given = inputs(problem, variant, request).values()
    structs = [None if x is None else jax.ShapeDtypeStruct(*x) for x in given]
    module = load(generate(problem, request, variant, chip))
    function = functools.partial(module.backward, **operands.scalars(problem))
    program = aot.compile_for(chip, function, structs, keep_in_hbm=True)
    assert program.dump_dir is not None
    (kernel,) = (s for s in read_schedules(program.dump_dir, chip) if s.is_kernel)
    return kernel


def outcome(problem: Problem, variant: BackwardVariant, chip: Chip) -> dict[str, Any]:
    violation = check(variant, problem, chip)
    if violation is not None:
        return {"violation": violation.constraint}
    try:
        kernel = compiled(problem, variant, chip)
    except aot.CompileError as error:
        return {"refused": error.message}
    return {
        "vmem_bytes": kernel.vmem_bytes,
        "vmem_limit_bytes": kernel.vmem_limit_bytes,
        "estimated_bytes": vmem_bytes(variant, problem, chip),
    }


if __name__ == "__main__":
    found = {
        chip.name: {name: outcome(*point(name, chip), chip) for name in POINTS}
        for chip in CHIPS.values()
    }
    Path(sys.argv[1]).write_text(json.dumps(found))
