"""Variants: their parameters, their space, and what ``check`` says of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from pathlib import Path

import pytest

from kdagen.chips import CHIPS, get_chip
from kdagen.problem import Problem, load_shapes
from kdagen.variant import (
    CONSTRAINTS,
    Variant,
    VariantError,
    check,
    chunks,
    default_variant,
    legal_variants,
    loop_bundles,
    space,
    vmem_bytes,
)

V6E = get_chip("v6e")
SHAPES = load_shapes(Path(__file__).parents[1] / "examples" / "shapes.yaml")
BOUNDED = Problem(tokens=8192, heads=32, gate="bounded", lower_bound=-5.0)
LOG_DECAY = Problem(tokens=8192, heads=32)


def test_json_round_trip():
    variant = Variant(chunk=128, order="mix", lag=1)
    assert Variant.from_dict(json.loads(variant.to_json())) == variant
    assert variant.to_json() == Variant.from_dict(variant.to_dict()).to_json()


def test_every_parameter_of_a_row_must_be_there():
    fields = Variant().to_dict()
    with pytest.raises(VariantError, match=r"unknown .*: depth, width"):
        Variant.from_dict(fields | {"width": 1, "depth": 2})
    del fields["lag"]
    with pytest.raises(VariantError, match=r"missing .*: lag"):
        Variant.from_dict(fields)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Variant)])
@pytest.mark.parametrize("value", [None, 1.0, True, [1]])
def test_a_parameter_of_the_wrong_type_is_named(name, value):
    value = 1 if value is True and name.startswith("keep") else value
    with pytest.raises(VariantError, match=rf"^{name}: got .*must be of type (int|str|bool)"):
        Variant.from_dict(Variant().to_dict() | {name: value})


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


WIDE = {"inverse_dtype": "float32"}
# How each constraint is broken: variant, problem, and what the message says.
BROKEN = [
    ("values", {"chunk": 48}, {}, "chunk=48: it may be 32, 64, 128"),
    ("values", {"decay": "none"}, {}, "decay='none': it may be 'bounded', 'unbounded'"),
    ("values", {"sub_block": 8}, {}, "sub_block=8: it may be 16, 32"),
    ("values", {"decay": "unbounded", "sub_block": 32}, {}, "sub_block=32: it may be 8"),
    ("values", {"decay": "tree"}, {}, "sub_block=32: it may be 1"),
    ("values", {"inverse_block": 16}, {}, "inverse_block=16: it may be 2, 4, 8"),
    ("values", {"inverse_dtype": "float16"}, {}, "inverse_dtype='float16': it may be 'bfloat16'"),
    ("values", {"states": "float16"}, {}, "states='float16': it may be 'none', 'bfloat16'"),
    ("values", {"weight_depth": 32}, {}, "weight_depth=32: it may be 64, 128"),
    ("values", {"order": "iri"}, {}, "order='iri': it may be 'rir'"),
    ("values", {"ends": 3}, {}, "ends=3: it may be 0, 1, 2"),
    ("values", {"rows": 0}, {}, "rows=0: it may be 1 to"),
    ("values", {"heads": 0}, {}, "heads=0: it may be 1 to"),
    ("values", {"chunks": -1}, {}, "chunks=-1: it may be 1 to"),
    ("values", {"recurrence_span": 0}, {}, "recurrence_span=0: it may be 1 to"),
    ("values", {"inverse_span": 0}, {}, "inverse_span=0: it may be 1 to"),
    ("values", {"relation_span": -1}, {}, "relation_span=-1: it may be 0 to"),
    ("values", {"lag": 10_000}, {}, "lag=10000: it may be 0 to"),
    ("values", {"vmem_limit_mib": -1}, {}, "vmem_limit_mib=-1: it may be 0 to"),
    ("packing", {"heads": 3, "chunks": 2}, {}, "heads=3: it must divide .* 32"),
    ("packing", {"heads": 1}, {}, "heads=1, rows=1, chunks=1: 2 chunk-heads of 64"),
    ("packing", {"rows": 2}, {"batch": 3}, "rows=2: it must divide .* 3 batch rows"),
    ("packing", {"heads": 4}, {"heads": 2, "value_heads": 12}, "heads=4: .* the 6 value heads"),
    ("decay", {}, {"gate": "softplus", "lower_bound": None}, "decay='bounded': a softplus gate"),
    ("decay", {}, {"gate": "log_decay", "lower_bound": None}, "decay='bounded': a log_decay gate"),
    ("precision", {}, {"precision": "high"}, "inverse_dtype='bfloat16': precision='high' needs"),
    ("precision", {}, {"precision": "highest"}, "inverse_dtype='bfloat16': precision='highest'"),
    ("precision", WIDE | {"inverse_block": 4}, {"precision": "highest"}, "=32: .* takes 'tree'"),
    ("precision", {}, {"dtype": "float32"}, "inverse_dtype='bfloat16': dtype='float32'"),
    ("precision", {}, {"key_dim": 8}, "inverse_dtype='bfloat16': dtype='bfloat16' with key_dim=8"),
    ("precision", {}, {"key_dim": 63}, "inverse_dtype='bfloat16': .* with key_dim=63 needs"),
    ("precision", {"chunk": 128}, {"key_dim": 127}, "chunk=128: .* key_dim=127 it may be 32, 64"),
    ("precision", WIDE | {"inverse_block": 4}, {"dtype": "float32"}, "=32: .* takes 'tree'"),
    ("precision", WIDE | {"sub_block": 16}, {"dtype": "float32"}, "inverse_block=8: .* takes 2, 4"),
    ("residuals", {}, {"residuals": "save"}, "states='none': residuals='save' keeps"),
    ("residuals", {"states": "float32"}, {}, "states='float32', .* residuals=None keeps none"),
    ("residuals", {"keep_gate": True}, {"residuals": "rematerialize"}, "keep_gate=True: .* none"),
    ("code_size", {"heads": 32, "chunks": 16}, {}, "heads=32, rows=1, chunks=16, .*bundles"),
    ("vmem", {"vmem_limit_mib": 1000}, {}, "vmem_limit_mib=1000: v6e grants at most"),
    ("vmem", {"vmem_limit_mib": 1}, {}, "MiB of VMEM, of 1 allowed on v6e"),
]


@pytest.mark.parametrize(("constraint", "parameters", "facts", "message"), BROKEN)
def test_check_names_the_constraint_and_the_parameter(constraint, parameters, facts, message):
    violation = check(
        dataclasses.replace(Variant(), **parameters), dataclasses.replace(BOUNDED, **facts), V6E
    )
    assert violation is not None
    assert violation.constraint == constraint
    assert re.search(message, violation.message), violation.message
    assert str(violation) == f"{constraint}: {violation.message}"


def test_every_constraint_is_broken_above():
    assert {row[0] for row in BROKEN} == {c.__name__.removeprefix("_") for c in CONSTRAINTS}


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


@pytest.mark.parametrize(
    ("gate", "least"), [("bounded", 128), ("softplus", 160), ("log_decay", 160)]
)
def test_long_chunks_take_wide_keys_or_a_wide_inverse(gate, least):
    base = dataclasses.replace(
        LOG_DECAY, gate=gate, lower_bound=-5.0 if gate == "bounded" else None
    )
    for width, long in ((least, True), (least - 1, False)):
        problem = dataclasses.replace(base, key_dim=width)
        assert (128 in chunks(problem, "bfloat16"), 128 in chunks(problem, "float32")) == (
            long,
            True,
        )


def test_geometry():
    variant = Variant(chunk=64, heads=8, chunks=3)
    assert (variant.packs, variant.block_tokens) == (12, 192)


@pytest.mark.parametrize("chip", CHIPS)
def test_neither_vmem_nor_code_grows_with_the_sequence(chip):
    variant = Variant(heads=8)
    short, long = (dataclasses.replace(BOUNDED, tokens=tokens) for tokens in (2048, 131072))
    for estimate in (vmem_bytes, loop_bundles):
        at_length = {estimate(variant, problem, get_chip(chip)) for problem in (short, long)}
        assert len(at_length) == 1
        more = dataclasses.replace(variant, heads=16)
        assert estimate(more, short, get_chip(chip)) > max(at_length)
