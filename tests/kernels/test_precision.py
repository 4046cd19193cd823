"""On a TPU an f32 product without a named precision runs in bf16: traced kernels name it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.extend
import pytest
from jax import lax

from kdagen.chips import get_chip
from kdagen.generate import generate, load
from kdagen.gradient import source
from kdagen.gradient import variant as gradient
from kdagen.gradient.shapes import inputs
from kdagen.gradient.variant import Request
from kdagen.measure import operands
from kdagen.measure.verify import traceable
from kdagen.problem import PRECISIONS, Problem
from kdagen.space import default_variant

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


def traced_backward(problem):
    variant, request = gradient.default_variant(problem, V6E), Request.everything(problem)
    given = inputs(problem, variant, request, states=gradient.states_dtype(problem)).values()
    structs = [None if x is None else jax.ShapeDtypeStruct(*x) for x in given]
    module = load(source.generate(problem, request, variant, V6E))
    backward = functools.partial(module.backward, **operands.scalars(problem), interpret=True)
    with jax.default_matmul_precision("bfloat16"):
        return jax.make_jaxpr(backward)(*structs).jaxpr


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_product_names_its_precision(gate, dtype, precision):
    problem = dataclasses.replace(
        PROBLEM, dtype=dtype, gate_dtype=dtype, precision=precision, **GATES[gate]
    )
    assert_named(products(traced(problem)), "float32" if precision == "highest" else dtype)


@pytest.mark.parametrize("gate", GATES)
def test_every_product_of_the_highest_precision_is_one_of_float32(gate):
    problem = dataclasses.replace(PROBLEM, precision="highest", residuals="save", **GATES[gate])
    for of in (traced, traced_backward):
        assert_named(products(of(problem)), "float32")


def assert_named(found, dtype):
    found = list(found)
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_of_states_of_segments_name_theirs(dtype):
    packed = dataclasses.replace(
        PROBLEM, dtype=dtype, gate_dtype=dtype, gate="softplus", segments=3, residuals="save"
    )
    whole = dataclasses.replace(packed, segments=None)
    for of in (traced, traced_backward):
        found = list(products(of(packed)))
        assert_named(found, dtype)
        assert len(found) > len(list(products(of(whole))))
