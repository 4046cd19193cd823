"""A long packed sequence, and a process that compiles its kernels.

Run as a program it writes, as JSON to the path it is given, what the compiler says of the forward
and the backward kernel.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdagen.chips import get_chip
from kdagen.compiler.aot import CompileError
from kdagen.compiler.schedule import Schedule
from kdagen.gradient import variant as gradient
from kdagen.gradient.variant import BackwardVariant
from kdagen.measure import offline
from kdagen.problem import Problem
from kdagen.variant import Variant, check, vmem_bytes
from tests.kernels.backward_points import compiled as compiled_backward

CHIP = get_chip("v7x")
PACKED = Problem(
    tokens=1048576, heads=2, gate="bounded", lower_bound=-5.0, qk_l2norm=True, segments=4096
)  # fmt: skip


def _found(kernel: Schedule, estimate: int) -> dict[str, int]:
    return {
        "vmem_bytes": kernel.vmem_bytes,
        "estimated_bytes": estimate,
        "vmem_limit_bytes": kernel.vmem_limit_bytes,
    }


def forward(problem: Problem) -> dict[str, int]:
    variant = Variant(heads=2)
    assert check(variant, problem, CHIP) is None
    (kernel,) = (s for s in offline.compiled(problem, variant, CHIP) if s.is_kernel)
    return _found(kernel, vmem_bytes(variant, problem, CHIP))


def backward(problem: Problem) -> dict[str, int]:
    variant = BackwardVariant(heads=2, sub_block=16)
    assert gradient.check(variant, problem, CHIP) is None
    kernel = compiled_backward(problem, variant, CHIP)
    return _found(kernel, gradient.vmem_bytes(variant, problem, CHIP))


def outcome(run: Callable[[Problem], dict[str, int]], problem: Problem) -> dict[str, Any]:
    try:
        return run(problem)
    except CompileError as error:
        return {"refused": error.message}


KERNELS = {"forward": forward, "backward": backward}

if __name__ == "__main__":
    found = {name: outcome(run, PACKED) for name, run in KERNELS.items()}
    Path(sys.argv[1]).write_text(json.dumps(found))
