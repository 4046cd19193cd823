"""What the tables on this machine know: the user's own and those that came with the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from kdagen.problem import Problem
from kdagen.runtime.table import packaged_tables
from kdagen.store.tuned import Store, default_path


def known_tables(db: Path | None = None) -> list[Path]:
    """The tables to look into, first found first used: ``db``, or the user's table if there is one,
    and then the packaged ones."""
    if db is not None:
        return [db, *packaged_tables()]
    own = default_path()
    return [*([own] if own.is_file() else []), *packaged_tables()]


def find_problem(
    name: str, tables: Iterable[Path], note: Callable[[str], None] = lambda text: None
) -> Problem | None:
    """The problem of that name in the first table that has one; ``note`` is told of rows that are
    not of this version."""
    for path in tables:
        with Store(path, read_only=True) as store:
            problem = store.problems().get(name)
            for text in store.left_out:
                note(text)
        if problem is not None:
            return problem
    return None
