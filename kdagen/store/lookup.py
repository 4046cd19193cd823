"""What the tables on this machine know: the user's own and those that came with the package."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import kdagen
from kdagen.chips import Chip
from kdagen.generate import code_hash
from kdagen.problem import Problem
from kdagen.store.tuned import Store, default_path
from kdagen.variant import Variant, VariantError, check


def packaged_tables() -> list[Path]:
    """The files that came with the package, one a chip."""
    return sorted((Path(kdagen.__file__).parent / "_tuning_db").glob("*.sqlite"))


def known_tables(db: Path | None = None) -> list[Path]:
    """The tables to look into, first found first used: ``db``, or the user's table if there is one,
    and then the packaged ones."""
    if db is not None:
        return [db, *packaged_tables()]
    own = default_path()
    return [*([own] if own.is_file() else []), *packaged_tables()]


def find_problem(name: str, tables: Iterable[Path]) -> Problem | None:
    """The problem of that name in the first table that has one."""
    for path in tables:
        with Store(path, read_only=True) as store:
            if (problem := store.problems().get(name)) is not None:
                return problem
    return None


def find_winner(
    problem: Problem, chip: Chip, tables: Iterable[Path]
) -> tuple[Variant, Path] | None:
    """The legal winner for a problem on a chip, and the table it is in.

    In each table: made with today's templates before others, of this very problem before others of
    its key, measured before modelled, of a later environment before an earlier.
    """
    for path in tables:
        with Store(path, read_only=True) as store:
            entries = store.entries(chip=chip.name, winners_only=True)
        found = [e for e in entries if e.problem.key() == problem.key()]
        found.sort(
            key=lambda e: (
                e.environment.generator == code_hash(),
                e.problem == problem,
                e.result.source == "hardware",
                e.environment_id,
            ),
            reverse=True,
        )
        for entry in found:
            try:
                variant = Variant.from_dict(json.loads(entry.result.variant))
            except VariantError:
                continue
            if check(variant, problem, chip) is None:
                return variant, path
    return None
