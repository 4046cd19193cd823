"""The space of variants, and the default of every problem."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import pytest

from kdagen.chips import CHIPS, get_chip
from kdagen.problem import Problem, load_shapes
from kdagen.space import default_variant, legal_variants, space
from kdagen.variant import Variant, VariantError, check

V6E = get_chip("v6e")
SHAPES = load_shapes(Path(__file__).parents[1] / "examples" / "shapes.yaml")
BOUNDED = Problem(tokens=8192, heads=32, gate="bounded", lower_bound=-5.0)
LOG_DECAY = Problem(tokens=8192, heads=32)


def test_the_space_holds_every_parameter_in_order():
    for problem, chip in itertools.product((BOUNDED, LOG_DECAY), CHIPS.values()):
        found = space(problem, chip)
        assert list(found) == [field.name for field in dataclasses.fields(Variant)]
        for name, values in found.items():
            assert len(set(values)) == len(values) >= 1, name


def test_every_value_of_the_space_is_legal_somewhere():
    """A value that no legal variant has on any chip would only cost a search its time."""
    for problem in (BOUNDED, LOG_DECAY):
        unseen, rng = set(), random.Random(0)
        spaces = {chip: space(problem, chip) for chip in CHIPS.values()}
        for values in spaces.values():
            unseen |= {(name, value) for name, given in values.items() for value in given}
        for _ in range(8000):
            chip, values = rng.choice(list(spaces.items()))
            point = {name: rng.choice(given) for name, given in values.items()}
            if not unseen.isdisjoint(point.items()) and not check(Variant(**point), problem, chip):
                unseen -= set(point.items())
        assert not unseen


def test_legal_variants_are_the_points_of_the_space_that_pass():
    problem = Problem(tokens=64, heads=1, gate="bounded", lower_bound=-1.0)
    found = list(itertools.islice(legal_variants(problem, V6E), 300))
    assert len(set(found)) == 300
    assert found == list(itertools.islice(legal_variants(problem, V6E), 300))
    values = space(problem, V6E)
    for variant in found:
        assert check(variant, problem, V6E) is None
        assert all(value in values[name] for name, value in variant.to_dict().items())


def test_a_raised_limit_is_offered_only_where_the_default_one_is_too_small():
    problem, chip = Problem(tokens=64, heads=1, gate="bounded", lower_bound=-1.0), get_chip("v5e")
    assert len(space(problem, chip)["vmem_limit_mib"]) > 1
    for variant in itertools.islice(legal_variants(problem, chip), 1000):
        if variant.vmem_limit_mib:
            default = dataclasses.replace(variant, vmem_limit_mib=0)
            assert check(default, problem, chip) is not None


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_the_default_is_legal_for_every_number_of_heads(chip):
    problems = list(SHAPES.values())
    lengths = (1, 64, 65, 200, 8192)
    for heads, tokens, base in itertools.product(range(1, 34), lengths, (LOG_DECAY, BOUNDED)):
        state = heads % 2 == 1
        facts = dict(initial_state=state, final_state=state, gate_dtype="float32", tokens=tokens)
        problems.append(dataclasses.replace(base, heads=heads, value_heads=heads, **facts))
    for problem in problems:
        variant = default_variant(problem, chip)
        assert check(variant, problem, chip) is None
        assert problem.value_heads % variant.heads == 0
        assert variant.decay == ("bounded" if problem.gate == "bounded" else "unbounded")


@pytest.mark.parametrize(("heads", "tokens", "chunks"), [(3, 8192, 4), (3, 8000, 5), (3, 640, 5)])
def test_chunks_of_a_default_divide_the_sequence_where_that_costs_few(heads, tokens, chunks):
    """2048 tokens in flight are 5 chunks of 128 of 3 heads."""
    problem = dataclasses.replace(BOUNDED, heads=heads, value_heads=heads, tokens=tokens)
    assert default_variant(problem, V6E).chunks == chunks


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("residuals", [None, "save"])
@pytest.mark.parametrize("gate", ["log_decay", "bounded"])
@pytest.mark.parametrize(
    "facts",
    [
        {"dtype": "float32", "key_dim": 256, "value_dim": 256},
        {"dtype": "float32", "batch": 3},
        {"dtype": "float32", "heads": 2, "value_heads": 4, "batch": 2, "tokens": 33},
        {"precision": "high"},
        {"precision": "highest", "batch": 2},
        {"key_dim": 60, "value_dim": 129, "layout": "BTHD"},
        {"key_dim": 100, "heads": 1, "value_heads": 1},
        {"heads": 2, "batch": 2},
        {"heads": 128, "value_heads": 128},
        {"heads": 1, "value_heads": 7, "tokens": 1},
        {"segments": 25, "initial_state": True, "final_state": True},
        {"segments": (5, 0, 28), "final_state": True, "dtype": "float32", "key_dim": 256},
    ],
    ids=str,
)
def test_every_problem_has_a_default(facts, gate, residuals, chip):
    problem = dataclasses.replace(
        LOG_DECAY,
        **{
            "heads": 6,
            "value_heads": 6,
            "gate": gate,
            "lower_bound": -5.0 if gate == "bounded" else None,
            "residuals": residuals,
            **facts,
        },
    )
    variant = default_variant(problem, chip)
    assert check(variant, problem, chip) is None
    for parameter, value in variant.to_dict().items():
        if parameter != "chunks":
            assert value in space(problem, chip)[parameter], parameter


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_default_of_an_example_is_a_point_of_its_space(name, chip):
    values = space(SHAPES[name], chip)
    for parameter, value in default_variant(SHAPES[name], chip).to_dict().items():
        assert value in values[parameter], parameter


def test_no_default_where_nothing_fits():
    small = dataclasses.replace(V6E, usable_vmem_bytes=1 << 20, default_vmem_limit_bytes=1 << 20)
    with pytest.raises(VariantError, match=r"on v6e: vmem: about .* MiB of VMEM, of 1 allowed"):
        default_variant(LOG_DECAY, small)
