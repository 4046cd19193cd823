"""The table of errors: what it runs, what it holds against what, and that it sees what is wrong."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kdagen.measure import kinds
from kdagen.measure.kinds import Kind
from kdagen.problem import RESIDUAL_POLICIES, Problem

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "accuracy.py"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPT.with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up, and one benchmark the other
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def error_table():
    return load("error_table")


@pytest.fixture(scope="module")
def table(error_table):
    return load("accuracy")


def row(error_table, error, bound=5e-3, asked=True, **facts):
    usual = dict(
        implementation="pallas", tensor="output", dtype="bfloat16", gate="log_decay",
        gate_kind="-1", keys="random", chunk=64, width="128x128", how="tree",
    )  # fmt: skip
    return error_table.Row(**{**usual, **facts}, error=error, bound=bound, asked=asked)


def test_a_row_is_outside_above_its_bound_or_where_it_is_not_finite(error_table):
    assert not row(error_table, 5e-3).outside
    assert row(error_table, 5.1e-3).outside and row(error_table, float("inf")).outside
    assert not row(error_table, 0.5, asked=False).outside
    assert row(error_table, float("inf"), asked=False).outside


def test_the_row_nearest_to_its_bound_is_the_worst(error_table):
    rows = [
        row(error_table, 4e-3),
        row(error_table, 9e-3, 1e-2),
        row(error_table, 1e-3, dtype="float32"),
    ]
    assert error_table.worst(rows, lambda row: row.dtype) == rows[1:]


def test_an_error_that_jumps_on_the_ladder_of_gates_is_seen(table):
    errors = {(Kind(gate), "output"): 3e-3 for gate in table.LADDER}
    errors[Kind("-6"), "output"] = 5.9e-3
    assert not list(table.jumps(errors))
    errors[Kind("-22"), "output"] = 1.3e-2
    (text,) = table.jumps(errors)
    assert "1.3e-02 at a gate of -22, 5.9e-03" in text
    errors[Kind("-0.001"), "output"] = float("inf")
    assert list(table.jumps(errors))


def test_an_error_that_grows_along_a_sequence_is_seen(table):
    problem = Problem(tokens=table.PARTS[-1], heads=2)
    given = [Kind("0"), Kind("-0.05")]
    expected = np.ones((2, 1, problem.tokens, 1))
    got = expected * 1.003
    assert not list(table.growth(problem, given, got, expected))
    got[1, :, -2048:] = 1.005
    (text,) = table.growth(problem, given, got, expected)
    assert "-0.05" in text and "5.0e-03" in text


def test_the_markdown_has_a_line_for_every_kind_with_the_worst_of_it(error_table):
    rows = [
        row(error_table, 4e-3),
        row(error_table, 4.5e-3, chunk=32),
        row(error_table, 1e-3, tensor="final_state"),
        row(error_table, 7e-3, 8e-3, tensor="beta"),
        row(error_table, 0.3, asked=False, keys="parallel"),
    ]
    lines = error_table.markdown(rows).splitlines()
    assert len(lines) == 3
    assert lines[2] == (
        "| pallas | bfloat16 | log_decay | -1 | random | 4.5e-03 of 5.0e-03 |  | 7.0e-03 of "
        "8.0e-03 |  |"
    )


def test_all_that_the_contract_lists_is_run(table):
    sets = list(table.data_sets(table.parse([])))
    for dtype in ("bfloat16", "float32"):
        mine = [data for data in sets if data.problem.dtype == dtype]
        seen = {(data.problem.gate, kind) for data in mine for kind in data.kinds}
        for data in mine:
            assert {(data.problem.gate, kind) for kind in kinds.every(data.problem)} <= seen
        problems = [data.problem for data in mine]
        assert {(p.key_dim, p.value_dim) for p in problems} == set(table.WIDTHS)
        assert {p.layout for p in problems} == {"HBTD", "BTHD"}
        assert {1, 4096} <= {p.tokens for p in problems}
        assert any(p.value_heads > p.heads for p in problems)
        for data in (data for data in mine if data.kinds == kinds.every(data.problem)):
            facts = kinds.with_heads(data.problem, data.kinds)
            variants = [v for _, v in table.kernels(data, facts, table.CHUNKS)]
            assert {v.chunk for v in variants if not isinstance(v, str)} == set(table.CHUNKS)
    quick = list(table.data_sets(table.parse(["--quick"])))
    assert 0 < len(quick) < len(sets) / 2
    assert {data.problem.gate for data in quick if data.differentiated} == set(kinds.GATES)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gate", kinds.GATES)
def test_gradients_of_kernels_are_run_in_every_way(table, gate, dtype):
    options = table.parse(["--dtype", dtype, "--gate", gate])
    found = set()
    for data in table.data_sets(options):
        if not data.differentiated:
            # long, and of writes that reflect: what is told of there is the state
            assert data.problem.tokens == 1024 and all(kind.beta_above_one for kind in data.kinds)
            continue
        facts = kinds.with_heads(data.problem, data.kinds * data.copies)
        made = [(p.precision, step) for p, step in table.gradients(data, facts, options)]
        assert made and not any(isinstance(step, str) for _, step in made), data
        found |= {(told, s.backward.chunk, s.backward.sub_block, s.residuals) for told, s in made}
    precisions = ("default", "high") if dtype == "bfloat16" else ("default",)
    sub_blocks = (1, 16) if gate == "bounded" else (1,)
    ways = set(itertools.product(precisions, table.CHUNKS, sub_blocks, RESIDUAL_POLICIES))
    if dtype == "bfloat16":
        ways.add(("highest", 64, sub_blocks[-1], "save"))
    assert found == ways


def test_a_call_that_no_kernel_serves_is_counted_with_the_reason(table):
    (reason,) = table.variants(Problem(tokens=64, heads=1), [48], every=True)
    assert reason.startswith("chunk 48: values: chunk=48: it may be 32, 64, 128")


@pytest.mark.parametrize("width", ["8", "8x", "axb"])
def test_a_width_is_two_numbers(table, width, capsys):
    with pytest.raises(SystemExit):
        table.parse(["--width", width])
    assert "it must be K and V" in capsys.readouterr().err


def test_the_whole_runs_and_writes_its_table(tmp_path):
    out = tmp_path / "table.md"
    command = [
        sys.executable, str(SCRIPT), "--quick", "--dtype", "float32", "--gate", "bounded",
        "--implementation", "recurrent", "--implementation", "xla_chunked", "--width", "8x4",
        "--no-gradients", "--width", "100x129", "--jobs", "1", "--out", str(out),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].endswith("0 outside; 0 grow; 0 calls that no kernel serves") or (
        ", 0 outside; the worst is" in lines[-1]
    )
    assert {line.split()[0] for line in lines[1:-1]} == {"xla_chunked", "recurrent"}
    assert "[1/1, " in done.stderr
    page = out.read_text()
    assert page.startswith("# Accuracy") and page.count("\n| recurrent | float32 | bounded |") > 5
