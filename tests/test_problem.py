"""Problems: their fields, errors and keys, and files of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from kdagen.problem import Problem, ProblemError, load_shapes

BASE = {"tokens": 256, "heads": 4}

# A value for every field that differs from its default, with what else must then be given.
CHANGES = {
    "tokens": {"tokens": 512},
    "heads": {"heads": 2},
    "batch": {"batch": 2},
    "value_heads": {"value_heads": 8},
    "key_dim": {"key_dim": 64},
    "value_dim": {"value_dim": 64},
    "dtype": {"dtype": "float32"},
    "gate": {"gate": "softplus"},
    "lower_bound": {"gate": "bounded", "lower_bound": -1.0},
    "gate_dtype": {"gate_dtype": "float32"},
    "beta_dtype": {"beta_dtype": "float32"},
    "qk_l2norm": {"qk_l2norm": True},
    "initial_state": {"initial_state": True},
    "final_state": {"final_state": True},
    "segments": {"segments": 3},
    "layout": {"layout": "BTHD"},
    "residuals": {"residuals": "save"},
    "precision": {"precision": "high"},
}
# None changes the generated code, nor its time per chunk.
IRRELEVANT = {"tokens", "batch", "lower_bound"}


def test_every_field_is_known_to_these_tests():
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Problem)}


@pytest.mark.parametrize("name", CHANGES)
def test_the_key_changes_with_every_field_that_matters(name):
    base = dict(BASE)
    if name == "lower_bound":  # only a bounded gate has one
        base |= {"gate": "bounded", "lower_bound": -5.0}
    first, second = Problem(**base), Problem(**base | CHANGES[name])
    assert getattr(first, name) != getattr(second, name)
    assert (first.key() != second.key()) == (name not in IRRELEVANT)
    assert first.to_json() != second.to_json()


def test_of_a_packing_the_key_keeps_that_there_is_one():
    few, many = (Problem(**BASE, segments=given) for given in (2, (100, 50, 0, 106)))
    assert few.key() == many.key() != Problem(**BASE).key()


@pytest.mark.parametrize(
    ("segments", "slots"), [(None, 1), (1, 1), (7, 7), ([100, 0, 50], 3), ([256], 1)]
)
def test_every_segment_has_a_slot(segments, slots):
    assert Problem(**BASE, segments=segments).slots == slots


@pytest.mark.parametrize(
    ("gate", "least"),
    [({"gate": "bounded", "lower_bound": -5.0}, 64), ({"gate": "softplus"}, 80), ({}, 80)],
)
def test_narrow_keys_need_an_inverse_above_bfloat16(gate, least):
    for width, wide in ((least, False), (least - 1, True), (31, True)):
        problem = Problem(**BASE, **gate, key_dim=width)
        assert (problem.wide_inverse, problem.exact) == (wide, width < 32)
    for asked in ({"dtype": "float32"}, {"precision": "high"}, {"precision": "highest"}):
        problem = Problem(**BASE, **gate, **asked)
        assert (problem.wide_inverse, problem.exact) == (True, asked != {"precision": "high"})


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_json_round_trip(change):
    problem = Problem(**BASE | change)
    assert Problem.from_dict(json.loads(problem.to_json())) == problem
    assert Problem.from_dict(problem.to_dict()).to_json() == problem.to_json()


def test_lengths_of_segments_survive_json():
    problem = Problem(**BASE, segments=[100, 0, 56])
    assert problem.segments == (100, 0, 56)
    assert Problem.from_dict(json.loads(problem.to_json())) == problem
    assert hash(problem) == hash(Problem(**BASE, segments=(100, 0, 56)))


def test_defaults_follow_the_other_fields():
    problem = Problem(**BASE, dtype="float32")
    assert (problem.value_heads, problem.gate_dtype, problem.beta_dtype) == (4, *["float32"] * 2)
    assert Problem(**BASE, dtype="float32") == Problem(**BASE, dtype="float32", value_heads=4)
    assert Problem(**BASE, gate="bounded", lower_bound=-5) == Problem(
        **BASE, gate="bounded", lower_bound=-5.0
    )


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("tokens", 0, "1 or more"),
        ("tokens", 2.0, "integer"),
        ("tokens", True, "integer"),
        ("tokens", "8192", "integer"),
        ("heads", -1, "1 or more"),
        ("batch", 0, "1 or more"),
        ("value_heads", 6, r"multiple of heads \(4\)"),
        ("value_heads", 2, r"multiple of heads \(4\)"),
        ("value_heads", -4, "1 or more"),
        ("key_dim", 257, "1 to 256"),
        ("key_dim", 0, "1 to 256"),
        ("value_dim", 300, "1 to 256"),
        ("dtype", "float16", "'bfloat16', 'float32'"),
        ("gate_dtype", "int8", "'bfloat16', 'float32'"),
        ("beta_dtype", "f32", "'bfloat16', 'float32'"),
        ("gate", "sigmoid", "'log_decay', 'softplus', 'bounded'"),
        ("lower_bound", -5.0, "absent for a log_decay gate"),
        ("qk_l2norm", 1, "true or false"),
        ("initial_state", "yes", "true or false"),
        ("final_state", None, "true or false"),
        ("segments", 0, r"1 to tokens \(256\)"),
        ("segments", 257, r"1 to tokens \(256\)"),
        ("segments", "many", "list of lengths"),
        ("segments", (200, 100), r"at most tokens \(256\)"),
        ("segments", (-1, 2), "0 or more"),
        ("layout", "THD", "'HBTD', 'BTHD'"),
        ("residuals", "all", "null, .*'save', 'rematerialize'"),
        ("precision", "float32", "'default', 'high', 'highest'"),
    ],
)
def test_a_bad_field_is_named_with_what_it_takes(name, value, takes):
    with pytest.raises(ProblemError, match=rf"^{name}: got .*; it must be .*{takes}") as caught:
        Problem(**BASE | {name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("bound", [0.0, -5.1, None, "low", float("nan")])
def test_a_bounded_gate_needs_its_bound(bound):
    with pytest.raises(ProblemError, match=r"lower_bound: got .*\[-5, 0\)"):
        Problem(**BASE, gate="bounded", lower_bound=bound)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gate", ["bounded"]),
        ("dtype", ["bfloat16"]),
        ("segments", {"a": 1}),
        ("heads", [4]),
        ("beta_dtype", 0),
        ("gate_dtype", False),
        ("gate_dtype", None),
        ("value_heads", False),
        ("value_heads", None),
    ],
)
def test_what_yaml_may_hold_in_place_of_a_value_is_refused_too(name, value):
    with pytest.raises(ProblemError, match=f"^{name}: got"):
        Problem(**BASE | {name: value})


def test_an_unknown_or_missing_field_is_named():
    with pytest.raises(ProblemError, match=r"^head: not a field.*tokens, heads"):
        Problem.from_dict({"tokens": 1, "head": 1})
    with pytest.raises(ProblemError, match=r"^heads: missing"):
        Problem.from_dict({"tokens": 1})


def write(tmp_path, text):
    path = tmp_path / "shapes.yaml"
    path.write_text(text)
    return path


def test_a_file_of_shapes_keeps_names_and_order(tmp_path):
    path = write(
        tmp_path,
        "b: {tokens: 64, heads: 2}\n"
        "a:\n  tokens: 128\n  heads: 3\n  gate: bounded\n  lower_bound: -5\n  segments: [60, 68]\n",
    )
    shapes = load_shapes(path)
    assert list(shapes) == ["b", "a"]
    assert shapes["b"] == Problem(tokens=64, heads=2)
    assert shapes["a"] == Problem(
        tokens=128, heads=3, gate="bounded", lower_bound=-5.0, segments=(60, 68)
    )
    assert load_shapes(str(path)) == shapes


def test_a_shape_may_be_another_with_changes(tmp_path):
    path = write(
        tmp_path,
        "a: &a {tokens: 64, heads: 2, qk_l2norm: true}\n"
        "b: &b {<<: *a, tokens: 128}\n"
        "c:\n  <<: [*b, *a]\n  heads: 4\n",
    )
    a, b, c = load_shapes(path).values()
    assert a == Problem(tokens=64, heads=2, qk_l2norm=True)
    assert b == Problem(tokens=128, heads=2, qk_l2norm=True)
    assert c == Problem(tokens=128, heads=4, qk_l2norm=True)


def test_the_example_shapes_load():
    shapes = load_shapes(Path(__file__).parents[1] / "examples" / "shapes.yaml")
    assert list(shapes) == [
        "train-fixed", "train-kimi-linear", "train-packed", "train-fixed-step",
        "train-kimi-linear-step", "train-packed-step", "prefill-tp4", "prefill-k3-tp32",
    ]  # fmt: skip
    assert (shapes["train-fixed"].tokens, shapes["train-fixed"].heads) == (8192, 32)
    assert (shapes["train-packed"].slots, shapes["train-packed"].key_dim) == (25, 128)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "not YAML"),
        ("", "must map names"),
        ("- a\n- b\n", "must map names"),
        ("a: 3\n", "shape 'a': got 3"),
        ("1: {tokens: 1, heads: 1}\n", "shape 1: got"),
        ("a: {tokens: 0, heads: 1}\n", "shape 'a': tokens: got 0"),
        ("a: {heads: 1}\n", "shape 'a': tokens: missing"),
        ("a: {tokens: 1, heads: 1, colour: red}\n", "shape 'a': colour: not a field"),
        ("a: {tokens: 1, heads: 1}\na: {tokens: 2, heads: 1}\n", "a: .*twice"),
        ("a: {tokens: 1, heads: 1, tokens: 2}\n", "tokens: .*twice"),
    ],
)
def test_a_bad_file_is_named_with_its_shape_and_field(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ProblemError, match=message) as caught:
        load_shapes(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(ProblemError, match=r"missing\.yaml: No such file"):
        load_shapes(tmp_path / "missing.yaml")
    with pytest.raises(ProblemError, match="directory"):
        load_shapes(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(ProblemError, match=r"binary\.yaml: not YAML"):
        load_shapes(tmp_path / "binary.yaml")
