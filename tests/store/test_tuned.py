"""The results database: what it keeps, what it refuses, and several writers at once."""

from __future__ import annotations

import dataclasses
import multiprocessing
import sqlite3
from pathlib import Path

import pytest
from sqlite_utils import Database

from kdagen.store.rows import TensorError
from kdagen.store.schema import migrations
from kdagen.store.tuned import Store, StoreError, default_path
from tests.store.rows import (
    CHECKED,
    DEFAULT,
    ENVIRONMENT,
    FASTER,
    PROBLEM,
    STEP,
    TRAINED,
    result,
    step_result,
    tuned,
)


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "tuned.sqlite") as opened:
        yield opened


def test_tables_are_strict(store: Store) -> None:
    tables = [t for t in store.db.tables if not t.name.startswith("_")]
    assert {t.name for t in tables} == {"environments", "problems", "results", "errors", "chosen"}
    assert all(t.strict for t in tables)


def test_a_result_comes_back_as_it_was(store: Store) -> None:
    where = store.put_environment(ENVIRONMENT), store.put_problem(PROBLEM, "small")
    kept = [
        result(errors=CHECKED),
        result(FASTER, status="vmem", reason="too much", seconds=None, modelled_seconds=None),
    ]
    for one in kept:
        store.put_result(*where, one)
    assert store.results(*where, "compiler") == kept
    assert store.results(*where, "hardware") == []


