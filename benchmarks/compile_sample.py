"""Random variants of random problems, compiled for every chip: what check passes, compiles.

    python benchmarks/compile_sample.py [--points 40] [--seed 0] [--chips v4,v6e] [--jobs 2]

draws points over the whole space, compiles each ahead of time on the chips where ``check`` passes
it, and prints a line a point and chip: the constraint that refused it, or the VMEM and the loop of
the compiled kernel beside what was estimated. The default variants of the shapes of
examples/shapes.yaml come first. The status is 1 if the compiler refuses a point that ``check``
passed, or gives a kernel more VMEM than was estimated.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdagen.chips import CHIPS, Chip, get_chip
from kdagen.compiler import aot
from kdagen.measure.pool import Outcome, Pool
from kdagen.problem import LAYOUTS, PRECISIONS, Problem, load_shapes
from kdagen.space import default_variant, space
from kdagen.variant import SUB_BLOCKS, Variant, VariantError, check, loop_bundles, vmem_bytes

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
TIMEOUT_SECONDS = 900.0
WIDTHS = (48, 60, 64, 100, 127, 128, 128, 128, 129, 192, 256, 256)
HEADS = (1, 2, 3, 4, 8, 16, 32, 96)


@dataclass(frozen=True)
class Point:
    """A variant of a problem; None is the default of the chip."""

    name: str
    problem: Problem
    variant: Variant | None

    def on(self, chip: Chip) -> Variant:
        """The variant that is compiled for a chip.

        Raises:
          VariantError: no variant serves the problem there.
        """
        return self.variant or default_variant(self.problem, chip)


@dataclass(frozen=True)
class Job:
    """A variant that ``check`` passed, to be compiled for a chip."""

    point: Point
    chip: Chip
    variant: Variant


@dataclass(frozen=True)
class Line:
    """What became of a point on a chip, and whether that refutes ``check``."""

    text: str
    refuted: bool


def sample(count: int, seed: int) -> list[Point]:
    """Random points, each legal on one chip at least: most others break a constraint on all."""
    rng = random.Random(seed)
    points: list[Point] = []
    while len(points) < count:
        problem, variant = draw(rng)
        if any(check(variant, problem, chip) is None for chip in CHIPS.values()):
            points.append(Point(f"{len(points):02}", problem, variant))
    return points


def draw(rng: random.Random) -> tuple[Problem, Variant]:
    """A problem and a point of its space, of whatever legality."""
    heads, dtype = rng.choice(HEADS), rng.choice(("bfloat16", "float32"))
    gate = rng.choice(("log_decay", "softplus", "bounded"))
    problem = Problem(
        tokens=rng.choice((1, 100, 1000, 4096, 8192)),
        heads=heads,
        batch=rng.choice((1, 2, 3, 4)),
        value_heads=heads * rng.choice((1, 1, 2, 4)),
        key_dim=rng.choice(WIDTHS),
        value_dim=rng.choice(WIDTHS),
        dtype=dtype,
        gate=gate,
        lower_bound=-5.0 if gate == "bounded" else None,
        gate_dtype=rng.choice((dtype, "float32")),
        beta_dtype=rng.choice((dtype, "float32")),
        qk_l2norm=rng.random() < 0.5,
        initial_state=rng.random() < 0.5,
        final_state=rng.random() < 0.5,
        layout=rng.choice(LAYOUTS),
        residuals=rng.choice((None, "save")),
        precision=rng.choice(PRECISIONS),
    )
    values = space(problem, rng.choice(tuple(CHIPS.values())))
    # what a search does not try where something faster is right may still be asked for
    if rng.random() < 0.5:
        decay = rng.choice([d for d in SUB_BLOCKS if d != "bounded" or gate == "bounded"])
        values |= {"decay": (decay,), "sub_block": SUB_BLOCKS[decay]}
        values["inverse_dtype"] = tuple({*values["inverse_dtype"], "float32"})
        values["order"] = ("rir", "irr", "mix")
    return problem, Variant(**{name: rng.choice(sorted(of)) for name, of in values.items()})


def defaults() -> list[Point]:
    """The default variants of the shapes that are shipped as examples."""
    shapes = load_shapes(ROOT / "examples" / "shapes.yaml")
    return [Point(name, problem, None) for name, problem in shapes.items() if not problem.trained]


def described(point: Point, variant: Variant) -> str:
    p = point.problem
    exact = "f32" if p.dtype == "float32" else "bf16"
    facts = [exact, f"{p.heads}/{p.value_heads} heads", f"K={p.key_dim} V={p.value_dim}", p.layout]
    facts += [variant.decay, f"{variant.rows}x{variant.heads}x{variant.chunks} of {variant.chunk}"]
    facts += ["wide inverse"] * (variant.inverse_dtype == "float32" and exact == "bf16")
    facts += [f"states {variant.states}"] * (variant.states != "none")
    facts += [f"limit {variant.vmem_limit_mib}"] * (variant.vmem_limit_mib > 0)
    return ", ".join(facts)


def compiled(points: list[Point], chips: list[Chip], jobs: int) -> Iterator[Line]:
    """Every point on every chip, as they end."""
    todo = [(point, chip) for point in points for chip in chips]
    with Pool(jobs, aot.worker_environment) as pool:
        while todo or pool.busy:
            while todo and pool.idle:
                point, chip = todo.pop(0)
                try:
                    variant = point.on(chip)
                    refused = check(variant, point.problem, chip)
                except VariantError as error:
                    yield Line(f"{point.name:17} {chip.name:4} refused: {error}", False)
                    continue
                if refused is not None:
                    what = described(point, variant)
                    yield Line(f"{point.name:17} {chip.name:4} refused: {refused} | {what}", False)
                    continue
                request = {
                    "task": "offline",
                    "chip": chip.name,
                    "problem": point.problem.to_dict(),
                    "variant": variant.to_dict(),
                }
                pool.submit(Job(point, chip, variant), request, TIMEOUT_SECONDS)
            yield from (line(outcome) for outcome in pool.wait(1.0))


def line(outcome: Outcome) -> Line:
    """What the compiler made of a point that ``check`` passed."""
    job = outcome.job
    assert isinstance(job, Job)
    point, chip, variant = job.point, job.chip, job.variant
    what = f"{outcome.seconds:4.0f} s | {described(point, variant)}"
    head = f"{point.name:17} {chip.name:4}"
    if outcome.value is None:
        again = dataclasses.replace(point, variant=variant)
        return Line(f"{head} REFUSED by the compiler: {outcome.reason} | {again}", True)
    found: dict[str, Any] = outcome.value
    used, estimated = found["vmem_used_bytes"], vmem_bytes(variant, point.problem, chip)
    over = used > estimated
    limit = found["vmem_limit_bytes"]
    vmem = f"{used / MIB:6.2f} / {estimated / MIB:6.2f} / {limit / MIB:5.1f} MiB"
    loop = f"{found['loop_bundles']:5} / {loop_bundles(variant, point.problem, chip):5} bundles"
    moved = (found["dma_in_bytes"] + found["dma_out_bytes"]) / found["floor_bytes"]
    return Line(
        f"{head} VMEM {vmem}{' OVER' if over else ''}, {loop}, HBM x{moved:.2f}, {what}", over
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--points", type=int, default=40, help="random points (40)")
    parser.add_argument("--seed", type=int, default=0, help="that they are drawn with (0)")
    parser.add_argument("--chips", default=",".join(CHIPS), help="comma-separated (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    options = parser.parse_args()
    chips = [get_chip(name) for name in options.chips.split(",")]
    points = [*defaults(), *sample(options.points, options.seed)]
    print(
        f"{len(points)} points on {len(chips)} chips, libtpu {aot.libtpu_version()}; VMEM used / "
        "estimated / limit, bundles of the loop / estimated, HBM traffic over the least",
        flush=True,
    )
    lines = []
    for one in compiled(points, chips, options.jobs):
        lines.append(one)
        print(one.text, flush=True)
    wrong = [one for one in lines if one.refuted]
    passed = sum("refused:" not in one.text for one in lines)
    print(f"{passed} compiled, {len(lines) - passed} refused by check, {len(wrong)} refute it")
    for one in wrong:
        print(one.text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
