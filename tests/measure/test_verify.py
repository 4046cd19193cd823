"""The numerical error of a candidate, and that a wrong one is seen."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from kdagen.chips import get_chip
from kdagen.generate import Generated, generate
from kdagen.measure import kinds, verify
from kdagen.measure.kinds import Kind
from kdagen.problem import Problem
from kdagen.space import default_variant
from kdagen.variant import Variant

PROBLEM = Problem(tokens=8192, heads=2, gate="softplus", qk_l2norm=True, final_state=True)
VARIANT = dataclasses.replace(default_variant(PROBLEM, get_chip("v6e")), heads=2, chunks=1)
SMALL = verify.reduced(PROBLEM, VARIANT, 6)


def test_a_right_kernel_is_within_its_bounds() -> None:
    found = verify.run("v6e", PROBLEM.to_dict(), VARIANT.to_dict())["errors"]
    assert set(found) == {"output", "final_state"}
    for tensor in found.values():
        assert 1e-4 < tensor["error"] <= tensor["bound"]


def test_a_kernel_that_is_off_by_a_hundredth_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def altered(*asked) -> Generated:
        good = generate(*asked)
        source = good.source.replace("scale=scale", "scale=scale * 1.01")
        assert source != good.source
        return Generated(source, good.variant_id, f"{good.module_name}_altered")

    monkeypatch.setattr(verify, "generate", altered)
    found = verify.relative_errors(SMALL, VARIANT, "v6e")
    assert {kind for kind, _ in found} == set(kinds.telling(SMALL))
    for (kind, name), error in found.items():
        assert (error > kind.bound(name, SMALL)) == (name == "output"), (kind, name)
    assert 9e-3 < verify.worst(SMALL, found)["output"]["error"] < 2e-2


def test_interpret_mode_shows_what_a_kernel_does_not_write() -> None:
    def half(out) -> None:
        out[:4, :] = jnp.ones((4, 128))

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    got = np.asarray(pl.pallas_call(half, out_shape=shape, interpret=True)())
    assert np.isnan(got[4:]).all()


def test_the_worst_kind_is_the_one_nearest_to_its_bound_or_not_finite() -> None:
    usual, reflecting = Kind("slow"), Kind("slow", "random", True)
    found = {(usual, "output"): 4e-3, (reflecting, "output"): 6e-3}
    assert verify.worst(SMALL, found) == {"output": {"error": 4e-3, "bound": 5e-3}}
    found[reflecting, "output"] = float("inf")
    assert verify.worst(SMALL, found) == {"output": {"error": None, "bound": 1e-2}}


@pytest.mark.parametrize(
    ("value_heads", "heads", "least", "expected"),
    [(32, 8, 1, 16), (32, 32, 6, 64), (3, 3, 6, 6), (8, 8, 6, 16), (1, 1, 6, 6)],
)
def test_the_reduced_problem_goes_through_all_of_the_kernel(
    value_heads: int, heads: int, least: int, expected: int
) -> None:
    problem = dataclasses.replace(PROBLEM, heads=value_heads, value_heads=value_heads)
    variant = Variant(heads=heads, chunks=2, chunk=64, decay="unbounded", sub_block=8)
    small = verify.reduced(problem, variant, least)
    assert small.key() == dataclasses.replace(problem, heads=expected, value_heads=expected).key()
    assert (small.batch, small.heads) == (2, expected)
    assert 3 < small.tokens / variant.block_tokens < 4
    assert small.tokens % variant.chunk


def test_the_reduced_problem_keeps_value_heads_that_share_a_key_together() -> None:
    problem = dataclasses.replace(PROBLEM, heads=2, value_heads=6)
    for heads in (1, 2, 3, 6):
        small = verify.reduced(problem, Variant(heads=heads, chunks=2), 4)
        assert small.value_heads == 3 * small.heads and small.heads >= 4
        assert small.value_heads % heads == 0 and small.value_heads >= 2 * heads
