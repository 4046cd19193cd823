"""Typed rows of the results database.

Several processes may write one file. A write is one short transaction that takes the lock first
(``BEGIN IMMEDIATE``): a transaction that begins as a reader loses what another process wrote
between its read and its write.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import platformdirs
from sqlite_utils import Database

from kdagen.errors import KdagenError
from kdagen.problem import Problem, ProblemError
from kdagen.runtime.table import read_problem
from kdagen.store.rows import Entry, Environment, Result, TensorError
from kdagen.store.schema import MIGRATIONS, migrations

_LOCK_WAIT_SECONDS = 60.0


class StoreError(KdagenError):
    """A file that is not a results database, or that cannot be opened or written."""


_RESULT_COLUMNS = tuple(f.name for f in fields(Result) if f.name != "errors")
_ENVIRONMENT_COLUMNS = tuple(f.name for f in fields(Environment))


def default_path() -> Path:
    """Where ``kdagen tune`` writes unless told: ``$KDAGEN_DB``, or tuned.sqlite in kdagen's folder
    of the user's data directory."""
    if named := os.environ.get("KDAGEN_DB"):
        return Path(named)
    return Path(platformdirs.user_data_dir("kdagen")) / "tuned.sqlite"


class Store:
    """A results database, open for reading and writing; a context manager that closes it.

    Args:
      path: the file; it and its folder are made if they are not there.
      read_only: the file must be there, and is not written to.

    Attributes:
      left_out: what was not read so far since it is not of this version, in words.

    Raises:
      StoreError: the file is no such database, is absent or cannot be opened.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        self.left_out: list[str] = []
        if read_only and not self.path.is_file():
            raise StoreError(f"database {self.path}: no such file; kdagen tune makes it")
        try:
            if not read_only:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            # A URI, since a plain path cannot ask for mode=ro.
            uri = self.path.resolve().as_uri() + ("?mode=ro" if read_only else "")
            connection = sqlite3.connect(uri, uri=True, timeout=_LOCK_WAIT_SECONDS)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"database {self.path}: cannot be opened: {error}") from error
        self.db = Database(connection)
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            self._migrate(read_only)
        except sqlite3.Error as error:
            connection.close()
            raise StoreError(f"database {self.path}: not a results database: {error}") from error
        except BaseException:
            connection.close()
            raise

    def _migrate(self, read_only: bool) -> None:
        tables = self.db.table_names()
        if tables and migrations.migrations_table not in tables:
            raise StoreError(f"database {self.path}: it holds other tables: {', '.join(tables)}")
        pending = migrations.pending(self.db)
        newer = sorted({m.name for m in migrations.applied(self.db)} - set(MIGRATIONS))
        if newer:
            raise StoreError(
                f"database {self.path}: a newer version of kdagen made it ({', '.join(newer)})"
            )
        if not tables and read_only:
            raise StoreError(f"database {self.path}: it is empty; kdagen tune fills it")
        if pending and read_only:
            # An older version made it, and it is not to be written: a copy is brought up to date.
            file, self.db = self.db, Database(sqlite3.connect(":memory:"))
            file.conn.backup(self.db.conn)
            file.close()
        if pending:
            # Taking the lock first lets two processes open a new file at once.
            with self.writing():
                migrations.apply(self.db)

    def close(self) -> None:
        self.db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def writing(self) -> Iterator[Database]:
        """A transaction that has the write lock from its start. Rolled back on an exception.

        Raises:
          StoreError: the file cannot be written: it is locked, read-only, or the disk is full.
        """
        connection = self.db.conn
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.db
            except BaseException:
                connection.rollback()
                raise
            connection.commit()
        except sqlite3.OperationalError as error:
            raise StoreError(f"database {self.path}: cannot be written: {error}") from error

    def put_environment(self, environment: Environment) -> int:
        """The id of the environment's row, which is made if it is not there."""
        values = asdict(environment)
        with self.writing() as db:
            return _find_or_insert(db, "environments", values, values)

    def put_problem(self, problem: Problem, name: str) -> int:
        """The id of the problem's row; its name becomes ``name``."""
        key = {"problem": problem.to_json()}
        with self.writing() as db:
            row_id = _find_or_insert(
                db, "problems", key, {**key, "key": problem.key(), "name": name}
            )
            db.execute("UPDATE problems SET name = ? WHERE id = ?", [name, row_id])
            return row_id

    def put_result(self, environment_id: int, problem_id: int, result: Result) -> int:
        """Write one candidate's row, or write it anew; the id of the row.

        Raises:
          sqlite3.IntegrityError: no such environment or problem, or a value the schema refuses.
        """
        values: dict[str, Any] = {name: getattr(result, name) for name in _RESULT_COLUMNS}
        values |= {"environment_id": environment_id, "problem_id": problem_id}
        values["is_default"] = int(result.is_default)
        identity = ("environment_id", "problem_id", "source", "variant_id")
        with self.writing() as db:
            row_id = _find_or_insert(db, "results", {k: values[k] for k in identity}, values)
            assignments = ", ".join(f"{name} = :{name}" for name in values)
            db.execute(f"UPDATE results SET {assignments} WHERE id = :id", {**values, "id": row_id})
            db.execute("DELETE FROM errors WHERE result_id = ?", [row_id])
            for tensor, error in (result.errors or {}).items():
                db.execute(
                    "INSERT INTO errors (result_id, tensor, error, bound) VALUES (?, ?, ?, ?)",
                    [row_id, tensor, error.error, error.bound],
                )
            return row_id

    def results(self, environment_id: int, problem_id: int, source: str) -> list[Result]:
        """The candidates of one problem in one environment, in the order they were recorded."""
        where = "r.environment_id = ? AND r.problem_id = ? AND r.source = ?"
        return [e.result for e in self._entries(where, [environment_id, problem_id, source])]

    def choose(
        self,
        environment_id: int,
        problem_id: int,
        source: str,
        variant_id: str,
        residual_limit_bytes: int | None = None,
    ) -> None:
        """Make a result the winner of its problem, environment and source.

        ``residual_limit_bytes`` is the limit that it was chosen under, None for none.

        Raises:
          StoreError: there is no such result, or its status is not "ok".
        """
        with self.writing() as db:
            row = db.execute(
                "SELECT id FROM results WHERE environment_id = ? AND problem_id = ? "
                "AND source = ? AND variant_id = ? AND status = 'ok'",
                [environment_id, problem_id, source, variant_id],
            ).fetchone()
            if row is None:
                raise StoreError(f"variant_id: no result {variant_id!r} with status ok to choose")
            db.execute(
                "INSERT INTO chosen "
                "(environment_id, problem_id, source, result_id, residual_limit_bytes) "
                "VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET result_id = excluded.result_id, "
                "residual_limit_bytes = excluded.residual_limit_bytes",
                [environment_id, problem_id, source, row[0], residual_limit_bytes],
            )

    def forget_choice(self, environment_id: int, problem_id: int, source: str) -> None:
        """Leave a problem without a winner."""
        with self.writing() as db:
            db.execute(
                "DELETE FROM chosen WHERE environment_id = ? AND problem_id = ? AND source = ?",
                [environment_id, problem_id, source],
            )

    def entries(
        self,
        *,
        chip: str | None = None,
        name: str | None = None,
        winners_only: bool = False,
    ) -> list[Entry]:
        """Results by chip, environment, name of the problem and time, fastest first."""
        where, values = ["1"], []
        for column, value in (("e.chip", chip), ("p.name", name)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        if winners_only:
            where.append("c.result_id IS NOT NULL")
        order = "e.chip, e.id, p.name, p.id, r.source, r.seconds IS NULL, r.seconds, r.id"
        return self._entries(" AND ".join(where), values, order)

    def problems(self) -> dict[str, Problem]:
        """Every problem in the file by its name; of two with one name, the later."""
        rows = self.db.execute("SELECT name, problem FROM problems ORDER BY id")
        found = {name: self._problem(name, text) for name, text in rows}
        return {name: problem for name, problem in found.items() if problem is not None}

    def _problem(self, name: str, text: str) -> Problem | None:
        """The problem of a row; None where it is not of this version, which is noted once."""
        try:
            return read_problem(text)
        except ProblemError as error:
            said = f"{self.path}: left out {name!r}, which is not of this version: {error}"
            if said not in self.left_out:
                self.left_out.append(said)
            return None

    def _entries(self, where: str, values: Sequence[Any], order: str = "r.id") -> list[Entry]:
        columns = [f"r.{name}" for name in _RESULT_COLUMNS]
        columns += [f"e.{name}" for name in _ENVIRONMENT_COLUMNS]
        columns += ["r.id", "e.id", "p.name", "p.problem", "c.residual_limit_bytes"]
        columns += ["c.result_id IS NOT NULL"]
        rows = self.db.execute(
            f"""
            SELECT {", ".join(columns)} FROM results AS r
            JOIN environments AS e ON e.id = r.environment_id
            JOIN problems AS p ON p.id = r.problem_id
            LEFT JOIN chosen AS c ON c.result_id = r.id
            WHERE {where} ORDER BY {order}
            """,
            values,
        ).fetchall()
        errors: dict[int, dict[str, TensorError]] = {}
        for row_id, tensor, error, bound in self.db.execute(
            "SELECT result_id, tensor, error, bound FROM errors ORDER BY result_id, tensor"
        ):
            errors.setdefault(row_id, {})[tensor] = TensorError(error, bound)
        entries = []
        for row in rows:
            result_values = dict(zip(_RESULT_COLUMNS, row, strict=False))
            result_values["is_default"] = bool(result_values["is_default"])
            rest = row[len(_RESULT_COLUMNS) :]
            environment = Environment(*rest[: len(_ENVIRONMENT_COLUMNS)])
            row_id, environment_id, name, text, limit, is_winner = rest[len(_ENVIRONMENT_COLUMNS) :]
            problem = self._problem(name, text)
            if problem is None:
                continue
            entries.append(
                Entry(
                    name=name,
                    problem=problem,
                    environment=environment,
                    result=Result(**result_values, errors=errors.get(row_id)),
                    is_winner=bool(is_winner),
                    environment_id=environment_id,
                    residual_limit_bytes=limit,
                )
            )
        return entries


def _find_or_insert(
    db: Database, table: str, identity: dict[str, Any], values: dict[str, Any]
) -> int:
    where = " AND ".join(f"{name} = :{name}" for name in identity)
    row = db.execute(f"SELECT id FROM {table} WHERE {where}", identity).fetchone()
    if row is not None:
        return row[0]
    names = ", ".join(values)
    places = ", ".join(f":{name}" for name in values)
    cursor = db.execute(f"INSERT INTO {table} ({names}) VALUES ({places})", values)
    assert cursor.lastrowid is not None
    return cursor.lastrowid
