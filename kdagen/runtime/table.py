"""Tuned tables as the runtime sees them: read once with the standard library, never written.

A table is an SQLite file with a view ``winners``, which `kdagen tune` fills; its columns are
described in ``kdagen.store.schema``. Rows are data: parameters that are checked before use.
"""

from __future__ import annotations

import functools
import json
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kdagen
from kdagen.errors import KdagenError
from kdagen.gradient.step import Step
from kdagen.problem import Problem, ProblemError
from kdagen.variant import Variant, VariantError

_COLUMNS = (
    "problem_key", "problem", "variant", "source", "seconds", "spread", "jax", "libtpu",
    "generator", "environment_id",
)  # fmt: skip


class TableError(KdagenError):
    """A tuned table that is absent, or that is not one."""


@dataclass(frozen=True)
class Row:
    """One winner of a table.

    Attributes:
      problem_key, problem, variant: canonical JSON; the last of a variant of the forward, or of a
        training step where the problem has residuals.
      source: "hardware" for a measured time, "compiler" for a modelled one.
      seconds: of one call of the whole problem.
      spread: relative spread of the measurements, None for a modelled time.
      jax, libtpu: versions it was tuned with.
      generator: hash of the templates and helpers of its code.
      environment_id: greater is later.
    """

    problem_key: str
    problem: str
    variant: str
    source: str
    seconds: float
    spread: float | None
    jax: str
    libtpu: str
    generator: str
    environment_id: int


Table = dict[str, dict[str, tuple[Row, ...]]]
"""From a chip's name and a problem's key to the winners, in the order of their environments."""


def read_problem(text: str) -> Problem:
    """The problem of a table's cell.

    Raises:
      ProblemError: it is no JSON of a problem of this version.
    """
    fields = _fields(text)
    if fields is None:
        raise ProblemError(f"problem: got {text}; it must be a JSON object")
    return Problem.from_dict(fields)


def read_parameters(text: str, problem: Problem) -> Variant | Step:
    """The variant of a table's cell: of a problem that is trained a step, else a forward.

    Raises:
      VariantError: it is no such JSON of this version.
    """
    fields = _fields(text)
    if fields is None:
        raise VariantError(f"variant: got {text}; it must be a JSON object")
    return Step.from_dict(fields) if problem.trained else Variant.from_dict(fields)


def _fields(text: str) -> dict[str, Any] | None:
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def packaged_tables() -> list[Path]:
    """The files that came with the package, one a chip."""
    return sorted((Path(kdagen.__file__).parent / "_tuning_db").glob("*.sqlite"))


def user_table() -> Path | None:
    """$KDAGEN_DB, which then has to exist, or the file that `kdagen tune` writes, if it does."""
    if named := os.environ.get("KDAGEN_DB"):
        return Path(named)
    import platformdirs  # not needed before the first call that runs on a kernel

    own = Path(platformdirs.user_data_dir("kdagen")) / "tuned.sqlite"
    return own if own.is_file() else None


@functools.cache
def read_table(path: Path, immutable: bool = False) -> Table:
    """All winners of a file, read once a process.

    Args:
      path: the file.
      immutable: nobody writes it, so that it is read without locks (a read-only disk has none).

    Raises:
      TableError: no such file, or not a tuned table.
    """
    if not path.is_file():
        raise TableError(f"tuned table {path}: no such file; kdagen tune makes it")
    uri = path.resolve().as_uri() + "?mode=ro" + ("&immutable=1" if immutable else "")
    try:
        connection = sqlite3.connect(uri, uri=True)
        try:
            found = connection.execute(
                f"SELECT chip, {', '.join(_COLUMNS)} FROM winners ORDER BY environment_id, problem"
            ).fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise TableError(f"tuned table {path}: not a tuned table: {error}") from error
    table: Table = {}
    for chip, *values in found:
        row = Row(*values)
        of_chip = table.setdefault(chip, {})
        of_chip[row.problem_key] = (*of_chip.get(row.problem_key, ()), row)
    return table
