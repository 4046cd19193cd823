"""Variants: their parameters, and what ``check`` says of them."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from kdagen.chips import CHIPS, get_chip
from kdagen.problem import Problem
from kdagen.variant import (
    CONSTRAINTS,
    Variant,
    VariantError,
    check,
    chunks,
    loop_bundles,
    vmem_bytes,
)

V6E = get_chip("v6e")
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
