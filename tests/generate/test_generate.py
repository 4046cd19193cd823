"""What is generated: every point renders, parses and lints; sources change only where accepted.

``KDAGEN_ACCEPT=1`` writes the golden files anew; read their difference before committing it.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kdagen.chips import CHIPS, get_chip
from kdagen.cli import main
from kdagen.generate import SPECIALISED, code_hash, generate, variant_id
from kdagen.problem import Problem
from kdagen.space import space
from kdagen.variant import Variant, check

GOLDEN = Path(__file__).parent / "golden"
PROJECT = Path(__file__).parents[2]
V6E = get_chip("v6e")

LOG_DECAY = Problem(tokens=4096, heads=8)
SOFTPLUS = dataclasses.replace(LOG_DECAY, gate="softplus")
BOUNDED = dataclasses.replace(LOG_DECAY, gate="bounded", lower_bound=-5.0)
SMALL = Variant(heads=2)
UNBOUNDED = dataclasses.replace(SMALL, decay="unbounded", sub_block=8)
TREE = dataclasses.replace(
    SMALL, decay="tree", sub_block=1, inverse_block=2, inverse_dtype="float32"
)

GOLDENS = {
    "log_decay": (LOG_DECAY, UNBOUNDED, "v6e"),
    "log_decay_f32": (dataclasses.replace(LOG_DECAY, gate_dtype="float32"), UNBOUNDED, "v6e"),
    "softplus": (SOFTPLUS, UNBOUNDED, "v6e"),
    "bounded": (BOUNDED, SMALL, "v6e"),
    "bounded_unbounded": (BOUNDED, UNBOUNDED, "v5p"),
    "sub_block_16": (BOUNDED, dataclasses.replace(SMALL, sub_block=16), "v7x"),
    "l2norm": (dataclasses.replace(SOFTPLUS, qk_l2norm=True), UNBOUNDED, "v7x"),
    "states": (
        dataclasses.replace(LOG_DECAY, initial_state=True, final_state=True), UNBOUNDED, "v4",
    ),
    "segments": (dataclasses.replace(BOUNDED, segments=3), SMALL, "v7x"),
    "states_of_segments": (
        dataclasses.replace(SOFTPLUS, segments=3, initial_state=True, final_state=True),
        UNBOUNDED, "v5e",
    ),
    "chunk_32": (LOG_DECAY, dataclasses.replace(UNBOUNDED, chunk=32, heads=4), "v6e"),
    "chunk_128": (
        BOUNDED, dataclasses.replace(SMALL, chunk=128, inverse_block=2), "v6e",
    ),
    "several_packs": (
        BOUNDED, dataclasses.replace(SMALL, heads=4, chunks=2, order="irr", lag=1), "v6e",
    ),
    "mixed_order": (BOUNDED, dataclasses.replace(SMALL, heads=4, chunks=2, order="mix"), "v6e"),
    "vmem_limit": (BOUNDED, dataclasses.replace(SMALL, vmem_limit_mib=64), "v5e"),
    "float32": (dataclasses.replace(SOFTPLUS, dtype="float32", qk_l2norm=True), TREE, "v6e"),
    "high": (
        dataclasses.replace(BOUNDED, precision="high", layout="BTHD", batch=2),
        dataclasses.replace(SMALL, rows=2, inverse_block=4, inverse_dtype="float32"), "v7x",
    ),
    "residuals": (
        dataclasses.replace(SOFTPLUS, residuals="save"),
        dataclasses.replace(
            UNBOUNDED, states="bfloat16", keep_inverse=True, keep_corrected=True, keep_gate=True
        ), "v6e",
    ),
}  # fmt: skip


def masked(problem: Problem, variant: Variant, chip: str) -> str:
    """The source without what every change of a helper changes."""
    made = generate(problem, variant, get_chip(chip))
    source = made.source.replace(made.variant_id, "<variant id>")
    source = source.replace(made.variant_id[:12], "<short id>")
    return source.replace(code_hash(), "<code hash>")


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name):
    problem, variant, chip = GOLDENS[name]
    assert check(variant, problem, get_chip(chip)) is None
    made, path = masked(problem, variant, chip), GOLDEN / f"{name}.txt"
    if os.environ.get("KDAGEN_ACCEPT") == "1":
        path.write_text(made, encoding="utf-8")
    assert made == path.read_text(encoding="utf-8"), "KDAGEN_ACCEPT=1 accepts what changed"


def test_every_golden_file_belongs_to_a_variant():
    assert {path.stem for path in GOLDEN.iterdir()} == set(GOLDENS)


def sample(count: int) -> list[tuple[Problem, Variant, str]]:
    """Random legal points over problems and chips, off the searched values too."""
    rng = random.Random(0)
    found = []
    while len(found) < count:
        chip = get_chip(rng.choice(list(CHIPS)))
        gate = rng.choice(["log_decay", "softplus", "bounded"])
        heads = rng.choice([1, 2, 3, 8, 12, 32])
        problem = Problem(
            tokens=rng.choice([1, 200, 8192]),
            heads=heads,
            batch=rng.choice([1, 2, 6]),
            value_heads=heads * rng.choice([1, 1, 3]),
            key_dim=rng.choice([1, 48, 128, 256]),
            value_dim=rng.choice([100, 128, 129]),
            dtype=rng.choice(["bfloat16", "float32"]),
            layout=rng.choice(["HBTD", "BTHD"]),
            residuals=rng.choice([None, "save", "rematerialize"]),
            precision=rng.choice(["default", "high", "highest"]),
            segments=rng.choice([None, None, 1]),
            gate=gate,
            lower_bound=rng.choice([-5.0, -0.5]) if gate == "bounded" else None,
            gate_dtype=rng.choice(["bfloat16", "float32"]),
            qk_l2norm=rng.random() < 0.5,
            initial_state=rng.random() < 0.5,
            final_state=rng.random() < 0.5,
        )
        values = space(problem, chip) | {"order": ("rir", "irr", "mix")}
        if rng.random() < 0.2 and not problem.exact:
            values |= {"decay": ("unbounded",), "sub_block": (8,)}
        variant = Variant(**{name: rng.choice(given) for name, given in values.items()})
        if check(variant, problem, chip) is None:
            found.append((problem, variant, chip.name))
    return found


def test_a_sample_of_the_space_renders_parses_and_lints(tmp_path):
    for i, (problem, variant, chip) in enumerate(sample(200)):
        source = generate(problem, variant, get_chip(chip)).source
        tree = ast.parse(source)
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        prepare = ["prepare"] if problem.segment_states else []
        assert functions == ["stages", *prepare, "forward"]
        assert source.endswith("\n") and "\t" not in source
        (tmp_path / f"point_{i}.py").write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise"]
    # the length of a line is a formatter's concern: here a unit of work has a line of its own
    command.append("--extend-ignore=E501")
    linted = subprocess.run(
        [*command, f"--config={PROJECT / 'pyproject.toml'}", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert linted.returncode == 0, linted.stdout[-3000:] + linted.stderr[-1000:]


def test_the_same_point_gives_the_same_source():
    for problem, variant, chip in sample(5):
        assert generate(problem, variant, get_chip(chip)) == generate(
            problem, variant, get_chip(chip)
        )


PARAMETERS = {
    "chunk": 128, "heads": 4, "rows": 2, "chunks": 2, "decay": "unbounded", "sub_block": 16,
    "inverse_block": 4, "inverse_dtype": "float32", "weight_depth": 128, "recurrence_span": 5,
    "inverse_span": 1, "relation_span": 0, "lag": 1, "order": "mix", "ends": 2,
    "vmem_limit_mib": 64, "states": "bfloat16", "keep_inverse": True, "keep_corrected": True,
    "keep_gate": True,
}  # fmt: skip
FACTS = {
    "dtype": "float32", "gate": "softplus", "gate_dtype": "float32", "qk_l2norm": True,
    "initial_state": True, "final_state": True, "layout": "BTHD",
    "key_dim": 16,
}  # fmt: skip
OTHER_FACTS = {"tokens": 200, "batch": 2, "beta_dtype": "float32", "lower_bound": -1.0}


def test_the_id_covers_all_that_a_source_depends_on():
    assert PARAMETERS.keys() == {field.name for field in dataclasses.fields(Variant)}
    assert FACTS.keys() == set(SPECIALISED)
    ids = {variant_id(BOUNDED, SMALL, get_chip(chip)) for chip in CHIPS}
    for name, value in PARAMETERS.items():
        assert getattr(SMALL, name) != value
        ids.add(variant_id(BOUNDED, dataclasses.replace(SMALL, **{name: value}), V6E))
    for name, value in FACTS.items():
        assert getattr(BOUNDED, name) != value
        changes = {"lower_bound": None} if name == "gate" else {}
        # the types of gate and beta follow that of the rest only where none is given
        ids.add(variant_id(dataclasses.replace(BOUNDED, **{name: value}, **changes), SMALL, V6E))
    assert len(ids) == len(CHIPS) + len(PARAMETERS) + len(FACTS)
    assert all(re.fullmatch("[0-9a-f]{64}", identity) for identity in ids)


@pytest.mark.parametrize(("name", "value"), OTHER_FACTS.items())
def test_one_id_has_one_source(name, value):
    other = dataclasses.replace(BOUNDED, **{name: value})
    assert generate(other, SMALL, V6E) == generate(BOUNDED, SMALL, V6E)


@pytest.mark.parametrize("variant", [SMALL, UNBOUNDED, TREE], ids=lambda x: x.decay)
def test_problems_of_one_id_have_one_source(variant):
    """Legal there or not: a loaded module is found by its id alone."""
    problems = [
        dataclasses.replace(problem, tokens=200, precision=precision, segments=segments)
        for problem, _, _ in sample(20)
        for precision in ("default", "high", "highest")
        for segments in (None, 1, 2)
    ]
    found = {}
    for problem in problems:
        made = generate(problem, variant, V6E)
        assert found.setdefault(made.variant_id, made) == made, problem
    assert len(found) < len(problems)


@pytest.mark.parametrize("name", ["bounded", "softplus", "states"])
def test_the_header_says_what_it_is_and_how_to_print_it_again(name):
    problem, variant, chip = GOLDENS[name]
    made = generate(problem, variant, get_chip(chip))
    header = ast.get_docstring(ast.parse(made.source))
    assert header is not None
    for said in (f"chip: {chip}", made.variant_id, code_hash(), "kda_forward.py.j2"):
        assert said in header
    for parameter, value in variant.to_dict().items():
        assert f"{parameter}={value!r}" in header
    command = shlex.split(re.search(r"Printed again by: kdagen (.*)", header)[1])
    printed = CliRunner().invoke(main, command)
    assert printed.exit_code == 0, printed.output
    assert printed.stdout == made.source
