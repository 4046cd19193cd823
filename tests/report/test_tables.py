"""Tables of what is stored."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from kdagen.report import tables
from kdagen.store.tuned import Store
from tests.store.rows import ENVIRONMENT, FASTER, STEP, TRAINED, result, step_result, tuned


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "tuned.sqlite"
    with Store(path) as store:
        where = tuned(store)
        broken = dataclasses.replace(FASTER, lag=1)
        store.put_result(*where, result(broken, status="vmem", reason="too much", seconds=None))
        tuned(store, dataclasses.replace(ENVIRONMENT, chip="v7x", libtpu="0.0.52"))
    return path


def text_of(db: Path, **options) -> str:
    console = Console(width=200, record=True, force_terminal=False)
    with console.capture() as captured:
        shown = tables.print_tables(
            console, [db], **{"chip": None, "name": None, "every": False, **options}
        )
    assert shown == bool(captured.get())
    return captured.get()


def test_winners_stand_against_their_default(db: Path) -> None:
    text = text_of(db)
    assert text.count("1.25x") == 2
    assert "too much" not in text
    assert "known error of the model of v6e" in text
    assert "known error of the model of v7x" in text
    assert "libtpu 0.0.52" in text


def test_a_training_step_has_its_parts_and_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "tuned.sqlite"
    with Store(path) as store:
        tuned(store)
        where = store.put_environment(ENVIRONMENT), store.put_problem(TRAINED, "step")
        row = step_result(temporary_bytes=3 << 19)
        store.put_result(*where, row)
        store.choose(*where, "compiler", row.variant_id, 16 << 20)
        large = dataclasses.replace(STEP, residuals="rematerialize")
        store.put_result(*where, step_result(large, reason="code_size: too large"))
    text = text_of(path, name="step")
    for part in ("500.0 us", "100.0 us + 400.0 us", "8.0", "1.5", "save; forward: chunk 64"):
        assert part in text
    assert "chosen under limit 16.0 MiB of residuals" in text
    assert "forward + gradient" not in text_of(path, name="small")
    assert "ok: code_size: too large" in text_of(path, name="step", every=True)


def test_every_candidate_has_its_state(db: Path) -> None:
    text = text_of(db, every=True, chip="v6e")
    assert "vmem: too much" in text
    assert "not checked" in text
    assert text.count("winner") == 1
    assert "v7x" not in text


def test_nothing_is_shown_of_what_is_not_there(db: Path) -> None:
    assert text_of(db, name="absent") == ""


@pytest.mark.parametrize("width", [80, 120])
def test_a_narrow_terminal_loses_nothing(db: Path, width: int) -> None:
    with Store(db, read_only=True) as store:
        rows = store.entries(chip="v6e")
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        table, notes = tables.entries(rows, every=False)
        console.print(table)
    for part in ("80.0 us", "1.25x", "3.0e-03", "compiler"):
        assert part in captured.get()
    (note,) = notes
    assert note.startswith("1: chunk 64")
