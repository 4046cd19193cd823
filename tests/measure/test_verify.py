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
from kdagen.measure import verify
from kdagen.problem import Problem
from kdagen.variant import Variant, default_variant

PROBLEM = Problem(tokens=8192, heads=2, gate="softplus", qk_l2norm=True, final_state=True)
VARIANT = dataclasses.replace(default_variant(PROBLEM, get_chip("v6e")), heads=2, chunks=1)


def test_a_right_kernel_is_within_its_bounds() -> None:
    found = verify.run("v6e", PROBLEM.to_dict(), VARIANT.to_dict())["errors"]
    assert set(found) == {"output", "final_state"}
    for tensor in found.values():
        assert 1e-4 < tensor["error"] <= tensor["bound"] == 5e-3


def test_a_kernel_that_is_off_by_a_hundredth_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def altered(*asked) -> Generated:
        good = generate(*asked)
        source = good.source.replace("scale=scale", "scale=scale * 1.01")
        assert source != good.source
        return Generated(source, good.variant_id, f"{good.module_name}_altered")

    monkeypatch.setattr(verify, "generate", altered)
    errors = verify.relative_errors(PROBLEM, VARIANT, "v6e")
    assert errors["output"] is not None and errors["output"] > 9e-3
    assert errors["final_state"] is not None and errors["final_state"] < 5e-3


def test_interpret_mode_shows_what_a_kernel_does_not_write() -> None:
    def half(out) -> None:
        out[:4, :] = jnp.ones((4, 128))

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    got = np.asarray(pl.pallas_call(half, out_shape=shape, interpret=True)())
    assert np.isnan(got[4:]).all()
    assert verify._error(got, np.ones((8, 128))) is None
    assert verify._error(got[:4], np.ones((4, 128))) == 0.0


@pytest.mark.parametrize(
    ("value_heads", "heads", "expected"), [(32, 8, 16), (32, 32, 32), (3, 3, 3), (8, 8, 8)]
)
def test_the_reduced_problem_goes_through_all_of_the_kernel(
    value_heads: int, heads: int, expected: int
) -> None:
    problem = dataclasses.replace(PROBLEM, heads=value_heads, value_heads=value_heads)
    variant = Variant(heads=heads, chunks=2, chunk=64, decay="unbounded", sub_block=8)
    small = verify.reduced(problem, variant)
    assert small.key() == dataclasses.replace(problem, heads=expected, value_heads=expected).key()
    assert (small.batch, small.heads) == (2, expected)
    assert 3 < small.tokens / variant.block_tokens < 4
    assert small.tokens % variant.chunk
