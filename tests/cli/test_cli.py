"""Bad input to the commands is one line that names it, and never a traceback."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kdagen.chips import CHIPS
from kdagen.cli import main
from kdagen.report import words

SHAPES = "good: {tokens: 64, heads: 2}\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KDAGEN_DB", str(tmp_path / "user.sqlite"))
    (tmp_path / "shapes.yaml").write_text(SHAPES)

    def invoke(*arguments: str) -> Result:
        result = CliRunner().invoke(main, arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return invoke


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "--shapes", "shapes.yaml"], "--chip"),
        (["tune", "--chip", "v9", "--shapes", "shapes.yaml"], "'v9' is not one of"),
        (["tune", "--chip", "v6e", "--shapes", "absent.yaml"], "absent.yaml"),
        (["tune", "--chip", "v6e", "--shapes", "shapes.yaml", "--trials", "0"], "--trials"),
        (["tune", "--chip", "v6e", "--shapes", "shapes.yaml", "--budget", "-1"], "--budget"),
        (["tune", "--chip", "v6e", "--shapes", "shapes.yaml", "--shape", "bad"], "good"),
        (["render", "--chip", "v6e", "--shape", "unheard-of"], "unheard-of"),
        (["render", "--chip", "v6e", "--shape", "bad", "--shapes", "shapes.yaml"], "good"),
        (
            [
                "render",
                "--chip=v6e",
                "--shape=good",
                "--shapes=shapes.yaml",
                "--default",
                "--variant={}",
            ],
            "--variant",
        ),
        (["render", "--chip", "v6e"], "--problem"),
        (["render", "--chip", "v6e", "--shape", "good", "--problem", "{}"], "--problem"),
        (["show", "--db", "absent.sqlite"], "absent.sqlite"),
        (["chips", "--chip", "tpu"], "'tpu' is not one of"),
        (["ship", "--chip", "v6e"], "--out"),
    ],
)
def test_usage_errors_exit_with_2(run, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a list", "must map names of shapes"),
        ("good: {tokens: 64}", "heads: missing"),
        ("good: {tokens: 64, heads: 2, gate: soft}", "gate: got 'soft'"),
        ("{", "not YAML"),
    ],
)
def test_a_bad_shapes_file_exits_with_1_and_names_the_fault(
    run, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "shapes.yaml").write_text(content)
    result = run("tune", "--chip", "v6e", "--shapes", "shapes.yaml")
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.startswith("Error: ")


def test_a_file_that_is_no_table_exits_with_1(run, tmp_path: Path) -> None:
    (tmp_path / "user.sqlite").write_text("a letter")
    for arguments in (
        ["show"],
        ["tune", "--chip", "v6e", "--shapes", "shapes.yaml"],
        ["ship", "--chip", "v6e", "--out", "out.sqlite"],
    ):
        result = run(*arguments)
        assert result.exit_code == 1
        assert "not a results database" in result.stderr


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"chunks": "many"}', "chunks: got 'many'"),
        ('{"tiles": 3}', "tiles"),
        ('{"heads": 3}', "not legal"),
    ],
)
def test_a_bad_variant_exits_with_1_and_names_the_fault(run, parameters: str, message: str) -> None:
    shape = ["--chip", "v6e", "--shape", "good", "--shapes", "shapes.yaml"]
    result = run("render", *shape, "--variant", parameters)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("chip", CHIPS)
def test_render_prints_the_default_where_nothing_was_tuned(run, chip: str) -> None:
    result = run("render", "--chip", chip, "--shape", "good", "--shapes", "shapes.yaml")
    assert result.exit_code == 0, result.output
    assert f"no table has a winner on {chip}" in result.stderr
    compile(result.stdout, "rendered", "exec")


@pytest.mark.parametrize("gate", ["gate: softplus", "gate: bounded, lower_bound: -5.0"])
def test_a_rendered_module_names_the_command_that_prints_it(run, tmp_path: Path, gate: str) -> None:
    (tmp_path / "shapes.yaml").write_text(
        f"good: {{tokens: 640, heads: 6, batch: 2, qk_l2norm: true, final_state: true, {gate}}}\n"
    )
    shape = ["--chip", "v5p", "--shape", "good", "--shapes", "shapes.yaml"]
    source = run("render", *shape).stdout
    (command,) = re.findall(r"kdagen (render .*)", source)
    assert run(*shlex.split(command)).stdout == source


@pytest.mark.parametrize(
    ("fields", "message"),
    [("{", "problem: not JSON"), ("3", "JSON object"), ('{"heads": 1}', "tokens: missing")],
)
def test_a_bad_problem_exits_with_1_and_names_the_fault(run, fields: str, message: str) -> None:
    result = run("render", "--chip", "v6e", "--problem", fields)
    assert result.exit_code == 1
    assert message in result.stderr


def test_no_command_makes_a_table_by_looking(run, tmp_path: Path) -> None:
    run("show")
    run("ship", "--chip", "v6e", "--out", "out.sqlite")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shapes.yaml"]


def test_chips_says_what_this_machine_compiles_for(run) -> None:
    result = run("chips", "--chip", "v6e", "--chip", "v5e")
    assert result.exit_code == 0
    lines = " ".join(result.stdout.split())
    assert "TPU v6 lite" in lines and "TPU v5 lite" in lines
    assert "yes" in lines
    for name in ("v6e", "v5e"):
        assert words.calibration(CHIPS[name]) in lines
