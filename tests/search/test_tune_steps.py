"""A tuning run of a training step, from the command line to a call: real compiles, real checks."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kdagen.chips import get_chip
from kdagen.cli import main
from kdagen.gradient.step import Step, check_step
from kdagen.gradient.variant import Request
from kdagen.problem import Problem, load_shapes
from kdagen.runtime import dispatch
from kdagen.store.rows import Entry
from kdagen.store.tuned import Store

ROOT = Path(__file__).resolve().parents[2]
SHAPES = """
forward: &forward
  tokens: 64
  heads: 2
step:
  <<: *forward
  residuals: tuned
"""


def tune(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "kdagen.cli", "tune", "--chip", "v6e", "--shape", "step"]
    command += ["--shapes", str(folder / "shapes.yaml"), "--db", str(folder / "db.sqlite")]
    done = subprocess.run(
        [*command, *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def winner(folder: Path) -> Entry:
    with Store(folder / "db.sqlite", read_only=True) as store:
        (found,) = store.entries(winners_only=True)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tune")
    (path / "shapes.yaml").write_text(SHAPES)
    return path


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    return tune(folder, "--trials", "3", "--jobs", "1")


@pytest.fixture
def problem(folder: Path) -> Problem:
    return load_shapes(folder / "shapes.yaml")["step"]


def test_the_winner_is_checked_with_every_gradient(
    folder: Path, output: str, problem: Problem
) -> None:
    result = winner(folder).result
    step = Step.from_dict(json.loads(result.variant))
    assert check_step(step, problem, get_chip("v6e")) is None
    assert result.errors is not None and all(e.ok for e in result.errors.values())
    assert result.errors.keys() == {"output", *Request.everything(problem).wanted}
    assert result.forward_seconds and result.backward_seconds
    assert result.seconds == pytest.approx(result.forward_seconds + result.backward_seconds)
    assert result.residual_bytes and result.temporary_bytes is not None
    with Store(folder / "db.sqlite", read_only=True) as store:
        entries = store.entries()
    assert len([e for e in entries if e.result.status != "illegal"]) == 3


def test_tables_say_forward_gradient_and_memory(folder: Path, output: str) -> None:
    shown = CliRunner().invoke(main, ["show", "--db", str(folder / "db.sqlite")]).stdout
    for text in (output, shown):
        assert "forward + gradient" in text and "residuals, MiB" in text
        assert "temporary, MiB" in text
    assert "chosen under no limit of residuals" in shown


def test_a_call_runs_on_the_winner_from_the_table_that_ships(
    folder: Path, output: str, problem: Problem
) -> None:
    out = folder / "v6e.sqlite"
    command = ["ship", "--chip", "v6e", "--db", str(folder / "db.sqlite"), "--out", str(out)]
    assert CliRunner().invoke(main, command).exit_code == 0
    choice = dispatch.find(problem, get_chip("v6e"), (out,))
    assert choice.origin == "tuned"
    assert isinstance(choice.variant, Step)
    assert choice.variant.to_json() == winner(folder).result.variant
    for part in ("forward", "backward"):
        render = ["render", "--chip", "v6e", "--shape", "step", "--db", str(out)]
        render += ["--gradient"] * (part == "backward")
        rendered = CliRunner().invoke(main, render)
        assert f"def {part}(" in rendered.stdout


# The last, since it changes the winner.
def test_a_limit_takes_the_fastest_of_what_fits(folder: Path, output: str) -> None:
    before = winner(folder)
    assert before.residual_limit_bytes is None
    text = tune(folder, "--trials", "1", "--residual-limit", "0")
    assert text.count("tried a candidate") == 1
    chosen = winner(folder)
    assert chosen.residual_limit_bytes == 0 and chosen.result.residual_bytes == 0
    rebuilt = Step.from_dict(json.loads(chosen.result.variant))
    # of what was known the fastest, with its forward run again
    assert rebuilt == dataclasses.replace(
        Step.from_dict(json.loads(before.result.variant)), residuals="rematerialize"
    )
    again = tune(folder, "--trials", "3")
    assert "tried a candidate" not in again and winner(folder) == before
