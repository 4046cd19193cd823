"""Side by side with tokamax: the forward of one training shape, both read from the compiler.

    python benchmarks/compare.py [--db PATH] [--chips v7x,v6e]

compiles tokamax's KDA forward and kdagen's for v7x and v6e with one JAX and one libtpu, reads both
schedules in the same way and prints the modelled times of the kernels and of the whole programs.
Then kdagen's other example shapes follow, per token and head, against that training shape. The
winner is that of the table that --db names, else of the table that ships for the chip, and where
that has none the default variant.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peer

SHAPE = "train-fixed"


@dataclass(frozen=True)
class Program:
    """Modelled times of one compiled program on one device, in seconds.

    ``kernels`` by name; ``around`` is the sum of what XLA runs beside them, and ``uncounted`` names
    what it runs besides that: an operation equal to another is compiled, and so listed, once.
    """

    kernels: dict[str, float]
    around: float
    uncounted: tuple[str, ...]
    kernel_bytes: int
    temporary_bytes: int

    @property
    def kernel_seconds(self) -> float:
        return sum(self.kernels.values())

    @property
    def seconds(self) -> float:
        return self.kernel_seconds + self.around


def read_program(chip: Any, function: Any, args: Any, scalars: dict[str, dict]) -> Program:
    """Compile and read a program; ``scalars`` by kernel name as for ``predict``."""
    from kdagen.compiler.aot import compile_for
    from kdagen.compiler.model import predict
    from kdagen.compiler.schedule import read_schedules

    compiled = compile_for(chip, function, args)
    assert compiled.dump_dir is not None
    kernels: dict[str, float] = {}
    around, moved = 0.0, 0
    listed = set()
    for schedule in read_schedules(compiled.dump_dir, chip):
        listed.add(schedule.name)
        given = scalars.get(re.sub(r"\.\d+$", "", schedule.name))
        prediction = predict(schedule, scalars=given)
        if schedule.is_kernel:
            kernels[schedule.name] = prediction.seconds
            moved += prediction.hbm_bytes
        else:
            around += prediction.seconds
    return Program(
        kernels=kernels,
        around=around,
        uncounted=tuple(name for name in _fusions(compiled.text) if name not in listed),
        kernel_bytes=moved,
        temporary_bytes=compiled.temporary_bytes,
    )


def _fusions(text: str) -> list[str]:
    """Fusions of the entry computation, by name."""
    entry = text[text.index("\nENTRY ") :]
    return re.findall(r"^\s+(?:ROOT )?%(\S+) = .*? fusion\(", entry, re.MULTILINE)


def tokamax_forward(problem: Any) -> tuple[Any, list, dict[str, dict]]:
    """Tokamax's forward of the problem, its operands and its kernels' scalar operands."""
    import tokamax
    from tokamax._src.ops.kda import api

    heads, batch, tokens = problem.heads, problem.batch, problem.tokens
    wide = ((heads, batch, tokens, problem.key_dim), "bfloat16")
    args = [
        *[wide] * 4,
        ((heads, batch, tokens), "bfloat16"),
        ((heads,), "float32"),
        ((heads * problem.key_dim,), "float32"),
    ]

    def forward(query, key, value, gate, beta, a_log, bias):
        with tokamax.config.cross_compile(True):
            output, _ = api.kimi_delta_attention(
                *(query, key, value, gate, beta),
                a_log=a_log,
                delta_time_bias=bias,
                lower_bound=problem.lower_bound,
                use_gate_in_kernel=True,
                use_qk_l2norm=problem.qk_l2norm,
                implementation="mosaic",
            )
        return output

    # One sequence a batch row: its bounds, and the row each chunk of 64 belongs to.
    chunks = tokens // 64
    return forward, args, {"chunk_kda_fwd_h_o_varlen": {0: [0, tokens], 1: [0] * chunks}}


def winner(name: str, problem: Any, chip: Any, db: str | None) -> tuple[Any, str]:
    """The tuned variant of a shape, or the default one, and where it comes from."""
    from kdagen.store.tuned import Store
    from kdagen.variant import Variant, default_variant

    path = Path(db) if db is not None else peer.ROOT / "tuning_db" / f"{chip.name}.sqlite"
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


def compare(chip_name: str, db: str | None) -> list[str]:
    """The lines of one chip."""
    from kdagen.chips import get_chip
    from kdagen.compiler.model import hbm_floor_seconds
    from kdagen.measure.operands import floor_bytes
    from kdagen.problem import load_shapes

    chip = get_chip(chip_name)
    shapes = load_shapes(peer.ROOT / "examples" / "shapes.yaml")
    problem = shapes[SHAPE]
    function, args, scalars = tokamax_forward(problem)
    theirs = read_program(chip, function, args, scalars)
    variant, origin = winner(SHAPE, problem, chip, db)
    function, args = kdagen_forward(problem, variant, chip)
    ours = read_program(chip, function, args, {})
    moved = floor_bytes(problem)
    error = chip.calibration.mean_error if chip.calibration else None
    known = f"mean error of the model {error:.0%}" if error else "model not calibrated"
    lines = [
        f"{SHAPE} forward on {chip.name}, modelled (source: compiler, {known})",
        f"  {origin}: {variant.to_json()}",
    ]
    for who, program in (("tokamax", theirs), ("kdagen", ours)):
        lines.append(
            f"  {who:8} kernels {program.kernel_seconds * 1e6:8.1f} us, {len(program.kernels)} "
            f"of them, {program.kernel_bytes / 1e6:7.1f} MB of HBM traffic; XLA around them "
            f"{program.around * 1e6:6.1f} us; together {program.seconds * 1e6:8.1f} us; "
            f"{program.temporary_bytes / 1e6:.1f} MB of temporaries"
        )
        lines += [f"    {name}: {s * 1e6:.1f} us" for name, s in program.kernels.items()]
        if program.uncounted:
            lines.append(f"    not counted, so at least: {', '.join(program.uncounted)}")
    lines += [
        f"  ratio    kernels {theirs.kernel_seconds / ours.kernel_seconds:.2f}, "
        f"whole programs {theirs.seconds / ours.seconds:.2f}",
        f"  floor    {hbm_floor_seconds(chip, moved) * 1e6:8.1f} us to move each operand and the "
        f"result once, {moved / 1e6:.1f} MB",
    ]
    return lines + side_by_side(chip, shapes, db)


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
    options = parser.parse_args()
    if options.dump is None:
        if options.db is not None and not Path(options.db).is_file():
            print(f"--db: got {options.db}, expected an existing file", file=sys.stderr)
            return 2
        return peer.run(str(Path(__file__).resolve()), options, sys.argv[1:])
    from importlib.metadata import version

    import jax

    from kdagen.compiler.aot import libtpu_version

    peer.quiet()
    print(f"tokamax {version('tokamax')}, JAX {jax.__version__}, libtpu {libtpu_version()}")
    for chip_name in options.chips.split(","):
        print("\n".join(compare(chip_name, options.db)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
