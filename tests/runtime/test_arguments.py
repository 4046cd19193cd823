"""What a wrong call is told: the argument, what it got and what it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdagen.runtime.kda import kimi_delta_attention

H, HV, B, T, K, V = 2, 4, 3, 8, 6, 5


def given(**changes):
    f = lambda *shape: jnp.zeros(shape, jnp.bfloat16)  # noqa: E731
    call = dict(
        query=f(H, B, T, K), key=f(H, B, T, K), value=f(HV, B, T, V), gate=f(HV, B, T, K),
        beta=f(HV, B, T),
    )  # fmt: skip
    return {**call, **changes}


def state(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


RAW = dict(use_gate_in_kernel=True)
IDS = jnp.ones((B, T), jnp.int32)
WRONG = [
    (dict(query=state(H, B, T)), ValueError, r"query: got shape \(2, 3, 8\).*\[H, B, T, D\]"),
    (dict(query=state(H, B, T, K, dtype=jnp.float16)), ValueError, "query: got dtype float16"),
    (dict(query=[1.0]), TypeError, "query: got list"),
    (dict(key=state(H, B, T, K)), ValueError, "key: got dtype float32.*bfloat16"),
    (dict(key=jnp.zeros((H, B, T, K + 1), jnp.bfloat16)), ValueError, r"key: got shape .*7\)"),
    (dict(value=jnp.zeros((3, B, T, V), jnp.bfloat16)), ValueError, "value: got 3 heads.*multiple"),
    (dict(value=jnp.zeros((HV, B, T, 257), jnp.bfloat16)), ValueError, "V = 257.*1 to 256"),
    (dict(query=jnp.zeros((H, B, T, 300), jnp.bfloat16)), ValueError, "K = 300.*1 to 256"),
    (dict(query=jnp.zeros((H, B, 0, K), jnp.bfloat16)), ValueError, "query: got 0 tokens"),
    (dict(gate=state(HV, B, T, V)), ValueError, r"gate: got shape .*\[HV, B, T, K\]"),
    (dict(beta=state(HV, B, T, 1)), ValueError, r"beta: got shape .*\[HV, B, T\]"),
    (dict(beta=state(HV, B, T + 1)), ValueError, "beta: got shape"),
    (RAW, ValueError, r"a_log: got None.*\[HV\] = \(4,\)"),
    (dict(**RAW, a_log=state(128)), ValueError, r"a_log: got shape \(128,\).*\(4,\)"),
    (dict(**RAW, a_log=state(HV, dtype=jnp.bfloat16)), ValueError, "a_log: got dtype bfloat16"),
    (dict(lower_bound=-5.5), ValueError, r"lower_bound: got -5.5.*\[-5, 0\)"),
    (dict(lower_bound=0), ValueError, "lower_bound: got 0"),
    (dict(lower_bound="x"), TypeError, "lower_bound: got 'x'"),
    (dict(delta_time_bias=state(K)), ValueError, r"delta_time_bias: got shape \(6,\)"),
    (dict(scale=float("nan")), ValueError, "scale: got nan"),
    (dict(scale="big"), TypeError, "scale: got 'big'"),
    (dict(use_qk_l2norm=1), TypeError, "use_qk_l2norm: got 1"),
    (dict(output_final_state=None), TypeError, "output_final_state: got None"),
    (dict(initial_state=state(B, HV, K, V)), ValueError, "initial_state: got shape.*5 axes"),
    (dict(initial_state=state(B, 2, HV, K, V)), ValueError, "initial_state: got N = 2.*must be 1"),
    (dict(initial_state=state(B, 1, HV, V, K)), ValueError, "initial_state: got shape"),
    (
        dict(initial_state=state(B, 1, HV, K, V, dtype=jnp.bfloat16)),
        ValueError,
        "initial_state: got dtype bfloat16",
    ),
    (dict(segment_ids=IDS), ValueError, "max_num_segments: got None"),
    (dict(segment_ids=IDS, max_num_segments=0), ValueError, "max_num_segments: got 0"),
    (dict(segment_ids=IDS, max_num_segments=1.5), TypeError, "max_num_segments: got 1.5"),
    (dict(segment_ids=IDS[:, :2], max_num_segments=1), ValueError, "segment_ids: got shape"),
    (dict(segment_ids=1.0 * IDS, max_num_segments=1), ValueError, "segment_ids: got dtype"),
    (
        dict(segment_ids=IDS, max_num_segments=1, cu_seqlens=np.array([[0, 8]] * 3)),
        ValueError,
        "cu_seqlens: got it together with segment_ids",
    ),
    (
        dict(segment_ids=IDS, max_num_segments=2, initial_state=state(B, 3, HV, K, V)),
        ValueError,
        "initial_state: got N = 3.*must be 2",
    ),
    (dict(cu_seqlens=np.array([0, 8])), ValueError, r"cu_seqlens: got shape \(2,\)"),
    (
        dict(cu_seqlens=np.array([[0, 8]] * 3), max_num_segments=2),
        ValueError,
        "max_num_segments: got N = 2.*must be 1",
    ),
    (dict(cu_seqlens=np.array([[0, 9]] * 3)), ValueError, "cu_seqlens: got a last value of 9"),
    (dict(cu_seqlens=np.array([[1, 8]] * 3)), ValueError, "cu_seqlens.*start with 0"),
    (dict(cu_seqlens=np.array([[0, 5, 4]] * 3)), ValueError, "cu_seqlens.*decrease"),
    (dict(segment_ids=2 * IDS, max_num_segments=1), ValueError, "segment_ids: got ids from 2 to 2"),
    (
        dict(segment_ids=IDS.at[1, 3].set(0), max_num_segments=1),
        ValueError,
        "segment_ids: row 1 goes from 0 to 1 at token 4",
    ),
    (dict(max_num_segments=2), ValueError, "max_num_segments: got N = 2.*no segments"),
    (dict(context_parallel=object()), TypeError, "context_parallel: .*axis_name"),
    (dict(layout="TBHD"), ValueError, "layout: got 'TBHD'.*'HBTD', 'BTHD'"),
    (dict(residuals="all"), ValueError, "residuals: got 'all'.*'save', 'rematerialize'"),
    (dict(implementation="triton"), ValueError, "implementation: got 'triton'.*'xla_chunked'"),
    (dict(implementation=()), ValueError, "implementation: got an empty sequence"),
    (dict(implementation=3), TypeError, "implementation: got 3"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[w[2][:40] for w in WRONG])
def test_wrong_arguments_raise_while_tracing(changes, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: kimi_delta_attention(**given(**changes)))


def test_context_parallel_is_refused_by_name():
    class Ring:
        axis_name = "context"

    with pytest.raises(ValueError, match="context_parallel: got axis_name='context'"):
        kimi_delta_attention(**given(context_parallel=Ring()))


def test_a_traced_scale_is_refused():
    with pytest.raises(TypeError, match="scale: got a traced value"):
        jax.jit(lambda s: kimi_delta_attention(**given(scale=s)))(1.0)


def test_the_other_layout_names_its_axes():
    swapped = {name: jnp.moveaxis(x, 0, 2) for name, x in given().items()}
    with pytest.raises(ValueError, match=r"gate: got shape .*\[B, T, HV, K\]"):
        kimi_delta_attention(**{**swapped, "gate": swapped["value"]}, layout="BTHD")


@pytest.mark.parametrize("name", ["xla", ("xla_chunked", "xla"), ["recurrent"], "xla_chunked"])
def test_names_of_implementations(name):
    output, state = kimi_delta_attention(**given(), implementation=name, output_final_state=True)
    assert output.shape == (HV, B, T, V) and output.dtype == jnp.bfloat16
    assert state.shape == (B, 1, HV, K, V) and state.dtype == jnp.float32


def test_parameters_of_a_gate_that_is_not_raw_are_checked_and_not_used():
    rng = np.random.RandomState(0)
    call = {name: jnp.asarray(rng.rand(*x.shape), x.dtype) for name, x in given().items()}
    plain, _ = kimi_delta_attention(**call)
    other, _ = kimi_delta_attention(**call, a_log=state(HV) + 1, delta_time_bias=state(HV * K) + 1)
    np.testing.assert_array_equal(plain, other)
