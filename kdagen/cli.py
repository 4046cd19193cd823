"""The command line: parses, calls, prints. Everything it does is done elsewhere."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any, ClassVar

import click

from kdagen.chips import CHIPS, get_chip
from kdagen.errors import KdagenError
from kdagen.problem import Problem, load_shapes

_CHIP = click.Choice(list(CHIPS))
_FILE = click.Path(path_type=Path, dir_okay=False)
_EXISTING_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)


class _Group(click.Group):
    """Shows the project's own errors as one line, and Ctrl-C as its own exit status: a traceback is
    for bugs, and click takes Ctrl-C for a failure."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KdagenError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            ctx.exit(130)


class _Minutes(click.FloatRange):
    """A finite number above 0: click's own range lets NaN through."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        minutes = super().convert(value, param, ctx)
        if not math.isfinite(minutes):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return minutes


class _Size(click.ParamType):
    """A number of bytes, with a unit or without: 512MiB."""

    name = "size"
    _UNITS: ClassVar = {
        "": 1, "B": 1,
        "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9,
    }  # fmt: skip

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", str(value).strip())
        units = {name.lower(): factor for name, factor in self._UNITS.items()}
        if found is None or found[2].lower() not in units:
            takes = ", ".join(name for name in self._UNITS if name)
            self.fail(f"{value!r} is no number of bytes, or of {takes}, as 512MiB.", param, ctx)
        return int(float(found[1]) * units[found[2].lower()])


def _note(text: str) -> None:
    click.echo(text, err=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kdagen")
def main() -> None:
    """Generate, tune and inspect Kimi Delta Attention kernels for TPUs.

    No TPU is needed: the real TPU compiler builds every candidate, and its time is modelled from
    the compiler's schedule. Where a TPU of the chip is attached, candidates are timed on it.
    """


@main.command()
@click.option("--chip", type=_CHIP, required=True, help="Chip to tune for.")
@click.option("--shapes", type=_EXISTING_FILE, help="YAML file of shapes.")
@click.option("--shape", "names", multiple=True, help="Only this shape of the file; repeatable.")
@click.option("--problem", "fields", metavar="JSON", help="One shape, in place of a file.")
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    default=24,
    show_default=True,
    help="Candidates a shape, with those of earlier runs.",
)
@click.option(
    "--budget",
    type=_Minutes(),
    metavar="MINUTES",
    help="Start no candidate after this time; checks of would-be winners still end.",
)
@click.option(
    "--db",
    type=_FILE,
    help="SQLite file for the results [default: $KDAGEN_DB, or kdagen/tuned.sqlite in the user's "
    "data directory].",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=lambda: os.cpu_count() or 1,
    show_default="number of cores",
    help="Candidates at a time, each in a process.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampler.")
@click.option(
    "--residual-limit",
    type=_Size(),
    help="Most memory that a training step may keep from its forward pass to its gradient, "
    "beside the operands: 512MiB [default: no limit].",
)
def tune(
    chip: str,
    shapes: Path | None,
    names: tuple[str, ...],
    fields: str | None,
    trials: int,
    budget: float | None,
    db: Path | None,
    jobs: int,
    seed: int,
    residual_limit: int | None,
) -> None:
    """Search for the best kernel of each shape, and record every candidate.

    A shape with residuals is a training step: forward and gradient are tuned together, and the
    winner is the fastest step whose residuals fit the limit.

    Ctrl-C keeps what was done; the same command goes on from there. Exits with status 1 where a
    shape ends without a winner, and with 130 after Ctrl-C. Two names of one shape are tuned once.

    \b
    Example:
      kdagen tune --chip v7x --shapes examples/shapes.yaml
      kdagen tune --chip v6e --shapes examples/shapes.yaml --shape train-fixed --trials 60 --jobs 2
      kdagen tune --chip v6e --problem '{"tokens": 8192, "heads": 32}'
      kdagen tune --chip v7x --shapes examples/shapes.yaml --residual-limit 512MiB
    """
    from kdagen.report import tables
    from kdagen.report.progress import Printer
    from kdagen.search.choice import parse_problem, problem_name
    from kdagen.search.run import Plan
    from kdagen.search.run import tune as run
    from kdagen.store.tuned import Store, default_path

    if (shapes is None) == (fields is None):
        raise click.UsageError("--shapes and --problem: one of them must be given, and only one")
    if fields is not None:
        if names:
            raise click.UsageError("--shape: it picks from a file of --shapes, and there is none")
        problem = parse_problem(fields)
        wanted = {problem_name(problem): problem}
    else:
        assert shapes is not None
        wanted = _select(load_shapes(shapes), names)
    if residual_limit is not None and not any(problem.trained for problem in wanted.values()):
        raise click.UsageError(
            "--residual-limit: no shape is trained; one with residuals 'save', 'rematerialize' or "
            "'tuned' is"
        )
    plan = Plan(
        chip=get_chip(chip),
        shapes=wanted,
        trials=trials,
        budget_seconds=None if budget is None else budget * 60.0,
        jobs=jobs,
        seed=seed,
        residual_limit_bytes=residual_limit,
    )
    console = tables.console()
    with Store(db or default_path()) as store:
        with Printer(console) as printer:
            summary = run(plan, store, printer.begin, printer.report)
        tables.print_summary(console, summary, store.path, shlex.join(["kdagen", *sys.argv[1:]]))
    if summary.interrupted:
        sys.exit(130)
    if not summary.complete:
        sys.exit(1)


@main.command()
@click.option("--chip", type=_CHIP, required=True, help="Chip to generate for.")
@click.option("--shape", "name", help="Name of the shape.")
@click.option(
    "--shapes",
    type=_EXISTING_FILE,
    help="YAML file that has the shape [default: the tables know it by name].",
)
@click.option("--problem", "fields", metavar="JSON", help="The shape itself, in place of a name.")
@click.option("--db", type=_EXISTING_FILE, help="Table to take the winner from first.")
@click.option("--default", "use_default", is_flag=True, help="Print the default variant.")
@click.option("--variant", "parameters", metavar="JSON", help="Print the variant of this JSON.")
@click.option("--gradient", is_flag=True, help="Print the gradient's kernel of a training step.")
def render(
    chip: str,
    name: str | None,
    shapes: Path | None,
    fields: str | None,
    db: Path | None,
    use_default: bool,
    parameters: str | None,
    gradient: bool,
) -> None:
    """Print the module that a call of a shape runs on; of a training step, its forward.

    It is that of the shape's winner, else of the nearest tuned shape whose variant is legal here,
    else of the default variant. Which one it is goes to standard error.

    \b
    Example:
      kdagen render --chip v6e --shape train-fixed
      kdagen render --chip v6e --shape train-fixed-step --gradient
    """
    from kdagen.search import choice
    from kdagen.store import lookup

    if use_default and parameters:
        raise click.UsageError("--default and --variant: only one of them can be given")
    if (name is None) == (fields is None):
        raise click.UsageError("--shape and --problem: one of them must be given, and only one")
    tables = lookup.known_tables(db)
    if fields is not None:
        problem = choice.parse_problem(fields)
    elif name is not None and shapes is not None:
        problem = _select(load_shapes(shapes), (name,))[name]
    elif name is not None:
        found = lookup.find_problem(name, tables, _note)
        if found is None:
            raise click.UsageError(f"--shape: no table knows {name!r}; give its file by --shapes")
        problem = found
    chosen = choice.choose(
        problem,
        get_chip(chip),
        tables,
        use_default=use_default,
        parameters=parameters,
        gradient=gradient,
    )
    click.echo(f"variant: {chosen.origin}", err=True)
    click.echo(chosen.source, nl=False)


@main.command()
@click.option("--chip", type=_CHIP, help="Only this chip.")
@click.option("--shape", "name", help="Only this shape.")
@click.option("--all", "every", is_flag=True, help="Every candidate, not only the winners.")
@click.option(
    "--db",
    type=_EXISTING_FILE,
    help="Only this table [default: the user's table and the packaged ones].",
)
def show(chip: str | None, name: str | None, every: bool, db: Path | None) -> None:
    """Print the results: for each shape the winner, its time and where that comes from.

    \b
    Example:
      kdagen show
      kdagen show --chip v7x --shape train-fixed --all
    """
    from kdagen.report import tables
    from kdagen.store import lookup

    paths = [db] if db is not None else lookup.known_tables()
    shown = tables.print_tables(tables.console(), paths, chip=chip, name=name, every=every)
    if not shown:
        asked = [f"{flag} {x}" for flag, x in (("--chip", chip), ("--shape", name)) if x]
        where = " for " + " ".join(asked) if asked else ""
        raise click.ClickException(f"no results{where}; kdagen tune makes them")


@main.command()
@click.option("--chip", "names", type=_CHIP, multiple=True, help="Only this chip; repeatable.")
def chips(names: tuple[str, ...]) -> None:
    """Print what each chip is, whether this machine compiles for it, and how good its model is.

    \b
    Example:
      kdagen chips
    """
    from kdagen.compiler.aot import can_compile
    from kdagen.report import tables

    reasons = {name: can_compile(get_chip(name)) for name in names or tuple(CHIPS)}
    tables.console().print(tables.chips(reasons))


@main.command()
@click.option("--chip", type=_CHIP, required=True, help="Chip whose winners to ship.")
@click.option("--db", type=_EXISTING_FILE, help="Table that kdagen tune wrote.")
@click.option("--out", type=_FILE, required=True, help="File to write; it is replaced.")
def ship(chip: str, db: Path | None, out: Path) -> None:
    """Write the winners of a chip to a file that can ship with a model or a release.

    The same winners give the same bytes. A winner that is not legal or whose numbers were not
    checked is refused.

    \b
    Example:
      kdagen ship --chip v7x --out tuning_db/v7x.sqlite
    """
    from kdagen.store import transfer
    from kdagen.store.tuned import default_path

    winners = transfer.ship(db or default_path(), out, chip, note=_note)
    click.echo(f"{out}: {len(winners)} winners for {chip}")


def _select(shapes: dict[str, Problem], names: tuple[str, ...]) -> dict[str, Problem]:
    for name in names:
        if name not in shapes:
            raise click.UsageError(f"--shape: got {name!r}, the file has {', '.join(shapes)}")
    return {name: shapes[name] for name in names} if names else shapes


if __name__ == "__main__":
    main()
