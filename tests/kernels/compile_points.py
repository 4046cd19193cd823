"""Points across the space, and a process that compiles them for every chip.

Run as a program it writes, as JSON to the path it is given, per chip and point: the constraint that
``check`` names, or the VMEM the compiler used, or what the compiler said when it refused.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from kdagen.chips import CHIPS, Chip
from kdagen.compiler.aot import CompileError
from kdagen.measure import offline
from kdagen.problem import Problem
from kdagen.variant import Variant, check, default_variant, vmem_bytes

LOG_DECAY = Problem(tokens=1, heads=4)
SOFTPLUS = dataclasses.replace(LOG_DECAY, gate="softplus", qk_l2norm=True)
BOUNDED = dataclasses.replace(SOFTPLUS, gate="bounded", lower_bound=-5.0)
STATES = {"initial_state": True, "final_state": True}
UNBOUNDED = {"decay": "unbounded", "sub_block": 8}
RECURSIVE = {"inverse_block": 2}

# What a point changes of a problem, and its variant. A problem has three blocks, and a rest of
# ``rest`` tokens. None is the chip's default variant.
POINTS: dict[str, tuple[Problem, dict[str, Any], dict[str, Any] | None, int]] = {
    "one head": (LOG_DECAY, {"heads": 1}, {"heads": 1, "chunks": 2, **UNBOUNDED}, 0),
    "one head, ragged": (BOUNDED, {"heads": 1, **STATES}, {"heads": 1, "chunks": 2}, 7),
    "three heads": (SOFTPLUS, {"heads": 3, **STATES}, {"heads": 3, "chunks": 2, **UNBOUNDED}, 65),
    "rows": (BOUNDED, {"batch": 2, "final_state": True}, {"heads": 2, "sub_block": 16}, 0),
    "rows, ragged": (LOG_DECAY, {"batch": 2, **STATES}, {"heads": 2, "lag": 1, **UNBOUNDED}, 1),
    "short chunks": (BOUNDED, {"gate_dtype": "float32"}, {"chunk": 32, "heads": 4, **RECURSIVE}, 0),
    "short unbounded chunks": (
        SOFTPLUS, {"beta_dtype": "float32"}, {"chunk": 32, "heads": 4, **UNBOUNDED}, 9,
    ),
    "long chunks": (BOUNDED, {}, {"chunk": 128, "heads": 1, "weight_depth": 128}, 0),
    "long unbounded chunks": (
        LOG_DECAY, {"gate_dtype": "float32"},
        {"chunk": 128, "heads": 1, **UNBOUNDED, **RECURSIVE}, 100,
    ),
    "a raised limit": (
        BOUNDED, {"initial_state": True}, {"heads": 4, "order": "mix", "vmem_limit_mib": 64}, 0,
    ),
    "bounded gate, unbounded factors": (
        BOUNDED, {}, {"heads": 4, "order": "irr", "inverse_block": 4, **UNBOUNDED}, 0,
    ),
    "the default of many heads": (
        SOFTPLUS, {"heads": 32, "gate_dtype": "float32", **STATES}, None, 0,
    ),
}  # fmt: skip


def point(name: str, chip: Chip) -> tuple[Problem, Variant]:
    base, facts, parameters, rest = POINTS[name]
    heads = facts.get("heads", base.heads)
    problem = dataclasses.replace(base, **{"tokens": 8192, "value_heads": heads, **facts})
    variant = default_variant(problem, chip) if parameters is None else Variant(**parameters)
    return dataclasses.replace(problem, tokens=3 * variant.block_tokens + rest), variant


def outcome(problem: Problem, variant: Variant, chip: Chip) -> dict[str, Any]:
    violation = check(variant, problem, chip)
    if violation is not None:
        return {"violation": violation.constraint}
    try:
        schedules = offline.compiled(problem, variant, chip)
    except CompileError as error:
        return {"refused": error.message}
    (kernel,) = (schedule for schedule in schedules if schedule.is_kernel)
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
