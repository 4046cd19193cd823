"""Tables for the terminal."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kdagen.chips import CHIPS, get_chip
from kdagen.gradient.step import Step
from kdagen.problem import Problem
from kdagen.report import words
from kdagen.runtime.table import read_parameters
from kdagen.search.run import Run, Summary
from kdagen.search.shape import ShapeSearch
from kdagen.store.rows import Entry, Result
from kdagen.store.tuned import Store
from kdagen.variant import Variant, VariantError

# Of a table that goes to a file or a pipe.
_PLAIN_WIDTH = 200


def console() -> Console:
    """Standard output; wide where it is not a terminal, so that no line is broken."""
    width = None if Console().is_terminal else _PLAIN_WIDTH
    return Console(width=width, highlight=False, soft_wrap=False)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


# Of training steps, after the time of the whole.
_STEP_COLUMNS = ("forward + gradient", "residuals, MiB", "temporary, MiB")


def _step_cells(result: Result) -> list[str]:
    return [
        words.parts(result) if result.forward_seconds else "-",
        words.mebibytes(result.residual_bytes),
        words.mebibytes(result.temporary_bytes),
    ]


def summary(run: Run) -> Table:
    """A line a problem: its winner against the default variant."""
    trained = any(search.problem.trained for search in run.searches)
    table = _table(
        "shape",
        "winner",
        f"{words.kind(run.source)} time",
        *(_STEP_COLUMNS if trained else ()),
        "default",
        "against default",
        "of HBM",
        "VMEM used / allowed, MiB",
        "error",
    )
    for search in run.searches:
        table.add_row(*_summary_row(search, trained))
    for name in run.refused:
        table.add_row(name, "refused")
    for name, other in run.same.items():
        table.add_row(name, f"that of {other}")
    return table


def _summary_row(search: ShapeSearch, trained: bool) -> list[str]:
    shown = search.winner or search.best
    default = search.default_result
    if shown is None:
        return [search.name, "none"]
    label = shown.variant_id[:12]
    if search.winner is None:
        label += " (best so far)"
    elif shown.is_default:
        label += " (the default)"
    return [
        search.name,
        label,
        words.seconds(shown.seconds),
        *(_step_cells(shown) if trained else []),
        words.seconds(default.seconds if default else None),
        words.ratio(shown, default),
        words.hbm_share(shown),
        words.vmem(shown),
        words.error(shown),
    ]


def summary_notes(run: Run) -> list[str]:
    """What a line of the table has no room for: the variant, or why there is none."""
    notes = []
    for search in run.searches:
        shown = search.winner or search.best
        if shown is None:
            notes.append(f"{search.name}: no candidate came through")
        else:
            notes.append(f"{search.name}: {words.variant(_variant(shown.variant, search.problem))}")
    return notes + [f"{name}: {reason}" for name, reason in run.refused.items()]


def reasons(searches: Iterable[ShapeSearch]) -> Table | None:
    """How many candidates came to nothing and why, or None if none did."""
    counts: Counter[str] = Counter()
    for search in searches:
        counts.update(search.reasons())
    if not counts:
        return None
    table = _table("candidates", "came to nothing because")
    for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(str(count), reason)
    return table


def entries(rows: Sequence[Entry], *, every: bool) -> tuple[Table, list[str]]:
    """A line a result of one environment, of the winners or of every candidate; and a numbered note
    on each, its variant and what became of it. The gain is over the default variant."""
    trained = any(row.problem.trained for row in rows if every or row.is_winner)
    table = _table(
        "",
        "shape",
        *(["status"] if every else []),
        "time",
        *(_STEP_COLUMNS if trained else ()),
        "gain",
        "of HBM",
        "VMEM, MiB",
        "error",
        "source",
    )
    notes: list[str] = []
    defaults = {_place(row): row.result for row in rows if row.result.is_default}
    for row in rows:
        result = row.result
        if not (every or row.is_winner):
            continue
        number = f"{len(notes) + 1}"
        failed = f" ({result.status}: {result.reason})" if result.reason else ""
        allowed = ""
        if row.is_winner and row.problem.trained:
            allowed = f", chosen under {words.limit(row.residual_limit_bytes)} of residuals"
        variant = words.variant(_variant(result.variant, row.problem))
        notes.append(f"{number}: {variant}{allowed}{failed}")
        status = "winner" if row.is_winner else result.status
        table.add_row(
            number,
            row.name,
            *([status] if every else []),
            words.seconds(result.seconds),
            *(_step_cells(result) if trained else []),
            words.ratio(result, defaults.get(_place(row))),
            words.hbm_share(result),
            words.vmem(result),
            words.error(result),
            result.source,
        )
    return table, notes


def chips(reasons_by_chip: Mapping[str, str | None]) -> Table:
    """A line a chip: what it is, whether this machine compiles for it, how good its model is."""
    table = _table("chip", "is", "VMEM / default limit", "MXU", "compiles here", "model")
    for name, reason in reasons_by_chip.items():
        chip = get_chip(name)
        table.add_row(
            name,
            ", ".join(chip.device_kinds),
            f"{chip.vmem_bytes / words.MIB:.0f} / "
            f"{chip.default_vmem_limit_bytes / words.MIB:.0f} MiB",
            f"{chip.mxu_count} of {chip.mxu_size}x{chip.mxu_size}",
            "yes" if reason is None else escape(f"no: {reason}"),
            words.calibration(chip),
        )
    return table


def print_summary(console: Console, result: Summary, db: Path, command: str) -> None:
    """What a run came to: the table, the reasons, where times come from, and how to go on."""
    console.print()
    run = result.run
    console.print(summary(run))
    _print_notes(console, summary_notes(run))
    failed = reasons(run.searches)
    if failed is not None:
        console.print(failed)
    notes = [words.origin(run.source, run.environment, run.chip)]
    tried = sum(len(search.tried) - search.taken_over for search in run.searches)
    notes.append(f"{tried} candidates in {words.duration(result.seconds)}; all are in {db}")
    if result.interrupted:
        notes.append(f"stopped; to go on from here: {command}")
    _print_notes(console, notes)


def _print_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def print_tables(
    console: Console,
    paths: Sequence[Path],
    *,
    chip: str | None,
    name: str | None,
    every: bool,
) -> bool:
    """The results of each file, and where their times come from; whether there were any."""
    any_shown = False
    for path in paths:
        with Store(path, read_only=True) as store:
            rows = store.entries(chip=chip, name=name)
            left_out = store.left_out
        unknown = Counter(r.environment.chip for r in rows if r.environment.chip not in CHIPS)
        left_out += [
            f"{path}: left out {n} rows of {c}, an unknown chip" for c, n in unknown.items()
        ]
        _print_notes(console, left_out)
        rows = [row for row in rows if row.environment.chip in CHIPS]
        for environment, group in itertools.groupby(rows, key=lambda row: row.environment):
            members = list(group)
            shown = [row for row in members if every or row.is_winner]
            if not shown:
                continue
            any_shown = True
            made_for = get_chip(environment.chip)
            table, notes = entries(members, every=every)
            origins = {
                words.origin(row.result.source, environment, made_for): None for row in shown
            }
            _print_notes(console, [f"{environment.chip}, from {path}"])
            console.print(table)
            _print_notes(console, [*notes, *origins, ""])
    return any_shown


def _place(row: Entry) -> tuple[int, str, str]:
    return row.environment_id, row.problem.to_json(), row.result.source


def _variant(text: str, problem: Problem) -> Variant | Step | str:
    try:
        return read_parameters(text, problem)
    except VariantError:
        return text  # of a version with other parameters
