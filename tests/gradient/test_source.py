"""Identities of generated backward kernels."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from kdagen.chips import get_chip
from kdagen.gradient.source import generate
from kdagen.gradient.variant import BackwardVariant, Request
from kdagen.problem import Problem

V6E = get_chip("v6e")
CHANGES = {
    "dtype": ("bfloat16", "float32"),
    "precision": ("default", "high", "highest"),
    "key_dim": (8, 128),
    "value_dim": (100, 128),
    "segments": (None, 1, 2),
    "initial_state": (False, True),
    "tokens": (2, 4096),
}
GATES = {
    "log_decay": {"gate": "log_decay"},
    "softplus": {"gate": "softplus", "qk_l2norm": True},
    "bounded": {"gate": "bounded", "lower_bound": -5.0, "layout": "BTHD"},
}


@pytest.mark.parametrize("gate", GATES)
def test_problems_of_one_id_have_one_source(gate: str) -> None:
    """Legal there or not: a loaded module is found by its id alone."""
    problem = Problem(tokens=64, heads=2, residuals="save", **GATES[gate])
    request = Request.of(("query", "beta"), output_cotangent=True, state_cotangent=False)
    variant = BackwardVariant()
    found = {}
    for values in itertools.product(*CHANGES.values()):
        changed = dataclasses.replace(problem, **dict(zip(CHANGES, values, strict=True)))
        made = generate(changed, request, variant, V6E)
        assert found.setdefault(made.variant_id, made) == made, changed
    # segments: none, some, and some with initial states
    dtypes, precisions, key_dims, segments = 2, 2, 2, 3
    assert len(found) == dtypes * precisions * key_dims * segments
