"""From tables that the store wrote to the variant of a call."""

import dataclasses
import importlib.metadata
import json
import shlex
import sqlite3
from pathlib import Path

import jax
import pytest

from kdagen.chips import CHIPS, get_chip
from kdagen.generate import code_hash
from kdagen.gradient.source import step_hash
from kdagen.gradient.step import paired
from kdagen.problem import Problem, load_shapes
from kdagen.runtime import dispatch
from kdagen.runtime.table import TableError, packaged_tables, read_table
from kdagen.runtime.target import KdagenWarning, NoKernelError, forget_warnings
from kdagen.search.choice import parse_problem
from kdagen.space import default_variant
from kdagen.store.rows import Environment
from kdagen.store.tuned import Store
from kdagen.variant import Variant, check
from tests.store.rows import result

EXAMPLES = Path(__file__).parents[2] / "examples" / "shapes.yaml"
V6E = get_chip("v6e")
PROBLEM = Problem(tokens=2048, heads=8, gate="bounded", lower_bound=-5.0, qk_l2norm=True)
DEFAULT = default_variant(PROBLEM, V6E)
FASTER = dataclasses.replace(DEFAULT, sub_block=16)
OTHER = dataclasses.replace(DEFAULT, recurrence_span=7)
HERE = Environment(
    chip="v6e",
    jax=jax.__version__,
    jaxlib=jax.__version__,
    libtpu=importlib.metadata.version("libtpu"),
    kdagen="0.1.0",
    generator=code_hash(),
    model="m",
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    # what ships with the package would serve some of these problems
    monkeypatch.setattr(dispatch, "packaged_tables", list)
    dispatch.configure()
    forget_warnings()
    yield
    dispatch.configure()


@pytest.fixture
def table(tmp_path):
    """Writes winners, (environment, problem, variant, source) each, and makes dispatch read them.

    The folder's name has characters that a URI must escape.
    """
    path = tmp_path / "a ?# %41" / "tuned.sqlite"

    def write(*winners, strict=False):
        with Store(path) as store:
            for environment, problem, variant, source in winners:
                where = store.put_environment(environment), store.put_problem(problem, "small")
                row = result(variant, source=source)
                store.put_result(*where, row)
                store.choose(*where, source, row.variant_id)
        dispatch.configure(db=path, strict=strict)
        return path

    return write


def test_a_tuned_row_is_taken_without_a_word(table, recwarn):
    table((HERE, PROBLEM, FASTER, "compiler"))
    for problem in (PROBLEM, dataclasses.replace(PROBLEM, tokens=65536, batch=4, lower_bound=-3.0)):
        choice = dispatch.choose(problem, V6E)
        assert (choice.variant, choice.origin) == (FASTER, "tuned")
    assert [w for w in recwarn if w.category is KdagenWarning] == []


def test_measured_goes_before_modelled(table):
    table((HERE, PROBLEM, FASTER, "compiler"), (HERE, PROBLEM, OTHER, "hardware"))
    assert dispatch.choose(PROBLEM, V6E).variant == OTHER


def test_the_users_row_goes_before_a_packaged_one(table, tmp_path, monkeypatch):
    packaged = table((HERE, PROBLEM, OTHER, "hardware"))
    packaged = packaged.rename(tmp_path / "packaged.sqlite")
    monkeypatch.setattr(dispatch, "packaged_tables", lambda: [packaged])
    table((HERE, PROBLEM, FASTER, "compiler"))
    assert dispatch.choose(PROBLEM, V6E).variant == FASTER


def test_the_compiler_at_hand_goes_before_another(table):
    table(
        (HERE, PROBLEM, FASTER, "compiler"),
        (dataclasses.replace(HERE, libtpu="9.9"), PROBLEM, OTHER, "compiler"),
    )
    assert dispatch.choose(PROBLEM, V6E).variant == FASTER


def test_a_row_of_another_generator_counts_as_near_only(table):
    table((dataclasses.replace(HERE, generator="old"), PROBLEM, FASTER, "hardware"))
    with pytest.warns(KdagenWarning, match="another version of the kernels"):
        choice = dispatch.choose(PROBLEM, V6E)
    assert (choice.variant, choice.origin) == (FASTER, "nearest")


def test_the_nearest_row_is_proved_legal_again(table):
    few = dataclasses.replace(PROBLEM, heads=4, value_heads=4)
    many = dataclasses.replace(PROBLEM, heads=16, value_heads=16)
    of_few = dataclasses.replace(FASTER, heads=4, chunks=4)
    of_many = dataclasses.replace(FASTER, heads=16, chunks=2)
    table((HERE, few, of_few, "compiler"), (HERE, many, of_many, "compiler"))
    # 8 heads are as far from 4 as from 16, but 16 heads a program do not divide them
    assert check(of_many, PROBLEM, V6E) is not None
    with pytest.warns(KdagenWarning, match="is not tuned for v6e"):
        choice = dispatch.choose(PROBLEM, V6E)
    assert (choice.variant, choice.origin) == (of_few, "nearest")
    assert check(choice.variant, PROBLEM, V6E) is None


def test_a_bounded_row_does_not_serve_an_unbounded_gate(table):
    table((HERE, PROBLEM, FASTER, "compiler"))
    problem = Problem(tokens=2048, heads=8, gate="softplus", qk_l2norm=True)
    with pytest.warns(KdagenWarning, match="default variant"):
        choice = dispatch.choose(problem, V6E)
    assert choice.origin == "default" and choice.variant.decay == "unbounded"


def test_rows_of_another_chip_are_not_near(table):
    table((HERE, PROBLEM, FASTER, "compiler"))
    with pytest.warns(KdagenWarning, match="for v5p; it runs on the default variant"):
        assert dispatch.choose(PROBLEM, get_chip("v5p")).origin == "default"


def test_the_warning_comes_once_and_its_command_tunes_this_problem(table, recwarn):
    path = table()
    problem = dataclasses.replace(PROBLEM, batch=3, final_state=True, beta_dtype="float32")
    for _ in range(2):
        dispatch.choose(problem, V6E)
    (message,) = [str(w.message) for w in recwarn if w.category is KdagenWarning]
    words = shlex.split(message.split("To tune it: ")[1])
    assert words[:5] == ["kdagen", "tune", "--chip", "v6e", "--problem"]
    assert parse_problem(words[5]) == problem
    assert words[6:] == ["--db", str(path)]


TRAINED = dataclasses.replace(PROBLEM, residuals="tuned")
HERE_TRAINED = dataclasses.replace(HERE, generator=step_hash())
STEP = dataclasses.replace(
    paired(TRAINED, DEFAULT, (V6E,)), residuals="rematerialize"
)  # not the default
SAVING = dataclasses.replace(STEP, forward=dataclasses.replace(STEP.forward, lag=1))


def with_policy(step, name):
    return dataclasses.replace(step, residuals=name)


def test_a_training_step_has_rows_of_its_own(table, recwarn):
    table((HERE, PROBLEM, FASTER, "compiler"), (HERE_TRAINED, TRAINED, STEP, "compiler"))
    assert dispatch.choose(PROBLEM, V6E).variant == FASTER
    longer = dataclasses.replace(TRAINED, tokens=9999, lower_bound=-1.0)
    for problem in (TRAINED, longer):
        choice = dispatch.choose(problem, V6E)
        assert (choice.variant, choice.origin) == (STEP, "tuned")
    assert [w for w in recwarn if w.category is KdagenWarning] == []


def test_a_step_that_was_tuned_for_any_policy_serves_each(table):
    table((HERE_TRAINED, TRAINED, STEP, "compiler"))
    for policy in ("save", "rematerialize"):
        choice = dispatch.find(
            dataclasses.replace(TRAINED, residuals=policy), V6E, dispatch.tables_in_use()
        )
        assert (choice.variant, choice.origin) == (with_policy(STEP, policy), "tuned")


def test_a_step_of_the_policy_asked_for_goes_before_one_of_any(table):
    saving = dataclasses.replace(TRAINED, residuals="save")
    row = with_policy(SAVING, "save")
    table((HERE_TRAINED, TRAINED, STEP, "compiler"), (HERE_TRAINED, saving, row, "compiler"))
    assert dispatch.choose(saving, V6E).variant == row
    assert dispatch.choose(TRAINED, V6E).variant == STEP


def test_a_call_that_names_no_policy_takes_what_was_tuned_for_save(table):
    saving = dataclasses.replace(TRAINED, residuals="save")
    table((HERE_TRAINED, saving, with_policy(SAVING, "save"), "compiler"))
    assert dispatch.choose(TRAINED, V6E).variant == with_policy(SAVING, "save")
    rebuilding = dataclasses.replace(TRAINED, residuals="rematerialize")
    with pytest.warns(KdagenWarning, match="which is legal here"):
        choice = dispatch.choose(rebuilding, V6E)
    assert (choice.variant, choice.origin) == (SAVING, "nearest")


def test_an_untuned_step_is_the_default_backward_under_the_tuned_forward(table):
    table((HERE, PROBLEM, OTHER, "compiler"))
    with pytest.warns(KdagenWarning, match="default variant") as caught:
        choice = dispatch.choose(TRAINED, V6E)
    assert choice.origin == "default"
    assert choice.variant == paired(TRAINED, OTHER, (V6E,))
    assert choice.variant.forward.recurrence_span == OTHER.recurrence_span
    words = shlex.split(str(caught[0].message).split("To tune it: ")[1])
    assert parse_problem(words[5]) == TRAINED


def test_a_step_of_another_generator_or_of_parts_that_are_not_legal_is_not_tuned(table):
    apart = dataclasses.replace(STEP, backward=dataclasses.replace(STEP.backward, chunk=32))
    table(
        (dataclasses.replace(HERE_TRAINED, generator="old"), TRAINED, STEP, "compiler"),
        (HERE_TRAINED, TRAINED, apart, "hardware"),
    )
    with pytest.warns(KdagenWarning, match="another version of the kernels"):
        assert dispatch.choose(TRAINED, V6E).variant == STEP


def test_strict_dispatch_makes_a_miss_an_error(table):
    table(strict=True)
    with pytest.raises(dispatch.UntunedError, match="kdagen tune --chip v6e"):
        dispatch.choose(PROBLEM, V6E)
    table((HERE, PROBLEM, FASTER, "compiler"), strict=True)
    assert dispatch.choose(PROBLEM, V6E).variant == FASTER


def test_what_no_kernel_serves():
    wide = dataclasses.replace(PROBLEM, dtype="float32", key_dim=256, value_dim=256)
    trained = dataclasses.replace(wide, residuals="save")
    with pytest.raises(NoKernelError, match=r"no backward kernel .* on v4: vmem"):
        dispatch.choose(trained, get_chip("v4"))


def test_the_environment_names_a_table(table, monkeypatch):
    path = table((HERE, PROBLEM, FASTER, "compiler"))
    monkeypatch.setenv("KDAGEN_DB", str(path))
    dispatch.configure()
    assert dispatch.choose(PROBLEM, V6E).variant == FASTER


def test_a_named_table_has_to_be_one(tmp_path):
    missing = tmp_path / "none.sqlite"
    dispatch.configure(db=missing)
    with pytest.raises(TableError, match="no such file"):
        dispatch.choose(PROBLEM, V6E)
    other = tmp_path / "other.sqlite"
    other.write_text("not a database, but long enough to be taken for one " * 20)
    with pytest.raises(TableError, match="not a tuned table"):
        read_table(other)


def test_reading_leaves_the_file_as_it_was(table):
    path = table((HERE, PROBLEM, FASTER, "compiler"))
    before = path.read_bytes()
    rows = read_table(path, True)["v6e"][PROBLEM.key()]
    assert json.loads(rows[0].variant) == FASTER.to_dict()
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("cell", ["variant", "problem"])
@pytest.mark.parametrize("content", ["3", "[]", '{"colour": 1}'])
def test_a_row_of_another_version_is_passed_over(table, cell, content):
    path = table((HERE, PROBLEM, FASTER, "compiler"))
    with sqlite3.connect(path) as db:
        of = {"variant": "results", "problem": "problems"}[cell]
        db.execute(f"UPDATE {of} SET {cell} = ?", [content])
    read_table.cache_clear()
    dispatch.find.cache_clear()
    near = dataclasses.replace(PROBLEM, final_state=True)
    assert dispatch.find(near, V6E, (path,)).origin == "default"


@pytest.mark.parametrize("gate", ["bounded", "softplus", "log_decay"])
def test_the_portable_variant_is_legal_on_every_chip(gate):
    bound = -5.0 if gate == "bounded" else None
    problem = dataclasses.replace(PROBLEM, gate=gate, lower_bound=bound)
    choice, _ = dispatch.portable_choice(problem)
    assert all(check(choice.variant, problem, chip) is None for chip in CHIPS.values())


@pytest.mark.parametrize("chip", ["v6e", "v7x"])
def test_the_packaged_tables_serve_the_example_shapes(chip):
    (path,) = (path for path in packaged_tables() if path.stem == chip)
    by_key = read_table(path, True)[chip]
    for problem in load_shapes(EXAMPLES).values():
        if problem.trained:
            continue
        rows = by_key[problem.key()]
        assert rows
        for row in rows:
            variant = Variant.from_dict(json.loads(row.variant))
            assert check(variant, problem, get_chip(chip)) is None
