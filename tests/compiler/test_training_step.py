"""What a comparison says of kdagen's training step against a peer's, and which step it compiles."""

import dataclasses

import jax
import jaxlib
import pytest

from kdagen.chips import get_chip
from kdagen.generate import generate
from kdagen.gradient import source
from kdagen.gradient.step import keeping, paired
from kdagen.gradient.variant import Request
from kdagen.problem import TUNED, Problem
from kdagen.runtime import dispatch
from kdagen.space import default_variant
from kdagen.store.rows import Environment
from kdagen.store.tuned import Store
from tests.store.rows import step_result

V7X = get_chip("v7x")
PROBLEM = Problem(tokens=8192, heads=32, gate="bounded", lower_bound=-5.0, qk_l2norm=True)


@pytest.fixture
def training_step(benchmark_module):
    return benchmark_module("training_step")


@pytest.fixture
def program(benchmark_module):
    made = benchmark_module("programs").Program

    def build(kernels, around, temporary_bytes, uncounted=()):
        return made(
            kernels=kernels,
            around=around,
            attributed={},
            uncounted=uncounted,
            kernel_bytes=0,
            bytes=0,
            copied_bytes=0,
            offloaded_bytes=0,
            offloaded_seconds=0.0,
            temporary_bytes=temporary_bytes,
        )

    return build


def test_the_demands_are_held_against_kernels_whole_step_and_temporaries(training_step, program):
    theirs = program({"a": 1e-3, "b": 1e-3}, 1e-3, 900)
    time, memory = training_step.demands(program({"c": 0.6e-3}, 0.6e-3, 310), theirs)
    assert "kernels 30.0% (met), whole step 40.0% (missed); asked: at most 35%" in time
    assert "temporaries 34.4% (missed); asked: at most 33%" in memory


def test_operations_without_a_time_leave_open_what_they_could_change(training_step, program):
    whole = program({"a": 1.0}, 0.0, 1)
    short = program({"a": 1.0}, 0.0, 1, uncounted=("fusion",))
    fast, slow = program({"a": 0.3}, 0.0, 0), program({"a": 0.4}, 0.0, 0)
    unknown = program({"a": 0.3}, 0.0, 0, uncounted=("fusion",))
    said = lambda ours, theirs: training_step.demands(ours, theirs)[0]  # noqa: E731
    assert "whole step at most 30.0% (met)" in said(fast, short)
    assert "whole step at most 40.0% (open)" in said(slow, short)
    assert "whole step at least 30.0% (open)" in said(unknown, whole)
    assert "whole step about 30.0% (open)" in said(unknown, short)


@pytest.fixture
def no_packaged_tables(monkeypatch):
    monkeypatch.setattr(dispatch, "packaged_tables", list)
    yield
    dispatch.configure()


def a_step(residuals):
    problem = dataclasses.replace(PROBLEM, residuals=residuals)
    return paired(problem, default_variant(PROBLEM, V7X), (V7X,))


def test_the_step_is_that_of_the_table_which_calls_run_on(
    training_step, tmp_path, no_packaged_tables
):
    path, tuned = tmp_path / "mine.sqlite", a_step("rematerialize")  # not the default policy
    environment = Environment(
        chip=V7X.name,
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        libtpu="0",
        kdagen="0",
        generator=source.step_hash(),
        model="m",
    )
    trained = dataclasses.replace(PROBLEM, residuals=TUNED)
    with Store(path) as store:
        where = store.put_environment(environment), store.put_problem(trained, "step")
        row = step_result(tuned)
        store.put_result(*where, row)
        store.choose(*where, "compiler", row.variant_id)
    assert training_step.dispatched(PROBLEM, V7X, path) == (tuned, "winner of mine.sqlite")
    assert dispatch.choose(trained, V7X).variant == tuned


def test_without_a_tuned_row_the_origin_says_so(training_step, no_packaged_tables):
    step, origin = training_step.dispatched(PROBLEM, V7X, None)
    assert step == a_step(TUNED)
    assert origin.startswith("default step: ") and "is not tuned for v7x" in origin


@pytest.mark.parametrize(("residuals", "forwards"), [("save", 1), ("rematerialize", 2)])
def test_the_kernels_of_a_step_are_known_by_name(training_step, residuals, forwards):
    step = a_step(residuals)
    names = training_step.kernel_names(PROBLEM, step, V7X)
    assert len(names) == forwards + 1
    kept = keeping(PROBLEM)
    request = Request.of(("query", "key", "value", "gate", "beta", "a_log", "delta_time_bias"))
    made = [
        generate(PROBLEM if residuals == "rematerialize" else kept, step.first, V7X),
        generate(kept, step.forward, V7X),
        source.generate(kept, request, step.backward, V7X),
    ]
    for name in names:
        assert any(f'"{name}"' in one.source or f"'{name}'" in one.source for one in made)
