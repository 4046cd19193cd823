"""On a TPU an f32 product without a named precision runs in bf16: traced kernels name it."""

from __future__ import annotations

import dataclasses

import jax
import jax.extend
import pytest
from jax import lax

from kdagen.chips import get_chip
from kdagen.generate import generate
from kdagen.measure import operands
from kdagen.measure.verify import traceable
from kdagen.problem import Problem
from kdagen.variant import default_variant

V6E = get_chip("v6e")
PROBLEM = Problem(tokens=128, heads=2, qk_l2norm=True, initial_state=True, final_state=True)
GATES = {
    "log_decay": {},
    "softplus": {"gate": "softplus"},
    "bounded": {"gate": "bounded", "lower_bound": -5.0},
}


def products(jaxpr):
    """Every matrix product of a program and of all that it calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from products(inner)


def traced(problem):
    variant = default_variant(problem, V6E)
    structs = [
        None if given is None else jax.ShapeDtypeStruct(*given)
        for given in operands.inputs(problem).values()
    ]
    # a user's precision is not the kernel's
    with jax.default_matmul_precision("bfloat16"):
        return jax.make_jaxpr(traceable(generate(problem, variant, V6E), problem))(*structs).jaxpr


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("precision", ["default", "highest"])
def test_every_product_names_its_precision(gate, dtype, precision):
    problem = dataclasses.replace(
        PROBLEM, dtype=dtype, gate_dtype=dtype, precision=precision, **GATES[gate]
    )
    found = list(products(traced(problem)))
    assert found
    for product in found:
        dtypes = {x.aval.dtype.name for x in product.invars}
        wide = "float32" in dtypes
        assert dtypes == {dtype} or dtypes == {"bfloat16"}
        expected = lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT
        assert product.params["precision"] == (expected, expected)
        assert product.outvars[0].aval.dtype == "float32"
    if dtype == "float32":
        assert all(x.aval.dtype == "float32" for product in found for x in product.invars)
