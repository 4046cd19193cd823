"""Files of winners that ship."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

import pytest

from kdagen.gradient.step import Step
from kdagen.store.rows import TensorError
from kdagen.store.transfer import ship
from kdagen.store.tuned import Store, StoreError
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

OTHER = dataclasses.replace(PROBLEM, tokens=4096)


def winner_of_other(store: Store, environment_id: int) -> None:
    where = environment_id, store.put_problem(OTHER, "other")
    winner = result(FASTER, errors=CHECKED)
    store.put_result(*where, winner)
    store.choose(*where, "compiler", winner.variant_id)


def test_the_same_winners_give_the_same_bytes(tmp_path: Path) -> None:
    with Store(tmp_path / "one.sqlite") as store:
        environment_id, _ = tuned(store)
        winner_of_other(store, environment_id)
    with Store(tmp_path / "two.sqlite") as store:
        # The same in another order, among rows that do not ship, and written over and over.
        elsewhere = store.put_environment(dataclasses.replace(ENVIRONMENT, chip="v7x"))
        store.put_result(elsewhere, store.put_problem(OTHER, "other"), result())
        winner_of_other(store, store.put_environment(ENVIRONMENT))
        for _ in range(5):
            where = tuned(store)
        store.put_result(*where, result(dataclasses.replace(FASTER, lag=1), seconds=3e-4))
    for name in ("one", "two"):
        assert len(ship(tmp_path / f"{name}.sqlite", tmp_path / f"{name}.out", "v6e")) == 2
    assert (tmp_path / "one.out").read_bytes() == (tmp_path / "two.out").read_bytes()


def test_a_shipped_file_is_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    with Store(tmp_path / "db.sqlite") as store:
        tuned(store)
    out = tmp_path / "ship" / "v6e.sqlite"
    ship(tmp_path / "db.sqlite", out, "v6e")
    assert [p.name for p in out.parent.iterdir()] == ["v6e.sqlite"]
    connection = sqlite3.connect(f"{out.as_uri()}?mode=ro&immutable=1", uri=True)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    rows = connection.execute("SELECT variant, seconds, default_seconds FROM winners").fetchall()
    connection.close()
    assert rows == [(FASTER.to_json(), 8e-5, 1e-4)]
    with Store(out) as store:
        assert [e.result.variant for e in store.entries()] == [FASTER.to_json(), DEFAULT.to_json()]


def test_the_latest_environment_ships(tmp_path: Path) -> None:
    with Store(tmp_path / "db.sqlite") as store:
        tuned(store, dataclasses.replace(ENVIRONMENT, libtpu="0.0.1"), seconds=1e-6)
        tuned(store)
    (shipped,) = ship(tmp_path / "db.sqlite", tmp_path / "out.sqlite", "v6e")
    assert shipped.environment == ENVIRONMENT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"errors": None}, "not checked"),
        ({"errors": {"output": TensorError(9e-3, 5e-3)}}, "wrong"),
        ({"errors": {"output": TensorError(None, 5e-3)}}, "wrong"),
        ({"variant": dataclasses.replace(FASTER, heads=3).to_json()}, "not legal"),
        ({"variant": '{"chunk":64}'}, "not of this version"),
    ],
)
def test_what_could_be_wrong_does_not_ship(tmp_path: Path, changes: dict, message: str) -> None:
    out = tmp_path / "out.sqlite"
    out.write_text("what was there")
    with Store(tmp_path / "db.sqlite") as store:
        tuned(store, **changes)
    with pytest.raises(StoreError, match=message):
        ship(tmp_path / "db.sqlite", out, "v6e")
    assert out.read_text() == "what was there"


def winner_of_a_step(store: Store, step: Step = STEP) -> None:
    where = store.put_environment(ENVIRONMENT), store.put_problem(TRAINED, "step")
    row = step_result(step, errors=CHECKED)
    store.put_result(*where, row)
    store.choose(*where, "compiler", row.variant_id, 1 << 30)


def test_a_training_step_ships_with_its_limit(tmp_path: Path) -> None:
    with Store(tmp_path / "db.sqlite") as store:
        tuned(store)
        winner_of_a_step(store)
    ship(tmp_path / "db.sqlite", tmp_path / "out.sqlite", "v6e")
    with Store(tmp_path / "out.sqlite", read_only=True) as store:
        entries = [e for e in store.entries(winners_only=True) if e.problem == TRAINED]
    (entry,) = entries
    assert entry.result == step_result(errors=CHECKED)
    assert entry.residual_limit_bytes == 1 << 30


def test_a_step_whose_kernels_are_cut_apart_does_not_ship(tmp_path: Path) -> None:
    apart = dataclasses.replace(STEP, backward=dataclasses.replace(STEP.backward, chunk=32))
    with Store(tmp_path / "db.sqlite") as store:
        winner_of_a_step(store, apart)
    with pytest.raises(StoreError, match="not legal: cuts: chunk="):
        ship(tmp_path / "db.sqlite", tmp_path / "out.sqlite", "v6e")


def test_nothing_to_ship_is_an_error(tmp_path: Path) -> None:
    with Store(tmp_path / "db.sqlite") as store:
        tuned(store)
    with pytest.raises(StoreError, match="no winner for v7x"):
        ship(tmp_path / "db.sqlite", tmp_path / "out.sqlite", "v7x")
    with pytest.raises(ValueError, match="v9"):
        ship(tmp_path / "db.sqlite", tmp_path / "out.sqlite", "v9")
    with pytest.raises(StoreError, match="no such file"):
        ship(tmp_path / "absent.sqlite", tmp_path / "out.sqlite", "v6e")
