"""Files of winners that ship with a release or with a model.

A shipped file has the schema of the working database and the winners of one chip in it, with each
problem's default variant for comparison. The same rows give the same bytes: everything is sorted,
ids are counted anew, and nothing tells when it was made.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kdagen.chips import get_chip
from kdagen.gradient.step import check_any
from kdagen.problem import canonical_json
from kdagen.runtime.table import read_parameters
from kdagen.store.rows import Entry
from kdagen.store.schema import migrations
from kdagen.store.tuned import Store, StoreError
from kdagen.variant import VariantError

_EPOCH = "1970-01-01 00:00:00+00:00"


def ship(
    db: str | Path,
    out: str | Path,
    chip: str,
    only: Callable[[Entry], bool] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[Entry]:
    """Write the winners of ``chip`` in ``db`` to the file ``out``, which is replaced.

    Of several environments that tuned a problem only the latest goes in, and of two sources
    "hardware" before "compiler". Every winner must be legal today and its numbers checked.

    Args:
      db: a database that ``kdagen tune`` wrote.
      out: the file to write.
      chip: name of the chip.
      only: which winners to take, all where None.
      note: told of rows that stay out since they are not of this version.

    Returns:
      The entries of the winners written.

    Raises:
      StoreError: no winner to ship, or one that is not legal or not checked, or ``out`` cannot be
        written; nothing is written then.
      ValueError: an unknown chip.
    """
    get_chip(chip)
    with Store(db, read_only=True) as store:
        entries = store.entries(chip=chip)
        for text in store.left_out:
            note(text)
    winners = _latest([e for e in entries if e.is_winner and (only is None or only(e))])
    if not winners:
        raise StoreError(f"database {db}: no winner for {chip} to ship; kdagen tune finds them")
    for winner in winners:
        _require_shippable(winner)
    taken = {(w.environment, w.problem, w.result.source) for w in winners}
    rows = [
        e
        for e in entries
        if (e.environment, e.problem, e.result.source) in taken
        and (e.is_winner or (e.result.is_default and e.result.status == "ok"))
    ]
    try:
        _write(rows, Path(out))
    except OSError as error:
        raise StoreError(f"file {out}: cannot be written: {error.strerror or error}") from error
    return winners


def _latest(winners: Sequence[Entry]) -> list[Entry]:
    best: dict[str, Entry] = {}
    for entry in winners:
        held = best.get(entry.problem.to_json())
        if held is None or _rank(entry) > _rank(held):
            best[entry.problem.to_json()] = entry
    return [best[key] for key in sorted(best)]


def _rank(entry: Entry) -> tuple[bool, int]:
    return entry.result.source == "hardware", entry.environment_id


def _require_shippable(entry: Entry) -> None:
    result, chip = entry.result, get_chip(entry.environment.chip)
    what = f"{entry.name} on {chip.name}"
    try:
        variant = read_parameters(result.variant, entry.problem)
    except VariantError as error:
        raise StoreError(f"{what}: its variant is not of this version: {error}") from error
    violation = check_any(variant, entry.problem, chip)
    if violation is not None:
        raise StoreError(f"{what}: its variant is not legal: {violation}")
    if not result.errors or not all(e.ok for e in result.errors.values()):
        raise StoreError(f"{what}: its numbers were not checked, or are wrong")


def _write(rows: Sequence[Entry], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename that puts it in place is atomic.
    handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        with Store(temporary) as store:
            for entry in sorted(rows, key=_sort_key):
                environment_id = store.put_environment(entry.environment)
                problem_id = store.put_problem(entry.problem, entry.name)
                store.put_result(environment_id, problem_id, entry.result)
                if entry.is_winner:
                    store.choose(
                        environment_id,
                        problem_id,
                        entry.result.source,
                        entry.result.variant_id,
                        entry.residual_limit_bytes,
                    )
            with store.writing() as db:
                db.execute(f"UPDATE {migrations.migrations_table} SET applied_at = ?", [_EPOCH])
            store.db.execute("PRAGMA journal_mode = DELETE")
            store.db.vacuum()
        _reset_counters(temporary)
        temporary.chmod(0o644)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _sort_key(entry: Entry) -> tuple[str, ...]:
    environment = canonical_json(vars(entry.environment))
    return environment, entry.problem.to_json(), entry.result.source, entry.result.variant_id


def _reset_counters(path: Path) -> None:
    """Set to fixed values the three fields of the header that count writes and name the library.

    Their offsets are of the SQLite file format, section 1.3: the file change counter (24), the
    version-valid-for number (92) and the version of the library that wrote last (96).
    """
    with path.open("r+b") as file:
        for offset in (24, 92):
            file.seek(offset)
            file.write((1).to_bytes(4, "big"))
        file.seek(96)
        file.write((3_037_000).to_bytes(4, "big"))
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
    finally:
        connection.close()
    if verdict != "ok":
        raise StoreError(f"file {path}: damaged while it was written: {verdict}")
