"""Training steps: their form, their legality, and the default one."""

from __future__ import annotations

import dataclasses
import re

import pytest

from kdagen.chips import CHIPS, get_chip
from kdagen.gradient.source import step_id
from kdagen.gradient.space import space
from kdagen.gradient.step import CUTS, KEPT, Step, check_step, of_first, paired
from kdagen.gradient.variant import BackwardVariant, check
from kdagen.gradient.variant import default_variant as gradient_default
from kdagen.problem import Problem
from kdagen.space import default_variant
from kdagen.variant import VariantError
from tests.store.rows import STEP, TRAINED

CHIP = get_chip("v6e")


def test_json_round_trip() -> None:
    kept = dataclasses.replace(STEP, residuals="rematerialize")
    assert Step.from_dict(kept.to_dict()) == kept
    assert kept.to_json() != STEP.to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residuals": "all"}, "residuals: got 'all'; it must be 'save', 'rematerialize'"),
        ({"forward": 3}, "forward: got 3; it must be an object of parameters"),
        ({"colour": 1}, "a training step is given by backward, forward, residuals; got .*colour"),
        ({"backward": {"chunk": 64}}, "missing parameter"),
    ],
)
def test_what_is_no_step_is_named(changes: dict, message: str) -> None:
    with pytest.raises(VariantError, match=message):
        Step.from_dict({**STEP.to_dict(), **changes})


def test_kernels_are_cut_apart_where_only_states_are_kept() -> None:
    apart = dataclasses.replace(
        STEP,
        forward=dataclasses.replace(STEP.forward, heads=8, chunks=4),
        backward=dataclasses.replace(STEP.backward, heads=4, chunks=2),
    )
    assert check_step(apart, TRAINED, CHIP) is None


BROKEN = {
    "chunks apart": ({"chunk": 32}, {}, "cuts", "chunk=32 of the forward: .* is 64"),
    "a block with chunks that have no state": (
        {"chunks": 3}, {"chunks": 2}, "cuts", "chunks=3 .* a multiple of the 2",
    ),
    "an inverse that lies otherwise": (
        {"keep_inverse": True, "heads": 2}, {"keep_inverse": True}, "cuts", "heads=2 of",
    ),
    "kept and not read": ({}, {"keep_inverse": False}, "cuts", "keep_inverse=True"),
    "states that are not taken": ({"states": "float32"}, {}, "kept", "takes bfloat16 states"),
    "a gate that is not taken": ({"keep_gate": True}, {}, "kept", "keep_gate=True"),
    "an illegal forward": ({"decay": "bounded", "sub_block": 8}, {}, "values", "sub_block=8"),
    "an illegal backward": ({}, {"sub_block": 3}, "values", "sub_block=3"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_step_breaks_is_named(name: str) -> None:
    forward, backward, constraint, message = BROKEN[name]
    step = dataclasses.replace(
        STEP,
        forward=dataclasses.replace(STEP.forward, **forward),
        backward=dataclasses.replace(STEP.backward, **backward),
    )
    found = check_step(step, TRAINED, CHIP)
    assert found is not None and found.constraint == constraint
    assert re.search(message, found.message), found.message


def test_the_policy_of_the_problem_is_that_of_its_steps() -> None:
    rebuilt = dataclasses.replace(STEP, residuals="rematerialize")
    saving = dataclasses.replace(TRAINED, residuals="save")
    assert check_step(rebuilt, TRAINED, CHIP) is None
    found = check_step(rebuilt, saving, CHIP)
    assert found is not None and found.constraint == "policy"
    assert of_first(TRAINED, STEP).residuals == "save"
    assert of_first(TRAINED, rebuilt).residuals is None
    assert (STEP.first.states, rebuilt.first.states) == ("bfloat16", "none")


def test_every_part_of_a_step_and_of_its_code_changes_its_id(monkeypatch) -> None:
    others = [
        dataclasses.replace(STEP, forward=dataclasses.replace(STEP.forward, lag=1)),
        dataclasses.replace(STEP, backward=dataclasses.replace(STEP.backward, span=2)),
        dataclasses.replace(STEP, residuals="rematerialize"),
        # not legal: it is recorded all the same
        dataclasses.replace(STEP, backward=dataclasses.replace(STEP.backward, heads=3, chunk=32)),
    ]
    ids = {step_id(TRAINED, step, CHIP) for step in (STEP, *others)}
    ids |= {step_id(dataclasses.replace(TRAINED, layout="BTHD"), STEP, CHIP)}
    ids |= {step_id(TRAINED, STEP, get_chip("v7x"))}
    assert step_id(dataclasses.replace(TRAINED, tokens=64), STEP, CHIP) in ids
    monkeypatch.setattr("kdagen.gradient.source.step_hash", lambda: "other")
    assert len(ids | {step_id(TRAINED, STEP, CHIP)}) == 8


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("residuals", ["save", "rematerialize", "tuned"])
def test_every_problem_has_a_default_step(chip: str, residuals: str) -> None:
    problem = Problem(tokens=2048, heads=8, gate="softplus", residuals=residuals)
    step = paired(problem, default_variant(problem, get_chip(chip)), (get_chip(chip),))
    assert check_step(step, problem, get_chip(chip)) is None
    assert step.residuals == ("save" if residuals == "tuned" else residuals)


@pytest.mark.parametrize("kept", [False, True])
def test_heads_that_cannot_be_parted_are_served_whatever_their_loop(kept: bool) -> None:
    wide = Problem(tokens=512, heads=2, value_heads=6, key_dim=192, value_dim=192, gate="softplus")
    variant = gradient_default(wide, CHIP, kept=kept)
    assert check(variant, wide, CHIP) is None
    assert variant.streams * variant.chunks == 6


def test_the_space_has_every_parameter_with_values_that_are_legal() -> None:
    values = space(TRAINED, CHIP)
    assert values.keys() == BackwardVariant().to_dict().keys()
    for name, options in values.items():
        if name in (*CUTS, *KEPT, "vmem_limit_mib"):
            continue
        for option in options:
            one = dataclasses.replace(STEP.backward, chunks=1, **{name: option})
            assert check(one, TRAINED, CHIP) is None, (name, option)
