"""Initial and final states of the segments of packed calls, on the kernels in interpret mode."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from kdagen.chips import get_chip
from kdagen.measure.accuracy import bound, relative_error
from kdagen.runtime.target import KdagenWarning, Target, forget_warnings
from tests.reference.cases import assert_close, make_case
from tests.runtime.run import PER_TOKEN, call, masked, moved

# All packings have one shape and are traced, see test_packed.py: four chunks of 64 tokens, the last
# of them not full, in two blocks or four, and more slots than most packings fill.
ROWS, TOKENS, SLOTS = 2, 215, 11
SIZES = dict(heads=1, value_heads=2, batch=ROWS, tokens=TOKENS, width_k=48, width_v=60)
QUICK = {"xla_backend_optimization_level": 0}

# Facts of a case, options of a call, and which states there are.
BOTH = ("initial", "final")
WAYS = {
    "softplus": (dict(raw=True, dtype="bfloat16"), dict(residuals="save"), BOTH),
    "bounded": (
        dict(raw=True, lower_bound=-5.0, dtype="bfloat16"),
        dict(residuals="rematerialize", layout="BTHD"),
        ("initial",),
    ),
    "bounded in float32": (
        dict(raw=True, lower_bound=-5.0),
        dict(residuals="save", layout="BTHD"),
        ("final",),
    ),
    "resets in float32": (dict(gate="resets"), dict(residuals="rematerialize"), BOTH),
}


def slots_filled(*rows):
    """Boundaries of all slots: the last segments are empty."""
    return np.array([[*row, *[row[-1]] * (SLOTS + 1 - len(row))] for row in rows], np.int32)


PACKINGS = {
    "several in a chunk": slots_filled([0, 0, 5, 6, 7, 7, 40, 63, 64, 65, 120, 200], [0, TOKENS]),
    "ends where chunks do": slots_filled([0, 64, 64, 128, 192], [0, 0, 128, 128, TOKENS, TOKENS]),
    "over several blocks": slots_filled([0, 10, 140, 141, 210, 210], [0, 1, 2, 214]),
    "nothing, and little": slots_filled([0, 0], [0, 0, 0, 1]),
}


def case_of(name, packing, seed=0):
    """A case with the states of its way. Every other channel hardly decays, so that states live
    through the longest segment."""
    facts, _, states = WAYS[name]
    case = make_case(boundaries=packing, seed=seed, **facts, **SIZES)
    gate = case.operands["gate"]
    slow = gate - 7 if "raw" in facts else jnp.full_like(gate, -0.002)
    case.operands["gate"] = jnp.where(jnp.arange(gate.shape[-1]) % 2 == 0, slow, gate)
    if "initial" not in states:
        del case.operands["initial_state"]
    return case if "final" in states else dataclasses.replace(case, d_state=None)


@functools.cache
def compiled(name, wanted=None, of=(True, True), residuals=None):
    """Results and gradients in layout "HBTD"; or the gradients of the operands named alone, of the
    output, the final state or both; or the results, if none is named."""
    facts, options, states = WAYS[name]
    options = options if residuals is None else {**options, "residuals": residuals}
    static = dict(use_gate_in_kernel="raw" in facts, lower_bound=facts.get("lower_bound"))
    layout = options.get("layout")

    def run(operands, cu_seqlens, d_output, d_state):
        def forward(some):
            output, state = call(
                moved(operands | some, layout, 0, 2), cu_seqlens=cu_seqlens, use_qk_l2norm=True,
                output_final_state="final" in states, implementation="pallas", **static, **options,
            )  # fmt: skip
            return jnp.moveaxis(output, 2, 0) if layout == "BTHD" else output, state

        if wanted == ():
            output, state = jax.vjp(forward, operands)[0]
            return {"output": output, "final_state": state}
        if wanted is not None:
            some, given = {n: operands[n] for n in wanted}, (d_output, d_state)
            asked = lambda xs: [x for x, y in zip(xs, of, strict=True) if y]  # noqa: E731
            _, pull = jax.vjp(lambda some: asked(forward(some)), some)
            return pull(asked(given))[0]
        (output, state), pull = jax.vjp(forward, operands)
        found = {"output": output, **pull((d_output, d_state))[0]}
        return found if state is None else {**found, "final_state": state}

    return jax.jit(run, compiler_options=QUICK)


def results(name, case, **options):
    found = compiled(name, **options)(case.operands, case.boundaries, case.d_output, case.d_state)
    return {tensor: np.asarray(x) for tensor, x in found.items()}


def reference(case):
    """Of a case that may lack states."""
    found = dict(case.reference())
    if case.d_state is None:
        found.pop("final_state")
    return found


@st.composite
def packings(draw):
    """Two rows with boundaries anywhere, some of them the same: those segments are empty."""
    edges = st.lists(st.integers(0, TOKENS), min_size=1, max_size=SLOTS)
    return np.array([[0, *np.sort(np.resize(draw(edges), SLOTS))] for _ in range(ROWS)], np.int32)


def assert_slots_close(found, case):
    """The states and their gradients slot by slot: that of an empty segment is passed on, and an
    error of a small one is not hidden by those of the others."""
    empty = np.diff(case.boundaries) == 0
    dtype, expected = case.operands["query"].dtype.name, reference(case)
    given = {"final_state": case.operands.get("initial_state"), "initial_state": case.d_state}
    for tensor, passed in given.items():
        if tensor not in found:
            continue
        passed = np.zeros_like(found[tensor]) if passed is None else np.asarray(passed)
        np.testing.assert_array_equal(found[tensor][empty], passed[empty], err_msg=tensor)
        size = np.sqrt(np.mean(np.square(expected[tensor])))
        for slot in np.argwhere(~empty):
            x, wanted = found[tensor][*slot], expected[tensor][*slot]
            error = np.sqrt(np.mean(np.square(x - wanted)))
            own = max(np.sqrt(np.mean(np.square(wanted))), 0.03 * size)
            assert error <= 2 * bound(tensor, dtype) * own, (tensor, slot, error / own)


@pytest.mark.parametrize("name", WAYS)
def test_every_segment_has_the_states_of_a_sequence_of_its_own(name):
    @settings(
        max_examples=5, deadline=None, derandomize=True, database=None,
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    @example(PACKINGS["several in a chunk"], 0)
    @example(PACKINGS["ends where chunks do"], 1)
    @example(PACKINGS["over several blocks"], 2)
    @example(PACKINGS["nothing, and little"], 3)
    @given(packings(), st.integers(0, 99))
    def holds(packing, seed):
        case = case_of(name, packing, seed)
        found = results(name, case)
        assert found.keys() - {"output"} >= {*PER_TOKEN}
        rates.append((found.pop("a_log", 0), case.reference().get("a_log", 0)))
        assert_close(found, case)
        assert_slots_close(found, case)

    rates = []
    holds()
    # a sum over tokens and channels may be small by chance: those of all packings together
    found, expected = (np.stack(x) for x in zip(*rates, strict=True))
    dtype = WAYS[name][0].get("dtype", "float32")
    assert relative_error(found, expected) <= bound("a_log", dtype)


def tokens_between(begins, ends):
    at = np.arange(TOKENS)
    return (at >= np.reshape(begins, (-1, 1))) & (at < np.reshape(ends, (-1, 1)))


@pytest.mark.parametrize("name", WAYS)
def test_padding_may_hold_anything(name):
    for packing in (slots_filled([0, 3, 3, 70], [0, 128]), PACKINGS["nothing, and little"]):
        case = case_of(name, packing)
        padding = tokens_between(packing[:, -1], TOKENS)
        clean = results(name, masked(case, padding, jnp.zeros_like))
        for junk in (np.nan, np.inf):
            found = results(name, masked(case, padding, lambda x, junk=junk: x * 0 + junk))
            for tensor, x in clean.items():
                np.testing.assert_array_equal(found[tensor], x, err_msg=f"{tensor}, {junk}")
                if tensor in ("output", *PER_TOKEN):
                    assert not found[tensor][:, padding].any(), (tensor, junk)


def scaled(state, slots):
    """States [B, N, ...] of which those of some slots are larger."""
    return None if state is None else state.at[slots].multiply(1000.0)


@pytest.mark.parametrize("name", WAYS)
def test_what_one_segment_holds_does_not_change_a_bit_of_the_others(name):
    # one of several in a chunk, and an empty one; one over the ends of chunks and blocks
    for packing, slots in (
        (slots_filled([0, 20, 41, TOKENS], [0, 70, 70, 100]), ([0, 1], [1, 1])),
        (slots_filled([0, 20, 140, 150], [0, 64, 200]), ([0, 1], [1, 1])),
    ):
        case = case_of(name, packing)
        large = tokens_between(packing[slots], packing[slots[0], np.add(slots[1], 1)])
        other = masked(case, large, lambda x: 1000 * x)
        values = {**case.operands, "value": other.operands["value"]}
        if "initial_state" in values:
            values["initial_state"] = scaled(values["initial_state"], slots)
        other = dataclasses.replace(other, operands=values, d_state=scaled(case.d_state, slots))
        plain, found = results(name, case), results(name, other)
        for tensor in ("output", *PER_TOKEN):
            np.testing.assert_array_equal(
                found[tensor][:, ~large], plain[tensor][:, ~large], err_msg=tensor
            )
        assert (found["output"][:, large] != plain["output"][:, large]).any()
        rest = np.ones(packing[:, 1:].shape, bool)
        rest[slots] = False
        for tensor in {"initial_state", "final_state"} & found.keys():
            np.testing.assert_array_equal(found[tensor][rest], plain[tensor][rest], err_msg=tensor)
            assert (found[tensor][slots] != plain[tensor][slots]).any()


def test_both_policies_give_the_same_bits():
    name = "resets in float32"
    case = case_of(name, PACKINGS["over several blocks"])
    rebuilt, saved = results(name, case), results(name, case, wanted=(), residuals="save")
    for tensor in ("output", "final_state"):
        np.testing.assert_array_equal(saved[tensor], rebuilt[tensor], err_msg=tensor)


# What is asked for alone, of which results there are cotangents.
ALONE = {
    "the initial state, of the final one": (("initial_state",), False, True),
    "the value, of the output": (("value",), True, False),
}


@pytest.mark.parametrize("asked", ALONE)
def test_a_gradient_that_is_asked_for_alone(asked):
    wanted, of_output, of_state = ALONE[asked]
    case = case_of("softplus", PACKINGS["several in a chunk"], seed=5)
    if not of_output:
        case.d_output = jnp.zeros_like(case.d_output)
    if not of_state:
        case.d_state = jnp.zeros_like(case.d_state)
    found = results("softplus", case, wanted=wanted, of=(of_output, of_state))
    assert found.keys() == set(wanted)
    assert_close(found, case)
    if of_state:
        assert_slots_close(found, case)


def test_nothing_is_rounded_to_bfloat16_at_the_highest_precision():
    """But results of that dtype, and after the same call at a lower precision."""
    case = case_of("softplus", PACKINGS["several in a chunk"])
    rounded = results("softplus", case)
    with jax.default_matmul_precision("highest"):
        found = results("softplus", case)
    expected = reference(case)
    for name in ("final_state", "initial_state"):
        assert relative_error(found[name], expected[name]) < 1e-6, name
        assert relative_error(rounded[name], expected[name]) > 1e-4, name
    for name in ("a_log", "delta_time_bias"):
        assert relative_error(found[name], expected[name]) < 2e-4, name


def test_on_a_tpu_states_of_segments_run_on_kernels(monkeypatch):
    """As a call is traced there, with the gradient and by default, and nothing is passed over."""
    chip = get_chip("v6e")
    target = Target(True, False, chip.device_kinds[0], "for a test")
    monkeypatch.setattr("kdagen.runtime.kda.find_target", lambda: target)
    forget_warnings()
    case = case_of("softplus", PACKINGS["over several blocks"])

    def run(operands):
        output, state = call(
            operands, cu_seqlens=case.boundaries, output_final_state=True, use_gate_in_kernel=True
        )
        return jnp.sum(output.astype(jnp.float32)) + jnp.sum(state)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = str(jax.make_jaxpr(jax.grad(run))(case.operands))
    assert "name=kda_forward" in text and "name=kda_backward" in text
    told = [str(w.message) for w in caught if w.category is KdagenWarning]
    assert not any("xla_chunked" in message for message in told), told
