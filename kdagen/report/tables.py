"""Tables for the terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from kdagen.chips import get_chip
from kdagen.report import words
from kdagen.search.run import Run, Summary
from kdagen.search.shape import ShapeSearch
from kdagen.store.tuned import Entry, Store
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


def summary(result: Run) -> Table:
    """A line a problem: its winner against the default variant."""
    time = f"{words.kind(result.source)} time"
    table = _table(
        "shape",
        "winner",
        time,
        "default",
        "against default",
        "of HBM",
        "VMEM used / allowed",
        "error",
    )
    for search in result.searches:
        table.add_row(*_summary_row(search))
    for name, reason in result.refused.items():
        table.add_row(name, reason)
    return table


def _summary_row(search: ShapeSearch) -> list[str]:
    shown = search.winner or search.best
    default = search.default_result
    if shown is None:
        return [search.name, "none: no candidate came through"]
    label = words.variant(_variant(shown.variant))
    if search.winner is None:
        label = f"best so far, not checked: {label}"
    elif shown.is_default:
        label = f"the default: {label}"
    return [
        search.name,
        label,
        words.seconds(shown.seconds),
        words.seconds(default.seconds if default else None),
        words.ratio(shown, default),
        words.hbm_share(shown),
        words.vmem(shown),
        words.error(shown),
    ]


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


def entries(rows: Sequence[Entry], *, every: bool) -> Table:
    """A line a result: the winners, or every candidate with what became of it."""
    table = _table(
        "chip",
        "shape",
        *(["status"] if every else []),
        "variant",
        "time",
        "against default",
        "of HBM",
        "VMEM used / allowed",
        "error",
        "source",
        "made with",
    )
    defaults = {_place(row): row.result for row in rows if row.result.is_default}
    for row in rows:
        result = row.result
        if not (every or row.is_winner):
            continue
        status = "winner" if row.is_winner else result.status
        failed = f"{result.status}: {result.reason}" if result.status != "ok" else ""
        table.add_row(
            row.environment.chip,
            row.name,
            *([status] if every else []),
            "\n".join(filter(None, [words.variant(_variant(result.variant)), failed])),
            words.seconds(result.seconds),
            words.ratio(result, defaults.get(_place(row))),
            words.hbm_share(result),
            words.vmem(result),
            words.error(result),
            result.source,
            f"libtpu {row.environment.libtpu}, JAX {row.environment.jax}",
        )
    return table


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
            "yes" if reason is None else f"no: {reason}",
            words.calibration(chip),
        )
    return table


def print_summary(console: Console, result: Summary, db: Path, command: str) -> None:
    """What a run came to: the table, the reasons, where times come from, and how to go on."""
    console.print()
    run = result.run
    console.print(summary(run))
    failed = reasons(run.searches)
    if failed is not None:
        console.print(failed)
    notes = [words.origin(run.source, run.environment, run.chip)]
    tried = sum(len(search.tried) - search.taken_over for search in run.searches)
    notes.append(f"{tried} candidates in {words.duration(result.seconds)}; all are in {db}")
    if result.interrupted:
        notes.append(f"stopped; to go on from here: {command}")
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
    origins: dict[str, None] = {}
    for path in paths:
        with Store(path, read_only=True) as store:
            rows = store.entries(chip=chip, name=name)
        shown = [row for row in rows if every or row.is_winner]
        if not shown:
            continue
        console.print(f"{path}", markup=False, highlight=False, soft_wrap=True)
        console.print(entries(rows, every=every))
        for row in shown:
            made_for = get_chip(row.environment.chip)
            origins[words.origin(row.result.source, row.environment, made_for)] = None
    for origin in origins:
        console.print(origin, markup=False, highlight=False, soft_wrap=True)
    return bool(origins)


def _place(row: Entry) -> tuple[int, str, str]:
    return row.environment_id, row.problem.to_json(), row.result.source


def _variant(text: str) -> Variant | str:
    try:
        return Variant.from_dict(json.loads(text))
    except VariantError:
        return text  # of a version with other parameters
