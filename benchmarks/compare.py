"""Side by side with tokamax: forward and training step of one shape, both read from the compiler.

    python benchmarks/compare.py [--db PATH] [--chips v7x,v6e] [--parts errors,forward,step]

runs the kernels of both, forward and gradient, in Pallas' interpreter on the same data and prints
their errors against float64. Then it compiles tokamax's KDA forward and kdagen's for v7x and v6e
with one JAX and one libtpu, reads both schedules in the same way and prints the modelled times of
the kernels and of the whole programs. The training step, the output and the gradients of all
operands for a given cotangent, follows in the same way; kdagen's is that of its public operator. So
does the step of the same tokens packed in segments, for segment ids that are an operand. Then come
kdagen's other example shapes, per token and head, against that training shape. The winner is that
of the table that --db names, else of the table that ships for the chip, and where that has none the
default variant; the operator also takes the nearest tuned one, as for any call.

An operation that equals another, of which alone the compiler lists a schedule, is given the time of
that one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peer
import peer_errors
from programs import read_program
from training_step import PACKED_SHARE, demands, kdagen_step, public_forward, step_of

SHAPE, PACKED = "train-fixed", "train-packed"
PARTS = ("errors", "forward", "step", "packed", "shapes")


def tokamax_forward(problem: Any) -> tuple[Any, list, dict[str, dict]]:
    """Tokamax's forward of the problem, its operands and its kernels' scalar operands."""
    import numpy as np
    import tokamax
    from tokamax._src.ops.kda import api

    from kdagen.measure.operands import boundaries

    heads, batch, tokens = problem.heads, problem.batch, problem.tokens
    wide = ((heads, batch, tokens, problem.key_dim), "bfloat16")
    args = [
        *[wide] * 4,
        ((heads, batch, tokens), "bfloat16"),
        ((heads,), "float32"),
        ((heads * problem.key_dim,), "float32"),
    ]

    def forward(query, key, value, gate, beta, a_log, bias, segment_ids=None):
        with tokamax.config.cross_compile(True):
            output, _ = api.kimi_delta_attention(
                *(query, key, value, gate, beta),
                a_log=a_log,
                delta_time_bias=bias,
                lower_bound=problem.lower_bound,
                use_gate_in_kernel=True,
                use_qk_l2norm=problem.qk_l2norm,
                segment_ids=segment_ids,
                max_num_segments=None if segment_ids is None else problem.slots,
                implementation="mosaic",
            )
        return output

    # The bounds of the sequences in whole chunks of 64, and the one that each chunk belongs to; in
    # the gradient they count from 1. Every segment may waste a chunk.
    edges = boundaries(problem)
    lengths = [tokens] if edges is None else np.diff(edges[0]).tolist()
    chunks = [-(-length // 64) for length in lengths]
    owner = [number for number, count in enumerate(chunks) for _ in range(count)]
    spare = 0 if edges is None else tokens // 64 + len(lengths) - len(owner)
    bounds = (64 * np.cumsum([0, *chunks])).tolist()
    scalars = {
        "chunk_kda_fwd_h_o_varlen": {0: bounds, 1: owner + [len(lengths) - 1] * spare},
        "_fused_dhu_wy_intra_cumsum_pallas_jit": {0: [x + 1 for x in owner] + [0] * spare},
    }
    return forward, args, scalars


def table_of(chip: Any, db: str | None) -> Path:
    """The table that variants are taken from, which need not exist."""
    return Path(db) if db is not None else peer.ROOT / "tuning_db" / f"{chip.name}.sqlite"


def winner(name: str, problem: Any, chip: Any, db: str | None) -> tuple[Any, str]:
    """The tuned variant of a shape, or the default one, and where it comes from."""
    from kdagen.space import default_variant
    from kdagen.store.tuned import Store
    from kdagen.variant import Variant

    path = table_of(chip, db)
    if path.is_file():
        with Store(path, read_only=True) as store:
            entries = store.entries(chip=chip.name, name=name, winners_only=True)
        if entries:
            best = max(entries, key=lambda entry: entry.environment_id)
            return Variant.from_dict(json.loads(best.result.variant)), f"winner of {path.name}"
    return default_variant(problem, chip), f"default variant: no winner for {name} in {path.name}"


def kdagen_forward(problem: Any, variant: Any, chip: Any) -> tuple[Any, list]:
    """kdagen's forward of the problem, and its operands."""
    from kdagen.generate import generate, load
    from kdagen.measure import operands

    module = load(generate(problem, variant, chip))
    names, given = zip(
        *((name, one) for name, one in operands.inputs(problem).items() if one is not None),
        strict=True,
    )
    absent = {name: None for name, one in operands.inputs(problem).items() if one is None}

    def forward(*arrays):
        keywords = dict(zip(names, arrays, strict=True))
        return module.forward(**keywords, **absent, **operands.scalars(problem)).output

    return forward, list(given)


def compare(chip_name: str, db: str | None, parts: list[str]) -> Iterator[str]:
    """The lines of one chip, as they come."""
    from kdagen.chips import get_chip
    from kdagen.problem import load_shapes

    chip = get_chip(chip_name)
    shapes = load_shapes(peer.ROOT / "examples" / "shapes.yaml")
    if "forward" in parts:
        yield from compare_forward(chip, shapes[SHAPE], db)
    if "step" in parts:
        yield from compare_step(chip, shapes[SHAPE], db)
    if "packed" in parts:
        yield from compare_packed(chip, shapes[SHAPE], shapes[PACKED], db)
    if "shapes" in parts:
        yield from side_by_side(chip, shapes, db)


