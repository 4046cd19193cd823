"""The generated backward kernel in interpret mode against the token recurrence in float64."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from kdagen.generate import generate as generate_forward
from kdagen.gradient.variant import BackwardVariant, Request, check, default_variant
from kdagen.measure import accuracy, kinds, operands, verify
from kdagen.problem import Problem
from kdagen.variant import Variant, VariantError
from tests.kernels.backward_calls import (
    CHIP,
    arguments,
    call,
    compiled,
    draw,
    reference,
    traceable,
)

SMALL = BackwardVariant(heads=2)
SMALL_TREE = dataclasses.replace(SMALL, sub_block=1)
LOG_DECAY = Problem(tokens=150, heads=2, initial_state=True, final_state=True)
SOFTPLUS = dataclasses.replace(LOG_DECAY, gate="softplus", qk_l2norm=True)
BOUNDED = dataclasses.replace(SOFTPLUS, gate="bounded", lower_bound=-5.0)
TENSORS = ("query", "key", "value", "gate", "beta")
EXACT = {"dtype": "float32", "gate_dtype": "float32", "beta_dtype": "float32"}
EXACT_VARIANT = BackwardVariant(heads=2, sub_block=1, inverse_block=2, inverse_dtype="float32")


def of(problem: Problem, given: tuple[kinds.Kind, ...], **facts: object) -> Problem:
    """A problem with a key head for each kind, and an even number of value heads.

    ``ratio`` value heads share a key head; ``least`` is the fewest key heads.
    """
    ratio = int(facts.pop("ratio", 1))
    heads = max(len(given) + len(given) * ratio % 2, int(facts.pop("least", 0)))
    return dataclasses.replace(problem, heads=heads, value_heads=heads * ratio, **facts)


def assert_close(
    problem: Problem,
    variant: BackwardVariant,
    given: tuple[kinds.Kind, ...],
    request: Request | None = None,
) -> None:
    data = draw(problem, given, variant.chunk)
    got, expected = call(problem, variant, data, request), reference(problem, data, request)
    assert got.keys() == expected.keys()
    for name, x in got.items():
        assert x.dtype == data.values[name].dtype, name
    found = kinds.errors(problem, given, got, expected)
    wrong = {at: x for at, x in kinds.outside(problem, found).items() if at[1] != "a_log"}
    assert not wrong, f"error and bound: {wrong}"
    if "a_log" in got:
        # the sum over tokens and channels of one head may be small by chance: all heads together,
        # of which there are few
        of = kinds.of_head(given, problem)
        heads = [i for i, k in enumerate(of) if kinds.asked(k, problem) and not k.beta_above_one]
        error = accuracy.relative_error(np.asarray(got["a_log"])[heads], expected["a_log"][heads])
        assert error <= 2 * max(of[i].bound("a_log", problem) for i in heads)


@pytest.mark.parametrize(
    ("problem", "sub_block"),
    [(LOG_DECAY, 1), (SOFTPLUS, 1), (BOUNDED, 16)],
    ids=lambda x: getattr(x, "gate", str(x)),
)
def test_every_kind_of_data(problem, sub_block):
    given = kinds.every(problem)
    variant = dataclasses.replace(SMALL, sub_block=sub_block)
    # two heads of each kind: of one alone a handful of entries may be all that counts
    assert_close(of(problem, given, least=2 * len(given)), variant, given)


def test_every_kind_of_data_in_float32():
    given = kinds.every(SOFTPLUS)
    assert_close(of(SOFTPLUS, given, tokens=100, **EXACT), EXACT_VARIANT, given)


@pytest.mark.parametrize("chunk", [64, 128])
def test_parallel_and_repeated_keys_at_high_precision(chunk):
    given = tuple(kind for kind in kinds.every(BOUNDED) if kind.ill_conditioned)
    problem = of(BOUNDED, given, precision="high", least=16)
    assert check(SMALL, problem, CHIP) is not None
    variant = dataclasses.replace(SMALL, chunk=chunk, inverse_block=2, inverse_dtype="float32")
    assert all(kinds.asked(kind, problem) for kind in given)
    assert_close(problem, variant, given)


@pytest.mark.parametrize("problem", [SOFTPLUS, BOUNDED], ids=["softplus", "bounded"])
def test_a_log_of_every_head_by_itself_at_the_highest_precision(problem):
    """One sum over tokens and channels, which may cancel: with products in bfloat16 one head in
    eight is off by more than 6e-3."""
    problem = of(problem, (kinds.Kind("moderate"),), precision="highest", least=16)
    data = draw(problem, (kinds.Kind("moderate"),), EXACT_VARIANT.chunk)
    request = Request.of({"a_log"}, state_cotangent=True)
    got, expected = call(problem, EXACT_VARIANT, data, request), reference(problem, data, request)
    error = np.abs(np.asarray(got["a_log"]) - expected["a_log"])
    assert (error <= 2e-4 * np.abs(expected["a_log"])).all()


SHAPES = {
    "one token": (
        SOFTPLUS, {"tokens": 1, "batch": 2, "least": 16, "qk_l2norm": False}, {"weight_depth": 128},
    ),
    "one head, long chunks": (BOUNDED, {"tokens": 129, "least": 8}, {"heads": 1, "chunk": 128}),
    "short chunks of a wide gate": (
        LOG_DECAY, {"tokens": 70, "gate_dtype": "float32"},
        {"heads": 4, "chunk": 32, "inverse_block": 4},
    ),
    "two chunks of one head": (BOUNDED, {}, {"heads": 1, "chunks": 2, "sub_block": 16}),
    "two rows, narrow": (
        LOG_DECAY, {"batch": 2, "key_dim": 60, "value_dim": 48},
        {"heads": 1, "rows": 2, "inverse_block": 4, "inverse_dtype": "float32"},
    ),
    "heads that share a key": (SOFTPLUS, {"tokens": 100, "ratio": 2}, {"span": 2}),
    "ragged widths": (BOUNDED, {"tokens": 70, "key_dim": 129, "value_dim": 127}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(name):
    base, facts, parameters = SHAPES[name]
    mixed = {"log_decay": "mixed"}.get(base.gate, "fast and slow channels")
    given = (kinds.telling(base)[0], kinds.Kind(mixed))
    variant = BackwardVariant(**{"heads": 2, "sub_block": 1, **parameters})
    problem = of(base, given, **facts)
    while problem.value_heads % variant.heads:
        heads = problem.heads + 1
        problem = dataclasses.replace(problem, heads=heads, value_heads=heads)
    assert_close(problem, variant, given)


def test_the_other_layout_gives_the_same():
    problem = dataclasses.replace(BOUNDED, tokens=70)
    data = draw(problem, (kinds.Kind("slow"),), SMALL.chunk)
    request = Request.everything(problem)
    expected = call(problem, SMALL_TREE, data)
    other = dataclasses.replace(problem, layout="BTHD")
    moved = lambda x: np.moveaxis(np.asarray(x), 0, 2)  # noqa: E731
    tensors = (*range(5), 13)
    given = arguments(problem, SMALL_TREE, request, data)
    given = [moved(x) if i in tensors else x for i, x in enumerate(given)]
    got = compiled(other, SMALL_TREE, request)(*given)
    for name, x in expected.items():
        x = moved(x) if name in TENSORS else np.asarray(x)
        assert accuracy.relative_error(got[name], x.astype(np.float64)) < 1e-6, name


REQUESTS = {
    "value": Request.of(("value",)),
    "beta, state alone": Request.of(("beta",), output_cotangent=False, state_cotangent=True),
    "a_log and query": Request.of(("a_log", "query"), state_cotangent=True),
    "initial state": Request.of(("initial_state",), output_cotangent=False, state_cotangent=True),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_only_what_is_asked_for_is_computed(name):
    """And what is absent is no operand."""
    request, given = REQUESTS[name], (kinds.Kind("moderate"),)
    problem = dataclasses.replace(SOFTPLUS, tokens=70)
    assert_close(problem, SMALL_TREE, given, request)
    data = draw(problem, given, SMALL.chunk)
    (kernel,) = _kernels(problem, SMALL_TREE, request, data)
    (whole,) = _kernels(problem, SMALL_TREE, Request.everything(problem), data)
    assert len(kernel.outvars) == len(request.wanted)
    absent = 2 - request.output_cotangent - request.state_cotangent
    if request.stages.isdisjoint({"corrections"}):
        absent += 2  # values and states
    assert len(kernel.invars) == len(whole.invars) - absent


def test_the_same_call_twice_gives_the_same_bits():
    problem = dataclasses.replace(BOUNDED, tokens=70)
    data = draw(problem, (kinds.Kind("slow"),), SMALL.chunk)
    first, second = (call(problem, SMALL_TREE, data) for _ in range(2))
    for name, x in first.items():
        assert np.array_equal(np.asarray(x).view(np.uint8), np.asarray(second[name]).view(np.uint8))


def test_strong_decays_leave_small_gradients_exact():
    data = draw(LOG_DECAY, (kinds.Kind("-1"),), SMALL_TREE.chunk, decays=(-30.0, -1e4))
    got, expected = call(LOG_DECAY, SMALL_TREE, data), reference(LOG_DECAY, data)
    for name, heads in (("gate", np.s_[:]), ("initial_state", np.s_[0, 0])):
        for head in range(2):
            x, y = np.asarray(got[name])[heads][head], expected[name][heads][head]
            assert accuracy.relative_error(x, y) <= accuracy.bound(name, "bfloat16"), (name, head)


def _kernels(problem, variant, request, data):
    """Equations of the Pallas calls in the traced gradient."""
    given = arguments(problem, variant, request, data)
    return list(_equations(traceable(problem, variant, request), given, "pallas_call"))


def _equations(function, given, primitive):
    waiting = [jax.make_jaxpr(function)(*given).jaxpr]
    while waiting:
        for equation in waiting.pop().eqns:
            if equation.primitive.name == primitive:
                yield equation
            for parameter in equation.params.values():
                for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        waiting.append(inner)


@pytest.mark.parametrize("exact", [False, True])
def test_products_say_what_they_round_to(exact):
    """On a TPU an f32 product without a stated precision would run in bf16 unseen."""
    facts, variant = (EXACT, EXACT_VARIANT) if exact else ({}, SMALL_TREE)
    problem = dataclasses.replace(SOFTPLUS, **facts)
    request = Request.everything(problem)
    data = draw(problem, (kinds.Kind("moderate"),), variant.chunk)
    given = arguments(problem, variant, request, data)
    found = list(_equations(traceable(problem, variant, request), given, "dot_general"))
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert found
    for equation in found:
        types = {x.aval.dtype.name for x in equation.invars}
        assert len(types) == 1
        assert types == {"bfloat16"} or equation.params["precision"] == highest
        assert equation.outvars[0].aval.dtype == "float32"
        assert equation.params["precision"] is not None


@pytest.mark.parametrize(
    ("problem", "change", "names"),
    [
        (SOFTPLUS, {"sub_block": 16}, "sub_block"),
        (BOUNDED, {"sub_block": 32}, "sub_block"),
        (LOG_DECAY, {"heads": 3}, "heads"),
        (LOG_DECAY, {"heads": 1}, "chunks"),
        (dataclasses.replace(LOG_DECAY, heads=1, value_heads=2), {"heads": 1}, "heads"),
        (LOG_DECAY, {"rows": 2}, "rows"),
        (LOG_DECAY, {"chunk": 48}, "chunk"),
        (LOG_DECAY, {"vmem_limit_mib": 500}, "vmem_limit_mib"),
        (dataclasses.replace(LOG_DECAY, **EXACT), {"inverse_block": 4}, "inverse_dtype"),
        (dataclasses.replace(LOG_DECAY, **EXACT), {"inverse_block": 8}, "inverse_block"),
        (
            dataclasses.replace(LOG_DECAY, precision="high"),
            {"inverse_block": 4, "inverse_dtype": "float32", "keep_inverse": True},
            "keep_inverse",
        ),
        (
            dataclasses.replace(LOG_DECAY, segments=3, initial_state=True),
            {},
            "keep_corrected=False: with initial states of segments",
        ),
        (dataclasses.replace(LOG_DECAY, key_dim=60), {"inverse_block": 4}, "inverse_dtype"),
        (dataclasses.replace(LOG_DECAY, key_dim=100), {"chunk": 128}, "chunk=128"),
    ],
)
def test_check_names_what_is_not_legal(problem, change, names):
    violation = check(dataclasses.replace(SMALL, **{"sub_block": 1, **change}), problem, CHIP)
    assert violation is not None and names in violation.message


def test_the_default_is_legal():
    for heads, ratio in ((1, 1), (3, 1), (32, 1), (2, 4)):
        narrow = (dataclasses.replace(LOG_DECAY, key_dim=width) for width in (60, 100))
        for base in (LOG_DECAY, BOUNDED, dataclasses.replace(SOFTPLUS, **EXACT), *narrow):
            problem = dataclasses.replace(base, heads=heads, value_heads=heads * ratio)
            assert check(default_variant(problem, CHIP), problem, CHIP) is None


def test_residuals_that_the_forward_kept_are_taken():
    given = kinds.telling(BOUNDED)[:2]
    problem = of(BOUNDED, given, residuals="save")
    forward = Variant(
        heads=2, sub_block=16, states="bfloat16", keep_inverse=True, keep_corrected=True
    )
    data = draw(problem, given, SMALL.chunk)
    kept = verify.interpreted(generate_forward(problem, forward, CHIP), problem)(
        *(data.values.get(name) for name in operands.inputs(problem))
    )
    variant = dataclasses.replace(SMALL, keep_inverse=True, keep_corrected=True)
    request = Request.everything(problem)
    arrays = arguments(problem, variant, request, data)
    arrays[10:13] = kept.states, kept.inverse, kept.corrected
    got = compiled(problem, variant, request)(*arrays)
    found = kinds.errors(problem, given, got, reference(problem, data))
    assert not kinds.outside(problem, found)
    arrays[10] = kept.states[:, :, :-1]
    with pytest.raises(ValueError, match="states: got shape"):
        traceable(problem, variant, request)(*arrays)


def test_a_request_names_operands():
    with pytest.raises(VariantError, match="wanted: got lower_bound"):
        Request.of(("lower_bound",))