def test_a_step_comes_back_with_its_parts_and_the_limit_it_was_chosen_under(store: Store) -> None:
    where = store.put_environment(ENVIRONMENT), store.put_problem(TRAINED, "step")
    kept = step_result(temporary_bytes=3 << 20, errors=CHECKED)
    unproven = step_result(
        dataclasses.replace(STEP, residuals="rematerialize"), reason="code_size: 10^6 bundles"
    )
    for one in (kept, unproven):
        store.put_result(*where, one)
    assert store.results(*where, "compiler") == [kept, unproven]
    for limit in (16 << 20, None, 0):
        store.choose(*where, "compiler", kept.variant_id, limit)
        (entry,) = store.entries(winners_only=True)
        assert entry.residual_limit_bytes == limit
    columns = "seconds, forward_seconds, backward_seconds, residual_bytes, temporary_bytes, "
    row = store.db.execute(f"SELECT {columns} residual_limit_bytes FROM winners").fetchone()
    assert row == (5e-4, 1e-4, 4e-4, 8 << 20, 3 << 20, 0)


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A file that the version before training steps wrote, with a winner and a default."""
    path = tmp_path / "older.sqlite"
    with Store(path) as store:
        tuned(store)
        rows = {t: list(store.db[t].rows) for t in store.db.table_names() if t[0] != "_"}
    path.unlink()
    db = Database(path)
    migrations.apply(db, stop_before="m002_steps")
    for name in ("environments", "problems", "results", "errors", "chosen"):
        known = db[name].columns_dict
        db[name].insert_all({n: x for n, x in row.items() if n in known} for row in rows[name])
    db.close()
    return path


def test_a_file_of_the_version_before_is_read_as_it_is_and_written_to_when_opened_so(
    older: Path,
) -> None:
    before = older.read_bytes()
    with Store(older, read_only=True) as store:
        entries = store.entries()
    assert [e.result.seconds for e in entries] == [8e-5, 1e-4]
    assert entries[0].is_winner and entries[0].result.errors == CHECKED
    assert entries[0].residual_limit_bytes is None and entries[0].result.residual_bytes is None
    assert older.read_bytes() == before
    with Store(older) as store:
        assert store.entries() == entries
        where = store.put_environment(ENVIRONMENT), store.put_problem(TRAINED, "step")
        store.put_result(*where, step_result())
    with Store(older, read_only=True) as store:
        assert len(store.entries()) == 3


def test_a_result_that_is_not_finite_is_kept_without_a_number(store: Store) -> None:
    where = store.put_environment(ENVIRONMENT), store.put_problem(PROBLEM, "small")
    errors = {"output": TensorError(None, 5e-3)}
    store.put_result(*where, result(status="wrong", reason="NaN", errors=errors))
    (kept,) = store.results(*where, "compiler")
    assert kept.errors == errors
    assert kept.error is not None and kept.error != kept.error
    assert result().error is None


def test_writing_a_result_again_replaces_it_with_its_errors(store: Store) -> None:
    where = store.put_environment(ENVIRONMENT), store.put_problem(PROBLEM, "small")
    first = store.put_result(*where, result(errors=CHECKED))
    assert store.put_result(*where, result(seconds=2e-4)) == first
    (kept,) = store.results(*where, "compiler")
    assert (kept.seconds, kept.errors) == (2e-4, None)


def test_equal_environments_and_problems_are_one_row(store: Store) -> None:
    other = dataclasses.replace(ENVIRONMENT, libtpu="0.0.52")
    ids = [store.put_environment(e) for e in (ENVIRONMENT, other, ENVIRONMENT)]
    assert ids[0] == ids[2] != ids[1]
    assert store.put_problem(PROBLEM, "a") == store.put_problem(PROBLEM, "b")
    assert store.problems() == {"b": PROBLEM}


def test_a_result_of_nothing_is_refused(store: Store) -> None:
    problem_id = store.put_problem(PROBLEM, "small")
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        store.put_result(99, problem_id, result())
    assert store.db["results"].count == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "fine"},
        {"source": "guess"},
        {"seconds": None},
        {"seconds": -1.0},
        {"seconds": "fast"},
        {"status": "vmem"},
        {"variant": "{"},
        {"loop_bundles": 1.5},
        {"residual_bytes": -1},
        {"forward_seconds": 0.0},
    ],
)
def test_a_value_that_cannot_be_is_refused(store: Store, changes: dict) -> None:
    where = store.put_environment(ENVIRONMENT), store.put_problem(PROBLEM, "small")
    with pytest.raises(sqlite3.IntegrityError):
        store.put_result(*where, result(**changes))
    assert store.db["results"].count == 0


def test_a_winner_must_be_an_ok_result_of_its_own_problem(store: Store) -> None:
    where = tuned(store)
    bad = result(dataclasses.replace(FASTER, lag=1), status="died", seconds=None)
    store.put_result(*where, bad)
    with pytest.raises(StoreError, match="status ok"):
        store.choose(*where, "compiler", bad.variant_id)
    other = store.put_problem(dataclasses.replace(PROBLEM, tokens=4096), "other")
    with (
        pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"),
        store.writing() as db,
    ):
        db.execute("INSERT INTO chosen VALUES (?, ?, 'compiler', 1, NULL)", [where[0], other])


def test_winners_view_is_what_a_plain_reader_needs(store: Store) -> None:
    environment_id, _ = tuned(store)
    connection = sqlite3.connect(store.path)
    connection.row_factory = sqlite3.Row
    (row,) = connection.execute("SELECT * FROM winners").fetchall()
    connection.close()
    assert dict(row) == {
        "chip": "v6e",
        "problem_key": PROBLEM.key(),
        "problem": PROBLEM.to_json(),
        "name": "small",
        "variant": FASTER.to_json(),
        "variant_id": f"id-{FASTER.to_json()}",
        "seconds": 8e-5,
        "spread": None,
        "model_error": 0.05,
        "source": "compiler",
        "default_seconds": 1e-4,
        "error": 3e-3,
        "jax": "0.10.2",
        "jaxlib": "0.10.2",
        "libtpu": "0.0.42",
        "kdagen": "0.1.0",
        "generator": "a" * 64,
        "environment_id": environment_id,
        "forward_seconds": None,
        "backward_seconds": None,
        "residual_bytes": None,
        "temporary_bytes": None,
        "residual_limit_bytes": None,
    }


def test_a_choice_is_replaced_and_forgotten(store: Store) -> None:
    where = tuned(store)
    store.choose(*where, "compiler", f"id-{DEFAULT.to_json()}")
    (entry,) = store.entries(winners_only=True)
    assert entry.result.is_default
    store.forget_choice(*where, "compiler")
    assert store.entries(winners_only=True) == []


def test_entries_are_filtered_and_fastest_first(store: Store) -> None:
    tuned(store)
    assert [e.result.seconds for e in store.entries(chip="v6e")] == [8e-5, 1e-4]
    assert [e.is_winner for e in store.entries(name="small")] == [True, False]
    assert store.entries(chip="v7x") == store.entries(name="large") == []


def _write_rows(path: Path, writer: int, rows: int) -> None:
    with Store(path) as store:
        for row in range(rows):
            where = store.put_environment(ENVIRONMENT), store.put_problem(PROBLEM, "small")
            variant = dataclasses.replace(FASTER, lag=writer, recurrence_span=row + 1)
            store.put_result(*where, result(variant))


def test_rows_of_processes_that_write_at_once_are_all_kept(tmp_path: Path) -> None:
    path, writers, rows = tmp_path / "new" / "tuned.sqlite", 6, 20
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_write_rows, args=(path, writer, rows)) for writer in range(writers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0] * writers
    with Store(path, read_only=True) as store:
        assert store.db["environments"].count == store.db["problems"].count == 1
        kept = {e.result.variant for e in store.entries()}
    assert len(kept) == writers * rows


def test_a_failed_write_leaves_nothing(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt), store.writing() as db:
        db.execute("INSERT INTO problems (problem, key, name) VALUES ('1', '1', 'x')")
        raise KeyboardInterrupt
    assert store.db["problems"].count == 0


def test_names_that_mean_something_in_a_uri_are_plain_files(tmp_path: Path) -> None:
    path = tmp_path / "50%?mode=memory#x.sqlite"
    with Store(path) as store:
        tuned(store)
    with Store(path, read_only=True) as store:
        assert len(store.entries()) == 2
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such file"):
        Store(tmp_path / "absent.sqlite", read_only=True)
    assert not list(tmp_path.iterdir())
    text = tmp_path / "notes.txt"
    text.write_text("not a database " * 100)
    with pytest.raises(StoreError, match="not a results database"):
        Store(text)
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE songs (title)")
    connection.close()
    with pytest.raises(StoreError, match="songs"):
        Store(other)
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(text / "below.sqlite")


def test_the_default_path_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere/data")
    assert default_path() == Path("/somewhere/data/kdagen/tuned.sqlite")
    monkeypatch.setenv("KDAGEN_DB", "mine.sqlite")
    assert default_path() == Path("mine.sqlite")
