"""Bad input to the commands is one line that names it, and never a traceback."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sqlite3
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kdagen.chips import CHIPS, get_chip
from kdagen.cli import main
from kdagen.generate import code_hash, generate
from kdagen.report import words
from kdagen.runtime import dispatch
from kdagen.store.tuned import Store
from tests.store.rows import ENVIRONMENT, FASTER, PROBLEM, tuned

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
        (["tune", "--chip", "v6e", "--shapes", "shapes.yaml", "--budget", "nan"], "--budget"),
        (["tune", "--chip", "v6e", "--shapes", "shapes.yaml", "--budget", "inf"], "--budget"),
        (["tune", "--chip", "v6e", "--shapes", "shapes.yaml", "--shape", "bad"], "good"),
        (["tune", "--chip", "v6e"], "--problem"),
        (
            ["tune", "--chip=v6e", "--shapes=shapes.yaml", "--residual-limit=1MiB"],
            "no shape is trained",
        ),
        (["tune", "--chip=v6e", "--shapes=shapes.yaml", "--residual-limit=1 pint"], "512MiB"),
        (["tune", "--chip=v6e", "--shapes=shapes.yaml", "--residual-limit=-1"], "512MiB"),
        (["tune", "--chip", "v6e", "--shapes", "shapes.yaml", "--problem", "{}"], "--problem"),
        (["tune", "--chip", "v6e", "--problem", "{}", "--shape", "good"], "--shape"),
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


def test_a_temporary_folder_that_the_compiler_cannot_take_exits_with_1(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    result = run("tune", "--chip", "v6e", "--shapes", "shapes.yaml")
    assert result.exit_code == 1
    assert "TMPDIR" in result.stderr and "two words" in result.stderr


@pytest.mark.parametrize("out", ["shapes.yaml/table.sqlite", "a/" + "long" * 99, "/proc/table"])
def test_a_file_that_cannot_be_written_exits_with_1(run, tmp_path: Path, out: str) -> None:
    with Store(tmp_path / "user.sqlite") as store:
        tuned(store)
    result = run("ship", "--chip", "v6e", "--out", out)
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr and out in result.stderr


def test_an_empty_file_is_called_so(run, tmp_path: Path) -> None:
    (tmp_path / "user.sqlite").touch()
    result = run("show")
    assert result.exit_code == 1
    assert "it is empty" in result.stderr


def test_a_table_of_a_newer_version_is_refused_by_all_that_open_it(run, tmp_path: Path) -> None:
    with Store(tmp_path / "user.sqlite") as store:
        tuned(store)
        store.db["_sqlite_migrations"].insert(
            {"migration_set": "kdagen", "name": "m999_later", "applied_at": ""}
        )
    for arguments in (
        ["show"],
        ["tune", "--chip", "v6e", "--shapes", "shapes.yaml"],
        ["ship", "--chip", "v6e", "--out", "out.sqlite"],
    ):
        result = run(*arguments)
        assert result.exit_code == 1
        assert "a newer version of kdagen made it (m999_later)" in result.stderr


def change(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement)


def test_a_problem_of_another_version_is_left_out_and_named(run, tmp_path: Path) -> None:
    path = tmp_path / "user.sqlite"
    other = dataclasses.replace(PROBLEM, heads=4, value_heads=4)
    with Store(path) as store:
        tuned(store)
        store.put_problem(other, "other")
    change(path, """UPDATE problems SET problem = '{"colour": 1}' WHERE name = 'other'""")
    shown = run("show", "--db", str(path))
    assert shown.exit_code == 0 and "80.0 us" in shown.stdout
    rendered = run("render", "--chip", "v6e", "--shape", "small", "--db", str(path))
    assert rendered.exit_code == 0
    assert "left out 'other'" in rendered.stderr and "colour" in rendered.stderr
    change(path, "UPDATE results SET problem_id = (SELECT id FROM problems WHERE name = 'other')"
                 " WHERE id = 1")  # fmt: skip
    for arguments in (["show", "--db", str(path)], ["ship", "--chip=v6e", "--out=out.sqlite"]):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert "left out 'other'" in result.output and "colour" in result.output


@pytest.mark.parametrize("content", ["3", "[1]", '{"colour": 1}'])
def test_a_variant_of_another_version_is_shown_and_not_shipped(
    run, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "user.sqlite"
    with Store(path) as store:
        tuned(store)
    change(path, f"UPDATE results SET variant = '{content}'")
    shown = run("show", "--db", str(path))
    assert shown.exit_code == 0 and content in shown.stdout
    shipped = run("ship", "--chip", "v6e", "--out", "out.sqlite")
    assert shipped.exit_code == 1 and "not of this version" in shipped.stderr
    assert not (tmp_path / "out.sqlite").exists()


def test_rows_of_an_unknown_chip_are_left_out_and_counted(run, tmp_path: Path) -> None:
    path = tmp_path / "user.sqlite"
    with Store(path) as store:
        tuned(store)
        tuned(store, dataclasses.replace(ENVIRONMENT, chip="v99"))
    shown = run("show", "--db", str(path))
    assert shown.exit_code == 0
    assert "left out 2 rows of v99, an unknown chip" in shown.stdout
    assert shown.stdout.count("80.0 us") == 1


def test_ctrl_c_exits_with_130_wherever_it_comes(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for module, name in (("kdagen.cli", "load_shapes"), ("kdagen.search.run", "tune")):
        with monkeypatch.context() as patch:
            patch.setattr(f"{module}.{name}", interrupted)
            result = run("tune", "--chip", "v6e", "--shapes", "shapes.yaml")
        assert result.exit_code == 130
        assert "Traceback" not in result.output


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
def test_render_prints_the_default_where_nothing_was_tuned(
    run, chip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdagen.store.lookup.packaged_tables", list)
    result = run("render", "--chip", chip, "--shape", "good", "--shapes", "shapes.yaml")
    assert result.exit_code == 0, result.output
    assert f"is not tuned for {chip}; it runs on the default variant" in result.stderr
    compile(result.stdout, "rendered", "exec")


def test_render_prints_what_a_call_runs_on(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdagen.store.lookup.packaged_tables", list)
    monkeypatch.setattr(dispatch, "packaged_tables", list)
    path, chip = tmp_path / "user.sqlite", get_chip("v6e")
    with Store(path) as store:
        tuned(store, dataclasses.replace(ENVIRONMENT, generator=code_hash()))
    near = dataclasses.replace(PROBLEM, initial_state=True)
    for problem, origin in ((PROBLEM, "tuned"), (near, "nearest")):
        result = run("render", "--chip", "v6e", "--problem", problem.to_json())
        choice = dispatch.find(problem, chip, (path,))
        assert (choice.variant, choice.origin) == (FASTER, origin)
        assert result.stdout == generate(problem, FASTER, chip).source
        assert (choice.note or f"winner of {path}") in result.stderr


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
    ("text", "size"),
    [
        ("7", 7),
        ("512MiB", 512 << 20),
        ("1.5 gib", 3 << 29),
        ("2KB", 2000),
        ("0", 0),
    ],
)
def test_sizes_have_units(run, text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def remember(plan, *_):
        seen.append(plan.residual_limit_bytes)
        raise KeyboardInterrupt

    monkeypatch.setattr("kdagen.search.run.tune", remember)
    fields = '{"tokens": 64, "heads": 2, "residuals": "tuned"}'
    run("tune", "--chip", "v6e", "--problem", fields, "--residual-limit", text)
    assert seen == [size]


def test_a_limit_that_nothing_fits_is_said_with_the_least_that_is_kept(run) -> None:
    fields = '{"tokens": 8192, "heads": 32, "residuals": "save"}'
    command = ["tune", "--chip", "v6e", "--problem", fields, "--residual-limit", "1MiB"]
    result = run(*command)
    assert result.exit_code == 1
    # a state of 128 x 128 in bfloat16 for every head and chunk of 64 tokens
    assert "keeps 128.0 MiB at least, of 1.0 allowed" in " ".join(result.stdout.split())


def test_the_forward_of_a_training_step_names_the_command_that_prints_it(run) -> None:
    fields = '{"tokens": 640, "heads": 4, "residuals": "tuned"}'
    source = run("render", "--chip", "v6e", "--problem", fields, "--default").stdout
    (command,) = re.findall(r"kdagen (render .*)", source)
    assert run(*shlex.split(command)).stdout == source


def test_render_prints_either_kernel_of_a_training_step(run) -> None:
    (Path("shapes.yaml")).write_text("step: {tokens: 640, heads: 4, residuals: rematerialize}\n")
    shape = ["render", "--chip", "v6e", "--shape", "step", "--shapes", "shapes.yaml", "--default"]
    forward, backward = run(*shape), run(*shape, "--gradient")
    assert "def forward(" in forward.stdout and "def backward(" in backward.stdout
    saving = run(*shape[:-1], "--variant", '{"residuals": "save"}')
    assert saving.exit_code == 1 and "policy" in saving.stderr
    other = run(*shape[:-1], "--gradient", "--variant", '{"backward": {"weight_depth": 128}}')
    assert other.stdout not in ("", backward.stdout)
    apart = run(*shape[:-1], "--variant", '{"backward": {"chunk": 32}}')
    assert apart.exit_code == 1 and "not legal for this shape on v6e: cuts" in apart.stderr
    alone = run(*shape[:-1], "--gradient", "--variant", '{"weight_depth": 128}')
    assert alone.exit_code == 1 and "parameters of a forward" in alone.stderr
    (Path("shapes.yaml")).write_text(SHAPES)
    plain = run("render", "--chip=v6e", "--shape=good", "--shapes=shapes.yaml", "--gradient")
    assert plain.exit_code == 1 and "gradient: the shape is not trained" in plain.stderr


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


def test_what_no_result_is_of_is_named(run):
    result = run("show", "--chip=v7x", "--shape=nosuch")
    assert result.exit_code == 1
    assert "no results for --chip v7x --shape nosuch;" in result.output
