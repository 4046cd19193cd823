"""Whole tuning runs, by the command line in a process of its own: real compiles, real checks."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kdagen.chips import get_chip
from kdagen.cli import main
from kdagen.measure import kinds
from kdagen.problem import load_shapes
from kdagen.report.words import calibration
from kdagen.search import environment
from kdagen.search.shape import ShapeSearch
from kdagen.store.tuned import Store

ROOT = Path(__file__).resolve().parents[2]
SHAPES = """
small: &small
  tokens: 256
  heads: 1
  gate: bounded
  lower_bound: -5.0
  qk_l2norm: true
again: *small
"""


def start(folder: Path, *options: str, root: Path = ROOT) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kdagen.cli", "tune", "--chip", "v6e"]
    command += ["--shapes", str(folder / "shapes.yaml"), "--db", str(folder / "db.sqlite")]
    return subprocess.Popen(
        [*command, *options],
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=root,
        # a shell's background job ignores Ctrl-C, and so would what it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(lines: Iterator[str], pattern: str) -> str:
    seen = []
    for line in lines:
        seen.append(line)
        if re.search(pattern, line):
            return line
    raise AssertionError(f"no line has {pattern!r}:\n{''.join(seen)}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tune")
    (path / "shapes.yaml").write_text(SHAPES)
    return path


@pytest.fixture(scope="module")
def interrupted(folder: Path) -> str:
    """The output of a run that lost a worker, and that Ctrl-C ended."""
    with start(folder, "--trials", "1000", "--jobs", "2") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        until(lines, r"^\[1/\d+\] small: tried a candidate")
        os.kill(children(process.pid)[0], signal.SIGKILL)
        until(lines, r"died: its process ended by signal SIGKILL")
        until(lines, r"best so far [\d.]+ us modelled")
        process.send_signal(signal.SIGINT)
        rest = "".join(lines)
        assert process.wait() == 130
    return rest


def rows(folder: Path) -> list:
    with Store(folder / "db.sqlite", read_only=True) as store:
        return store.entries()


def test_ctrl_c_says_how_to_go_on(folder: Path, interrupted: str) -> None:
    assert "(best so far)" in interrupted
    assert "not checked" in interrupted
    command = until(iter(interrupted.splitlines()), "to go on from here")
    words = shlex.split(command.split("here: ")[1])
    assert words[:4] == ["kdagen", "tune", "--chip", "v6e"]
    assert str(folder / "db.sqlite") in words
    assert "died: its process ended by signal SIGKILL" in interrupted


@pytest.fixture(scope="module")
def resumed(folder: Path, interrupted: str) -> str:
    """The output of a run that goes on, to two candidates more."""
    tried = len(rows(folder))
    with start(folder, "--trials", str(tried + 2), "--jobs", "2") as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert f"{tried} candidates known from before" in output
    assert output.count("tried a candidate") == 2
    return output


def test_the_table_says_what_the_winner_is_worth(resumed: str) -> None:
    assert "modelled time" in resumed
    assert 'source "compiler"' in resumed
    assert calibration(get_chip("v6e")) in resumed
    assert re.search(r"libtpu \d", resumed)
    assert "against default" in resumed
    assert re.search(r"[\d.]+ / 32\b", resumed)


def test_two_names_of_one_problem_are_tuned_once(folder: Path, resumed: str) -> None:
    assert "again: the same problem as small" in resumed
    assert {entry.name for entry in rows(folder)} == {"small"}


def test_every_candidate_is_a_row(folder: Path, resumed: str) -> None:
    entries = rows(folder)
    results = [entry.result for entry in entries]
    (problem,) = set(load_shapes(folder / "shapes.yaml").values())
    assert {entry.problem for entry in entries} == {problem}
    (made_with,) = {entry.environment for entry in entries}
    assert made_with.libtpu[0].isdigit()
    assert len(made_with.generator) == len(made_with.model) == 64
    assert [r.status for r in results].count("died") == 1
    assert sum(r.is_default for r in results) == 1
    assert len({r.variant_id for r in results}) == len(results)
    known = get_chip("v6e").calibration
    assert known is not None
    (winner,) = [entry.result for entry in entries if entry.is_winner]
    assert winner.errors is not None
    for name, error in winner.errors.items():
        assert error.ok
        assert error.bound in {kind.bound(name, problem) for kind in kinds.telling(problem)}
    for r in results:
        if r.status == "ok":
            assert r.source == "compiler" and r.model_error == known.mean_error and r.loop_bundles
            assert r.seconds is not None and winner.seconds <= r.seconds * 1.006
        if not r.checked and r.status == "ok":
            assert r is not winner


def test_a_complete_run_is_answered_from_the_table(folder: Path, resumed: str) -> None:
    before = (folder / "db.sqlite").read_bytes()
    with start(folder, "--trials", "2") as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "tried a candidate" not in output
    assert "0 candidates in" in output
    assert len((folder / "db.sqlite").read_bytes()) == len(before)


def test_another_environment_starts_anew(
    folder: Path, resumed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = set(load_shapes(folder / "shapes.yaml").values())
    chip = get_chip("v6e")
    with Store(folder / "db.sqlite") as store:
        known = len(store.entries())
        same = store.put_environment(environment.current(chip))
        monkeypatch.setattr(environment, "libtpu_version", lambda: "99.0")
        other = store.put_environment(environment.current(chip))
        assert same != other
        counts = [
            ShapeSearch("small", problem, chip, store, e, "compiler", 24, 0).taken_over
            for e in (same, other)
        ]
    assert counts == [known, 0]


def test_code_that_changes_during_a_run_ends_it(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    shutil.copytree(ROOT / "kdagen", root / "kdagen")
    (tmp_path / "shapes.yaml").write_text(SHAPES)
    with start(tmp_path, "--trials", "1000", "--jobs", "1", root=root) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        until(lines, r"^\[1/\d+\] small: tried a candidate")
        with (root / "kdagen/_templates/kda_forward.py.j2").open("a") as template:
            template.write("# changed\n")
        until(lines, r"^Error: .*changed during the run")
        assert process.wait() == 1
    # At most one more had ended before the change was made.
    assert 1 <= len(rows(tmp_path)) <= 2


def test_show_render_and_ship_read_the_table(folder: Path, resumed: str) -> None:
    db = str(folder / "db.sqlite")
    runner = CliRunner()
    (winner,) = [entry.result for entry in rows(folder) if entry.is_winner]

    shown = runner.invoke(main, ["show", "--db", db])
    assert shown.exit_code == 0, shown.output
    assert "not measured" in shown.output
    every = runner.invoke(main, ["show", "--db", db, "--all", "--chip", "v6e", "--shape", "small"])
    assert "died" in every.output and "not checked" in every.output

    render = ["render", "--chip", "v6e", "--shape", "small", "--db", db]
    rendered = runner.invoke(main, render)
    assert rendered.exit_code == 0, rendered.output
    assert winner.variant_id in rendered.stdout
    assert f"winner of {db}" in rendered.stderr
    compile(rendered.stdout, "rendered", "exec")
    again = runner.invoke(main, [*render, "--variant", winner.variant])
    assert again.stdout == rendered.stdout
    assert "default" in runner.invoke(main, [*render, "--default"]).stderr

    out = folder / "v6e.sqlite"
    shipped = runner.invoke(main, ["ship", "--chip", "v6e", "--db", db, "--out", str(out)])
    assert shipped.exit_code == 0, shipped.output
    from_shipped = runner.invoke(
        main, ["render", "--chip", "v6e", "--shape", "small", "--db", str(out)]
    )
    assert from_shipped.stdout == rendered.stdout
