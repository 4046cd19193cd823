"""The public function under JAX's transformations, and the rules of fallback."""

import contextlib
import dataclasses
import functools
import io
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdagen.measure.accuracy import relative_error
from kdagen.runtime.autodiff import STATES_NAME
from kdagen.runtime.kda import kimi_delta_attention
from kdagen.runtime.segments import boundaries_from_lengths
from kdagen.runtime.target import KdagenWarning, forget_warnings
from tests.reference.cases import make_case
from tests.runtime.run import PER_TOKEN, call, results

SMALL = dict(tokens=9, width_k=8, width_v=8, batch=2)


@pytest.fixture(scope="module")
def case():
    return make_case(raw=True, **SMALL)


def run(case, operands, **options):
    return call(operands, **case.static, output_final_state=True, **options)


def loss(case, operands, **options):
    output, state = run(case, operands, **options)
    return jnp.sum(output * case.d_output) + jnp.sum(state * case.d_state)


@pytest.fixture(scope="module")
def gradients(case):
    return jax.jit(jax.grad(functools.partial(loss, case)))(case.operands)


def same(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=1e-5), a, b)


def heads_last(tensors):
    swap = lambda name, x: jnp.moveaxis(x, 0, 2) if name in PER_TOKEN else x  # noqa: E731
    return {name: swap(name, x) for name, x in tensors.items()}


@pytest.mark.parametrize("implementation", ["xla_chunked", "recurrent"])
@pytest.mark.parametrize("boundaries", [None, [[0, 11, 14, 18], [0, 0, 9, 20]]])
def test_layouts_agree_and_gradients_have_the_layout_of_the_call(implementation, boundaries):
    case = make_case(
        raw=True, tokens=20, width_k=8, width_v=12, batch=2, value_heads=4, boundaries=boundaries
    )
    other = dataclasses.replace(
        case, operands=heads_last(case.operands), d_output=jnp.moveaxis(case.d_output, 0, 2)
    )
    plain = results(case, implementation=implementation)
    found = results(other, implementation=implementation, layout="BTHD")
    wanted = {**heads_last(plain), "output": jnp.moveaxis(plain["output"], 0, 2)}
    same(found, wanted, 1e-6)


def test_an_invalid_row_is_nan_in_either_layout(case):
    ids = np.array([[1, 1, 2, 1, 2, 2, 2, 2, 2], [1] * 9])
    operands = {n: x for n, x in heads_last(case.operands).items() if n != "initial_state"}
    output, _ = jax.jit(
        lambda ids: run(case, operands, segment_ids=ids, max_num_segments=2, layout="BTHD")
    )(ids)
    assert np.isnan(output[0]).all() and np.isfinite(output[1]).all()


@pytest.mark.parametrize("implementation", ["xla_chunked", "recurrent", "pallas"])
def test_what_is_kept_for_the_gradient_is_in_the_layout_of_the_call(implementation):
    sizes = dict(tokens=9, width_k=128, width_v=128, batch=2, dtype="bfloat16")
    case = make_case(raw=True, heads=3, **sizes)
    operands = heads_last(case.operands)
    f = lambda x: run(case, x, layout="BTHD", implementation=implementation)[0]  # noqa: E731
    _, pull = jax.eval_shape(lambda x: jax.vjp(f, x), operands)
    kept = [x.shape for x in jax.tree.leaves(pull)]
    assert kept.count((2, 9, 3, 128)) == 4 and (2, 9, 3) in kept
    assert not [shape for shape in kept if shape[:3] == (3, 2, 9)]


def test_ids_and_lengths_agree(case):
    ids = np.array([[1] * 3 + [3] * 4 + [0] * 2, [2] * 9])
    lengths = np.array([[0, 3, 3, 7], [0, 0, 9, 9]])
    operands = {**case.operands, "initial_state": jnp.ones((2, 3, 2, 8, 8))}
    by_ids, by_lengths, by_traced_ids, by_traced_lengths = (
        run(case, operands, segment_ids=ids, max_num_segments=3),
        run(case, operands, cu_seqlens=lengths),
        jax.jit(lambda ids: run(case, operands, segment_ids=ids, max_num_segments=3))(ids),
        jax.jit(lambda edges: run(case, operands, cu_seqlens=edges))(lengths),
    )
    same(by_ids, by_lengths, 0)
    same(by_ids, by_traced_ids, 0)
    same(by_ids, by_traced_lengths, 0)


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_traced_boundaries_of_a_narrow_type_are_not_wrapped(dtype):
    edges = np.array([0, 100, 200])
    of = lambda x: boundaries_from_lengths(x, 1, 300)  # noqa: E731
    found, valid = jax.jit(of)(edges.astype(dtype))
    assert found.tolist() == [[0, 100, 200]] and valid.all()


def test_traced_segments_that_break_the_rules_are_nan(case):
    ids = np.array([[1] * 3 + [3] * 4 + [0] * 2, [1, 1, 2, 1, 2, 2, 2, 2, 2]])
    operands = {name: x for name, x in case.operands.items() if name != "initial_state"}
    output, state = jax.jit(lambda ids: run(case, operands, segment_ids=ids, max_num_segments=3))(
        ids
    )
    assert np.isfinite(output[:, 0]).all() and np.isfinite(state[0]).all()
    assert np.isnan(output[:, 1]).all() and np.isnan(state[1]).all()
    output, _ = jax.jit(lambda edges: run(case, operands, cu_seqlens=edges))(
        np.array([[0, 4, 10], [0, 4, 9]])
    )
    assert np.isnan(output[:, 0]).all() and np.isfinite(output[:, 1]).all()