def heading(what: str, chip: Any) -> str:
    error = chip.calibration.mean_error if chip.calibration else None
    known = f"mean error of the model {error:.0%}" if error else "model not calibrated"
    return f"{SHAPE} {what} on {chip.name}, modelled (source: compiler, {known})"


def compare_forward(chip: Any, problem: Any, db: str | None) -> list[str]:
    """The forward of both."""
    from kdagen.compiler.model import hbm_floor_seconds
    from kdagen.measure.operands import floor_bytes

    theirs = read_program(chip, *tokamax_forward(problem))
    variant, origin = winner(SHAPE, problem, chip, db)
    ours = read_program(chip, *kdagen_forward(problem, variant, chip), {})
    moved = floor_bytes(problem)
    return [
        heading("forward", chip),
        f"  {origin}: {variant.to_json()}",
        *theirs.lines("tokamax"),
        *ours.lines("kdagen"),
        f"  ratio    kernels {theirs.kernel_seconds / ours.kernel_seconds:.2f}, "
        f"whole programs {theirs.seconds / ours.seconds:.2f}",
        f"  floor    {hbm_floor_seconds(chip, moved) * 1e6:8.1f} us to move each operand and the "
        f"result once, {moved / 1e6:.1f} MB",
    ]


def compare_step(chip: Any, problem: Any, db: str | None) -> list[str]:
    """The training step of both."""
    forward, args, scalars = tokamax_forward(problem)
    theirs = read_program(chip, *step_of(forward, args), scalars)
    table = table_of(chip, db)
    ours, step, origin = kdagen_step(problem, chip, args, table if table.is_file() else None)
    return [
        heading("training step", chip),
        f"  {origin}",
        f"  {step.to_json()}",
        *theirs.lines("tokamax"),
        *ours.lines("kdagen"),
        *demands(ours, theirs),
    ]


def compare_packed(chip: Any, fixed: Any, packed: Any, db: str | None) -> list[str]:
    """The training step of packed tokens, of both and against that of a fixed length."""
    forward, args, scalars = tokamax_forward(packed)
    held = [((packed.batch, packed.tokens), "int32")]
    theirs = read_program(chip, *step_of(forward, args, held), scalars)
    path = table_of(chip, db)
    table = path if path.is_file() else None
    ours, step, origin = kdagen_step(packed, chip, args, table, held)
    plain, *_ = kdagen_step(fixed, chip, args, table)
    return [
        f"{PACKED} ({packed.slots} segments) " + heading("training step", chip).split(" ", 1)[1],
        f"  {origin}",
        f"  {step.to_json()}",
        *theirs.lines("tokamax"),
        *ours.lines("kdagen"),
        *demands(ours, theirs, time_share=PACKED_SHARE, temporary_share=None),
        f"  of {SHAPE}'s   kernels {ours.kernel_seconds / plain.kernel_seconds:.3f}, whole step "
        f"{ours.seconds / plain.seconds:.3f}, temporaries "
        f"{ours.temporary_bytes / plain.temporary_bytes:.3f}; asked: at most 1.15, 1.15 and 1.1",
    ]


def side_by_side(chip: Any, shapes: dict[str, Any], db: str | None) -> list[str]:
    """kdagen's kernels of all shapes per token and head, as a table of tuned times has them."""
    from kdagen.measure import offline

    found = {}
    for name, problem in shapes.items():
        if problem.trained:
            continue
        variant, origin = winner(name, problem, chip, db)
        row = offline.run(chip.name, problem.to_dict(), variant.to_dict())
        each = row["seconds"] / (problem.tokens * problem.batch * problem.value_heads)
        traffic = (row["dma_in_bytes"] + row["dma_out_bytes"]) / row["floor_bytes"]
        found[name] = row["seconds"], each, traffic, origin
    reference = found[SHAPE][1]
    return [f"  the example shapes on {chip.name}, modelled likewise"] + [
        f"    {name:18} {seconds * 1e6:8.1f} us, {each * 1e9:6.3f} ns a token and head, "
        f"{each / reference:4.2f} times {SHAPE}; HBM traffic {traffic:4.2f} times the floor "
        f"({origin})"
        for name, (seconds, each, traffic, origin) in found.items()
    ]


def main() -> int:
    parser = peer.parser(__doc__ or "")
    parser.add_argument("--db", metavar="PATH", help="a tuned table to take the winners from")
    parser.add_argument("--chips", default="v7x,v6e", help="comma-separated; v7x,v6e if not given")
    parser.add_argument(
        "--parts", default=",".join(PARTS), help=f"comma-separated; {','.join(PARTS)} if not given"
    )
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--parts: got {','.join(unknown)}, expected some of {','.join(PARTS)}")
    if options.dump is None:
        if options.db is not None and not Path(options.db).is_file():
            print(f"--db: got {options.db}, expected an existing file", file=sys.stderr)
            return 2
        return peer.run(str(Path(__file__).resolve()), options, sys.argv[1:])
    from importlib.metadata import version

    import jax

    from kdagen.compiler.aot import libtpu_version
    from kdagen.problem import load_shapes

    peer.quiet()
    print(f"tokamax {version('tokamax')}, JAX {jax.__version__}, libtpu {libtpu_version()}")
    if "errors" in parts:
        problem = load_shapes(peer.ROOT / "examples" / "shapes.yaml")[SHAPE]
        forward, *_ = tokamax_forward(problem)
        for line in peer_errors.errors(problem, forward, public_forward(problem)):
            print(line, flush=True)
    for chip_name in options.chips.split(","):
        for line in compare(chip_name, options.db, parts):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
