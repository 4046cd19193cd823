"""What the sampler is asked for and told."""

from __future__ import annotations

import dataclasses

import pytest

from kdagen.chips import CHIPS, Chip, get_chip
from kdagen.problem import Problem
from kdagen.search.spaces import Forwards
from kdagen.search.study import Study
from kdagen.space import default_variant
from kdagen.variant import Variant, check

CHIP = get_chip("v6e")
PROBLEM = Problem(tokens=2048, heads=8, gate="bounded", lower_bound=-5.0, qk_l2norm=True)
FEW = Problem(tokens=2048, heads=1)


def study_of(problem: Problem, chip: Chip, trials: int, seed: int) -> Study:
    return Study(Forwards(problem, chip), trials, seed)


def time_of(variant: Variant) -> float:
    """A made-up time with its least at spans of 7."""
    return 1.0 + abs(variant.recurrence_span - 7) + abs(variant.relation_span - 7)


def ask(study: Study, count: int) -> list[Variant]:
    """Ask and tell ``count`` times."""
    asked = []
    for _ in range(count):
        variant = study.ask()
        assert variant is not None
        study.tell(variant, time_of(variant))
        asked.append(variant)
    return asked


def test_asks_are_legal_and_never_repeat() -> None:
    asked = ask(study_of(PROBLEM, CHIP, trials=60, seed=0), 60)
    assert len(set(asked)) == 60
    assert all(check(variant, PROBLEM, CHIP) is None for variant in asked)


def test_a_seed_decides_the_asks() -> None:
    first, again, other = (ask(study_of(PROBLEM, CHIP, 15, seed), 15) for seed in (3, 3, 4))
    assert first == again != other


def test_what_was_told_is_not_asked_and_steers() -> None:
    known = ask(study_of(PROBLEM, CHIP, 40, seed=1), 40)
    resumed = study_of(PROBLEM, CHIP, 40, seed=1)
    for variant in known:
        resumed.tell(variant, time_of(variant))
    more = ask(resumed, 10)
    assert not set(known) & set(more)
    assert sum(map(time_of, more)) < 0.7 * sum(map(time_of, known[:10]))


def test_what_came_to_nothing_is_avoided() -> None:
    study = study_of(PROBLEM, CHIP, trials=60, seed=0)
    asked = []
    for _ in range(60):
        variant = study.ask()
        assert variant is not None
        study.tell(variant, None if variant.sub_block == 32 else 1.0)
        asked.append(variant.sub_block)
    assert asked[:20].count(32) > asked[-20:].count(32)


def test_suggestions_come_first_and_once() -> None:
    good = dataclasses.replace(default_variant(PROBLEM, CHIP), recurrence_span=5, lag=1)
    outside = dataclasses.replace(good, recurrence_span=999)
    study = study_of(PROBLEM, CHIP, trials=24, seed=0)
    study.suggest([outside, good, good])
    first, second = ask(study, 2)
    assert first == good
    assert second not in (good, outside)


def test_a_claimed_variant_is_not_asked() -> None:
    good = dataclasses.replace(default_variant(PROBLEM, CHIP), recurrence_span=5, lag=1)
    study = study_of(PROBLEM, CHIP, trials=24, seed=0)
    study.claim(good)
    study.suggest([good])
    assert study.ask() != good


def test_few_legal_variants_are_all_tried() -> None:
    chip = get_chip("v4")
    study = study_of(FEW, chip, trials=10**6, seed=0)
    assert study.exhaustive
    assert not study_of(FEW, chip, trials=24, seed=0).exhaustive
    asked = set()
    while (variant := study.ask()) is not None and len(asked) < 500:
        assert variant not in asked
        asked.add(variant)
    assert len(asked) == 500


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("heads", [1, 3, 8, 32])
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_axes_have_the_default_and_only_legal_options(chip: str, heads: int, gate: str) -> None:
    bound = -5.0 if gate == "bounded" else None
    problem = Problem(tokens=2048, heads=heads, gate=gate, lower_bound=bound)
    default = default_variant(problem, get_chip(chip))
    fields = default.to_dict()
    for options in Forwards(problem, get_chip(chip)).axes.values():
        assert {name: fields[name] for name in options[0]} in options
        for option in options:
            variant = dataclasses.replace(default, **option)
            assert check(variant, problem, get_chip(chip)) is None
            raised = option.get("vmem_limit_mib", 0)
            if raised:
                unraised = dataclasses.replace(variant, vmem_limit_mib=0)
                assert check(unraised, problem, get_chip(chip)) is not None


def test_a_short_sequence_has_no_longer_programs() -> None:
    problem = dataclasses.replace(PROBLEM, tokens=200)
    first = next(iter(Forwards(problem, CHIP).axes.values()))
    assert len(first) > 1
    assert all((option["chunks"] - 1) * option["chunk"] < 200 for option in first)
    assert all(option["chunks"] * option["chunk"] * option["heads"] >= 1024 for option in first)
