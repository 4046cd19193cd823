"""Points across the space, and a process that compiles them for every chip.

Run as a program it writes, as JSON to the path it is given, what ``outcome`` found of every point
on every chip, and what ``of_length`` found on one.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from kdagen.chips import CHIPS, Chip, get_chip
from kdagen.compiler.aot import CompileError
from kdagen.compiler.schedule import read_schedule
from kdagen.measure import offline, operands
from kdagen.problem import Problem
from kdagen.space import default_variant
from kdagen.variant import Variant, check, vmem_bytes
from tests.runtime.compile_projected import moves

PLAIN = Problem(tokens=8192, heads=2)
SOFTPLUS = dataclasses.replace(PLAIN, gate="softplus", qk_l2norm=True)
BOUNDED = dataclasses.replace(SOFTPLUS, gate="bounded", lower_bound=-5.0)
STATES = {"initial_state": True, "final_state": True}
ALL_KEPT = {"keep_inverse": True, "keep_corrected": True, "keep_gate": True}
UNBOUNDED = {"decay": "unbounded", "sub_block": 8}
TREE = {"decay": "tree", "sub_block": 1}
WIDE = {"inverse_dtype": "float32", "inverse_block": 4}
F32 = {"dtype": "float32", "gate_dtype": "float32", "beta_dtype": "float32"}
GROUPED = {"heads": 2, "value_heads": 4}


def heads(number: int) -> dict[str, int]:
    return {"heads": number, "value_heads": number}


# What a point changes of a problem, and its variant, of one pack or two: a compile takes seconds a
# pack. A problem has four blocks, and a rest of ``rest`` tokens. None is the default variant.
POINTS: dict[str, tuple[Problem, dict[str, Any], dict[str, Any] | None, int]] = {
    "one head": (PLAIN, {**heads(1), **STATES}, {"heads": 1, "chunks": 2, **UNBOUNDED}, 7),
    "three heads, a tree": (
        SOFTPLUS, {**heads(3), "beta_dtype": "float32"},
        {"heads": 3, "chunk": 128, "lag": 1, **TREE, **WIDE}, 100,
    ),
    "float32, a tree": (
        PLAIN, {**F32, "layout": "BTHD"},
        {"chunk": 32, "heads": 2, "chunks": 2, **TREE, **WIDE}, 16,
    ),
    "float32, bounded": (
        BOUNDED, {**F32, **STATES},
        {"heads": 2, "sub_block": 16, **WIDE}, 0,
    ),
    "wide keys, narrow values": (
        SOFTPLUS, {"key_dim": 256, "value_dim": 48, "gate_dtype": "float32"},
        {"heads": 2, "inverse_block": 2, **UNBOUNDED}, 65,
    ),
    "odd widths": (
        BOUNDED, {"key_dim": 100, "value_dim": 129, "layout": "BTHD", "final_state": True},
        {"chunk": 32, "heads": 2, "chunks": 2}, 9,
    ),
    "fewer heads than a group": (
        BOUNDED, {"heads": 1, "value_heads": 4, **STATES}, {"heads": 2, "sub_block": 16}, 0,
    ),
    "groups in rows": (
        PLAIN, {**GROUPED, "batch": 2, "layout": "BTHD", "initial_state": True},
        {"chunk": 32, "heads": 2, "rows": 2, "order": "irr", **UNBOUNDED}, 16,
    ),
    "all residuals": (
        BOUNDED, {"residuals": "save", "layout": "BTHD"},
        {"heads": 2, "states": "float32", **ALL_KEPT}, 0,
    ),
    "all residuals in float32": (
        SOFTPLUS, {**F32, **heads(1), "residuals": "save"},
        {"chunk": 128, "heads": 1, "states": "bfloat16", **ALL_KEPT, **TREE, **WIDE}, 0,
    ),
    "parallel keys": (
        BOUNDED, {"precision": "high"},
        {"heads": 2, "weight_depth": 128, **WIDE, **UNBOUNDED}, 0,
    ),
    "products of float32": (
        BOUNDED, {"precision": "highest", "residuals": "save"},
        {"heads": 2, "sub_block": 16, "states": "float32", "keep_inverse": True, **WIDE}, 0,
    ),
    "a raised limit": (
        BOUNDED, {"initial_state": True},
        {"chunk": 32, "heads": 2, "chunks": 2, "order": "mix", "vmem_limit_mib": 64}, 0,
    ),
    "every end on its own, heads of some": (
        BOUNDED, {**heads(16), "final_state": True},
        {"heads": 8, "chunk": 32, "chunks": 4, "ends": 2}, 16,
    ),
    "the default of a short call": (SOFTPLUS, {**GROUPED, "tokens": 60, **STATES}, None, 0),
}  # fmt: skip

LENGTH_CHIP, LENGTHS = "v7x", (2048, 131072)
LONG = (BOUNDED, Variant(heads=2))


def point(name: str, chip: Chip) -> tuple[Problem, Variant]:
    base, facts, parameters, rest = POINTS[name]
    problem = dataclasses.replace(base, **{"value_heads": 0, **facts})
    if parameters is None:
        return problem, default_variant(problem, chip)
    variant = Variant(**parameters)
    return dataclasses.replace(problem, tokens=4 * variant.block_tokens + rest), variant


def outcome(problem: Problem, variant: Variant, chip: Chip) -> dict[str, Any]:
    """The constraint that ``check`` names, or what the compiler said when it refused, or the VMEM
    of the kernel and the bytes that it moves, beside what was estimated and what must be moved, and
    the operations around it that move as much as a query."""
    violation = check(variant, problem, chip)
    if violation is not None:
        return {"violation": violation.constraint}
    try:
        program = offline.program(problem, variant, chip)
    except CompileError as error:
        return {"refused": error.message}
    assert program.dump_dir is not None
    kernel = read_schedule(program.dump_dir, chip)
    report = kernel.report()
    streams = problem.batch * problem.heads
    query = streams * problem.tokens * problem.key_dim
    # in HBM a row of another width has padding, and so has a sequence shorter than a block
    dense = problem.key_dim % 128 == problem.value_dim % 128 == 0
    dense &= problem.tokens >= variant.block_tokens
    return {
        "vmem_bytes": kernel.vmem_bytes,
        "vmem_limit_bytes": kernel.vmem_limit_bytes,
        "estimated_bytes": vmem_bytes(variant, problem, chip),
        "moved_bytes": report.bytes_in + report.bytes_out,
        "floor_bytes": operands.floor_bytes(problem) + operands.residual_bytes(problem, variant),
        "moves": moves(program.text, query),
        "dense": dense,
    }


def of_length(tokens: int) -> dict[str, int]:
    """Sizes of the kernel of ``LONG`` for so many tokens."""
    problem, variant = LONG
    problem, chip = dataclasses.replace(problem, tokens=tokens), get_chip(LENGTH_CHIP)
    assert check(variant, problem, chip) is None
    (kernel,) = (s for s in offline.compiled(problem, variant, chip) if s.is_kernel)
    return {"vmem_bytes": kernel.vmem_bytes, "bundles": len(kernel.listing.bundles)}


if __name__ == "__main__":
    found = {
        "points": {
            chip.name: {name: outcome(*point(name, chip), chip) for name in POINTS}
            for chip in CHIPS.values()
        },
        "lengths": [of_length(tokens) for tokens in LENGTHS],
    }
    Path(sys.argv[1]).write_text(json.dumps(found))