def test_vmap(case, gradients):
    stacked = {name: jnp.stack([x, 0.5 * x]) for name, x in case.operands.items()}
    found = jax.jit(jax.vmap(jax.grad(functools.partial(loss, case))))(stacked)
    same(jax.tree.map(lambda x: x[0], found), gradients)


def test_scan_over_layers_with_checkpoint(case, gradients):
    def layers(operands, policy):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(total, factor):
            return total + factor * loss(case, operands), None

        return jax.lax.scan(layer, 0.0, jnp.asarray([1.0, 2.0]))[0]

    policies = jax.checkpoint_policies
    for policy in (None, policies.save_only_these_names(STATES_NAME)):
        found = jax.jit(jax.grad(functools.partial(layers, policy=policy)))(case.operands)
        same(found, jax.tree.map(lambda x: 3 * x, gradients), 1e-4)


@pytest.mark.parametrize("implementation", ["xla_chunked", "pallas"])
def test_states_are_kept_under_their_name(case, implementation):
    from jax.ad_checkpoint import print_saved_residuals  # prints; there is no public reader

    policy = jax.checkpoint_policies.save_only_these_names(STATES_NAME)
    for residuals, kept in (("save", True), ("rematerialize", False)):
        static = dict(residuals=residuals, implementation=implementation)
        f = jax.checkpoint(functools.partial(loss, case, **static), policy=policy)
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            print_saved_residuals(f, case.operands)
        assert (STATES_NAME in text.getvalue()) == kept


def test_donated_buffers(case, gradients):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(operands):
        found = jax.grad(functools.partial(loss, case))(operands)
        return jax.tree.map(lambda x, g: x - g, operands, found)

    copies = jax.tree.map(jnp.copy, case.operands)
    same(step(copies), jax.tree.map(lambda x, g: x - g, case.operands, gradients))


def test_x64(case, gradients):
    with jax.enable_x64(True):
        found = jax.jit(jax.grad(functools.partial(loss, case)))(case.operands)
        assert {x.dtype.name for x in found.values()} == {"float32"}
        same(found, gradients)


@pytest.mark.parametrize("implementation", ["xla_chunked", "recurrent", "pallas"])
def test_a_second_derivative_is_refused_by_name(case, implementation):
    def once(value):
        operands = {**case.operands, "value": value}
        return jnp.sum(run(case, operands, implementation=implementation)[0] ** 2)

    value = case.operands["value"]
    for twice in (jax.jacfwd(jax.grad(once)), jax.grad(lambda v: jnp.sum(jax.grad(once)(v)))):
        with pytest.raises(NotImplementedError, match="kimi_delta_attention"):
            jax.eval_shape(twice, value)


def test_gradients_not_asked_for_are_not_computed(case):
    def lowered(name):
        f = lambda x: jnp.sum(run(case, {**case.operands, name: x})[0])  # noqa: E731
        return jax.jit(jax.grad(f)).lower(case.operands[name]).as_text()

    backward = lambda text: re.search(r"func.func private @_backward.*?-> (.*?) {\n", text)[1]  # noqa: E731
    only_value, only_gate = backward(lowered("value")), backward(lowered("gate"))
    # value is [2, 2, 9, 8] as the others are, so that it is their number that tells
    assert only_value.count("tensor<") == only_gate.count("tensor<") == 1
    everything = jax.jit(jax.grad(functools.partial(loss, case))).lower(case.operands).as_text()
    assert backward(everything).count("tensor<") == len(case.operands)
    products = [lowered(n).count("stablehlo.dot_general") for n in ("value", "gate")]
    assert products[0] < products[1]


def test_a_cotangent_that_is_zero_is_no_operand(case):
    def arguments(f):
        text = jax.jit(jax.grad(f)).lower(case.operands).as_text()
        return re.search(r"func.func private @_backward\((.*?)\) ->", text)[1].count("tensor<")

    output_only = arguments(lambda x: jnp.sum(run(case, x)[0]))
    state_only = arguments(lambda x: jnp.sum(run(case, x)[1]))
    both = arguments(functools.partial(loss, case))
    assert output_only == state_only == both - 1


@pytest.fixture
def noted():
    """The kdagen warnings of a test, each reason untold before it."""
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(w.message) for w in caught if w.category is KdagenWarning]


def test_off_tpu_the_default_is_the_chunk_form_without_a_word(case, noted):
    same(run(case, case.operands), run(case, case.operands, implementation="xla_chunked"), 0)
    assert noted() == []


def test_a_sequence_passes_over_pallas_off_tpu_and_says_so_once(case, noted):
    for _ in range(2):
        found = run(case, case.operands, implementation=("mosaic", "xla_chunked"))
    same(found, run(case, case.operands, implementation="xla_chunked"), 0)
    assert len(noted()) == 1 and "no TPU is targeted" in noted()[0]


def test_the_interpreter_runs_gradients_that_some_chip_has_no_memory_for():
    case = make_case(heads=1, value_heads=3, tokens=3, width_k=256, width_v=256)

    def gradient(implementation):
        def loss(operands):
            return jnp.sum(kimi_delta_attention(**operands, implementation=implementation)[0])

        return jax.grad(loss)(plain(case))

    found, expected = gradient("pallas"), gradient("xla_chunked")
    for name, x in found.items():
        assert relative_error(x, np.asarray(expected[name])) < 5e-5, name


def test_forward_mode_is_refused(case):
    f = lambda v: kimi_delta_attention(**{**plain(case), "value": v})[0]  # noqa: E731
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(f, (case.operands["value"],), (case.operands["value"],))


def plain(case):
    return {name: case.operands[name] for name in ("query", "key", "value", "gate", "beta")}
