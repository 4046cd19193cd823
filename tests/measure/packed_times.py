"""A process that compiles packed kernels once, and models their time on several packings.

Run as a program it writes, as JSON to the path it is given, per kernel and packing the figures, and
what was wrong where nothing was told of the packing.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from kdagen.chips import get_chip
from kdagen.compiler import aot
from kdagen.compiler.decode import WalkError
from kdagen.compiler.schedule import Schedule, read_schedules
from kdagen.gradient.variant import BackwardVariant
from kdagen.measure import offline, operands, steps
from kdagen.problem import Problem
from kdagen.variant import Variant, check

CHIP = get_chip("v6e")
TOKENS = 1024
# All of as many segments, since the code depends on that.
PACKINGS = {
    "one": (TOKENS, 0, 0, 0, 0, 0),
    "ends of blocks": (128, 128, 256, 0, 256, 256),
    "within blocks": (100, 150, 200, 190, 184, 200),
    "within one block": (30, 30, 30, 30, 4, 900),
    "padding": (100, 150, 200, 190, 0, 0),
    "all padding": (0, 0, 0, 0, 0, 0),
}
PLAIN = Problem(
    tokens=TOKENS, heads=2, gate="bounded", lower_bound=-5.0, segments=PACKINGS["one"],
    residuals="save",
)  # fmt: skip
STATES = dataclasses.replace(PLAIN, initial_state=True, final_state=True)
FORWARD = Variant(heads=2, sub_block=16, states="bfloat16", keep_corrected=True)
BACKWARD = BackwardVariant(heads=2, sub_block=16, keep_corrected=True)


def forward(problem: Problem) -> list[Schedule]:
    assert check(FORWARD, problem, CHIP) is None
    return offline.compiled(problem, FORWARD, CHIP)


def backward(problem: Problem) -> list[Schedule]:
    function, structs = steps.backward_of(problem, BACKWARD, CHIP)
    made = aot.compile_for(CHIP, function, list(structs.values()), keep_in_hbm=True)
    assert made.dump_dir is not None
    return read_schedules(made.dump_dir, CHIP)


KERNELS = {
    "forward": (forward, PLAIN),
    "forward with states": (forward, STATES),
    "backward with states": (backward, STATES),
}


def modelled(problem: Problem, schedules: list[Schedule]) -> dict[str, Any]:
    def figures(numbers: offline.Numbers) -> dict[str, Any]:
        try:
            return offline.figures(lambda: schedules, missing=0, floor=1, numbers=numbers)
        except WalkError as error:
            return {"error": str(error)}

    found = {}
    for name, lengths in PACKINGS.items():
        packed = dataclasses.replace(problem, segments=lengths)
        found[name] = figures(operands.numbers(packed, FORWARD.block_tokens))
    return {**found, "nothing told": figures(())}


if __name__ == "__main__":
    found = {name: modelled(problem, make(problem)) for name, (make, problem) in KERNELS.items()}
    Path(sys.argv[1]).write_text(json.dumps(found))
