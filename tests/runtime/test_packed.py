"""Packed sequences behind the public function, on the generated kernels in interpret mode."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from kdagen.measure.accuracy import bound, relative_error
from kdagen.runtime.segments import pack_segments
from tests.reference.cases import assert_close, make_case
from tests.runtime.run import PER_TOKEN, call, masked, moved

# A kernel in the interpreter compiles for seconds and runs for a moment. So all packings have one
# shape, and are traced: three chunks of 64 tokens, the last of them not full, and slots for a
# hundred segments.
ROWS, TOKENS, SLOTS = 2, 150, 110
SIZES = dict(heads=1, value_heads=2, batch=ROWS, tokens=TOKENS, width_k=48, width_v=60)
QUICK = {"xla_backend_optimization_level": 0}

# Facts of a case, and options of a call.
WAYS = {
    "softplus": (dict(raw=True, dtype="bfloat16"), dict(residuals="save")),
    "bounded": (
        dict(raw=True, lower_bound=-5.0, dtype="bfloat16"),
        dict(residuals="rematerialize", layout="BTHD"),
    ),
    "bounded in float32": (dict(raw=True, lower_bound=-5.0), dict(residuals="save")),
    "resets in float32": (dict(gate="resets"), dict(residuals="rematerialize", layout="BTHD")),
}

ALONE = range(7, 107)  # tokens that are each a segment, over the end of a chunk


def slots_filled(*rows):
    """Boundaries of all slots: the last segments are empty."""
    return np.array([[*row, *[row[-1]] * (SLOTS + 1 - len(row))] for row in rows], np.int32)


PACKINGS = {
    "many of one token": slots_filled([0, *ALONE, 107, TOKENS], [0, 140]),
    "ends where chunks do": slots_filled([0, 64, 64, 128], [0, 0, 0, 63, 65, TOKENS - 1, TOKENS]),
    "nothing, and all": slots_filled([0, 0], [0, TOKENS]),
}


def case_of(name, packing, seed=0):
    """A case without states of its segments. Every other channel hardly decays: what leaks from
    one chunk into the next is still there."""
    facts, _ = WAYS[name]
    case = make_case(boundaries=packing, seed=seed, **facts, **SIZES)
    gate = case.operands["gate"]
    slow = gate - 7 if "raw" in facts else jnp.full_like(gate, -0.002)
    case.operands["gate"] = jnp.where(jnp.arange(gate.shape[-1]) % 2 == 0, slow, gate)
    del case.operands["initial_state"]
    return dataclasses.replace(case, d_state=None)


@functools.cache
def compiled(name):
    """Output and gradients of operands, boundaries and a cotangent, all in layout "HBTD"."""
    facts, options = WAYS[name]
    static = dict(use_gate_in_kernel="raw" in facts, lower_bound=facts.get("lower_bound"))
    layout = options.get("layout")

    def run(operands, cu_seqlens, d_output):
        def forward(operands):
            output, state = call(
                moved(operands, layout, 0, 2), cu_seqlens=cu_seqlens, use_qk_l2norm=True,
                implementation="pallas", **static, **options,
            )  # fmt: skip
            assert state is None
            return jnp.moveaxis(output, 2, 0) if layout == "BTHD" else output

        output, pull = jax.vjp(forward, operands)
        return {"output": output, **pull(d_output)[0]}

    return jax.jit(run, compiler_options=QUICK)


def results(name, case):
    found = compiled(name)(case.operands, case.boundaries, case.d_output)
    return {tensor: np.asarray(x) for tensor, x in found.items()}


@st.composite
def packings(draw):
    """Two rows with boundaries anywhere, some of them the same: those segments are empty."""
    edges = st.lists(st.integers(0, TOKENS), min_size=1, max_size=9)
    return np.array([[0, *np.sort(np.resize(draw(edges), SLOTS))] for _ in range(ROWS)], np.int32)


@pytest.mark.parametrize("name", WAYS)
def test_segments_are_sequences_of_their_own(name):
    @settings(
        max_examples=5, deadline=None, derandomize=True, database=None,
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    @example(PACKINGS["many of one token"], 0)
    @example(PACKINGS["ends where chunks do"], 1)
    @example(PACKINGS["nothing, and all"], 2)
    @given(packings(), st.integers(0, 99))
    def holds(packing, seed):
        case = case_of(name, packing, seed)
        found = results(name, case)
        rates.append((found.pop("a_log", 0), case.reference().get("a_log", 0)))
        assert_close(found, case)

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
    for packing in (slots_filled([0, 3, 3, 70], [0, 128]), PACKINGS["nothing, and all"]):
        case = case_of(name, packing)
        padding = tokens_between(packing[:, -1], TOKENS)
        clean = results(name, masked(case, padding, jnp.zeros_like))
        for junk in (np.nan, np.inf, -np.inf):
            found = results(name, masked(case, padding, lambda x, junk=junk: x * 0 + junk))
            for tensor, x in clean.items():
                np.testing.assert_array_equal(found[tensor], x, err_msg=f"{tensor}, {junk}")
                if tensor in ("output", *PER_TOKEN):
                    assert not found[tensor][:, padding].any(), (tensor, junk)
                    assert found[tensor][:, ~padding].any(), (tensor, junk)


@pytest.mark.parametrize("name", WAYS)
def test_what_one_segment_holds_does_not_change_a_bit_of_the_others(name):
    # three segments of one chunk, and one that is begun in a chunk and ended in the next
    for packing, begins, ends in (
        (slots_filled([0, 20, 41, TOKENS], [0, 31, 100]), (20, 31), (41, 100)),
        (slots_filled([0, 20, 90, 120], [0, 64, 130]), (0, 0), (20, 64)),
    ):
        case, large = case_of(name, packing), tokens_between(begins, ends)
        other = masked(case, large, lambda x: 1000 * x)
        values = {**case.operands, "value": other.operands["value"]}
        plain = results(name, case)
        found = results(name, dataclasses.replace(other, operands=values))
        for tensor in ("output", *PER_TOKEN):
            np.testing.assert_array_equal(
                found[tensor][:, ~large], plain[tensor][:, ~large], err_msg=tensor
            )
        assert (found["output"][:, large] != plain["output"][:, large]).any()


# Smaller calls, for what needs programs of its own.
SMALL = dict(heads=1, batch=2, tokens=40, width_k=16, width_v=16)
IDS = np.array([[1] * 10 + [3] * 25 + [0] * 5, [2] * 40])
LENGTHS = np.array([[0, 10, 10, 35], [0, 0, 40, 40]])


@pytest.fixture(scope="module")
def small():
    case = make_case(**SMALL)
    del case.operands["initial_state"]
    return case


def attend(operands, segment_ids=None, implementation="pallas", **options):
    """The output of a call with segments."""
    return call(
        operands, segment_ids=segment_ids, use_qk_l2norm=True, implementation=implementation,
        **options,
    )[0]  # fmt: skip


@pytest.fixture(scope="module")
def by_ids():
    """The output of a call with traced segment ids."""
    run = functools.partial(attend, max_num_segments=3)
    return jax.jit(run, compiler_options=QUICK)


@pytest.fixture(scope="module")
def by_packing():
    """That of a call with a packing."""
    return jax.jit(attend, compiler_options=QUICK)


def ways_to_pack():
    """The packing of IDS and LENGTHS, said in every way."""
    by_ids = functools.partial(pack_segments, max_num_segments=3)
    by_lengths = lambda x: pack_segments(cu_seqlens=x, tokens=40)  # noqa: E731
    yield from (by_ids(IDS), by_ids(jnp.asarray(IDS)), jax.jit(by_ids)(IDS))
    yield from (by_lengths(LENGTHS), jax.jit(by_lengths)(LENGTHS))
    yield pack_segments(cu_seqlens=LENGTHS, batch=2, tokens=40)


def two_packings():
    """Of IDS and of the same with its rows changed, on a leading axis."""
    packings = [pack_segments(ids, max_num_segments=3) for ids in (IDS, IDS[::-1])]
    return packings, jax.tree.map(lambda *x: jnp.stack(x), *packings)


def test_all_ways_to_say_a_packing_are_one_packing():
    first, *others = ways_to_pack()
    np.testing.assert_array_equal(first.boundaries[:, :3], LENGTHS[:, :3])
    np.testing.assert_array_equal(first.lengths, [35, 40])
    for other in others:
        np.testing.assert_array_equal(other.boundaries, first.boundaries)
        np.testing.assert_array_equal(other.spans, first.spans)
        assert other.valid is None or other.valid.all()
    one = pack_segments(cu_seqlens=LENGTHS[0], tokens=40)
    np.testing.assert_array_equal(one.spans, first.spans[:1])


def test_a_packing_gives_the_bits_of_its_ids(small, by_ids, by_packing):
    known = pack_segments(IDS, max_num_segments=3)
    traced = jax.jit(functools.partial(pack_segments, max_num_segments=3))(IDS)
    assert known.valid is None and traced.valid is not None
    wanted = by_ids(small.operands, IDS)
    for packing in (known, traced):
        np.testing.assert_array_equal(by_packing(small.operands, packing), wanted)
    other = pack_segments(cu_seqlens=LENGTHS[::-1], tokens=40)
    assert (by_packing(small.operands, other) != wanted).any()


def test_traced_ids_that_break_the_rules_are_nan(small, by_ids, by_packing):
    for row in ([1, 2, 1] + [2] * 37, [4] * 40, [0] + [1] * 39, [-1] * 40):
        ids = np.stack([IDS[0], row])
        packing = jax.jit(functools.partial(pack_segments, max_num_segments=3))(ids)
        for output in (by_ids(small.operands, ids), by_packing(small.operands, packing)):
            assert np.isnan(output[:, 1]).all()
            np.testing.assert_array_equal(output[:, 0], by_ids(small.operands, IDS)[:, 0])


@pytest.mark.parametrize("edges", [[0, 151], [0, 70, 69], [1, 150]])
def test_traced_lengths_that_break_the_rules_are_nan(edges):
    packing = PACKINGS["ends where chunks do"]
    wrong = np.stack([packing[0], slots_filled(edges)[0]])
    case = case_of("bounded in float32", packing)
    wanted = results("bounded in float32", case)["output"]
    found = results("bounded in float32", dataclasses.replace(case, boundaries=wrong))["output"]
    assert np.isnan(found[:, 1]).all()
    np.testing.assert_array_equal(found[:, 0], wanted[:, 0])


def gradients(implementation, operands, packing, d_output):
    """Of one packed layer, by JAX's own jit inside of whatever is done with them."""

    @jax.jit
    def loss(operands, packing):
        return jnp.sum(attend(operands, packing, implementation) * d_output)

    return jax.grad(loss)(operands, packing)


def assert_like_the_recurrence(run, *arguments):
    """What `run` gives for the kernels and for the recurrence, its first argument, is the same."""
    found, wanted = (
        jax.jit(functools.partial(run, name), compiler_options=QUICK)(*arguments)
        for name in ("pallas", "recurrent")
    )
    for name, x in wanted.items():
        assert relative_error(found[name], np.asarray(x, np.float64)) < 1e-4, name


def test_a_packing_crosses_jit_scan_and_checkpoint(small):
    def run(implementation, operands, packings, d_output):
        def loss(operands):
            @jax.checkpoint
            def layer(query, packing):
                return attend({**operands, "query": query}, packing, implementation), None

            return jnp.sum(jax.lax.scan(layer, operands["query"], packings)[0] * d_output)

        return jax.grad(loss)(operands)

    _, stacked = two_packings()
    assert_like_the_recurrence(run, small.operands, stacked, small.d_output)


def test_vmap_over_packed_layers(small):
    _, stacked = two_packings()
    operands = {name: jnp.stack([x, 0.5 * x]) for name, x in small.operands.items()}

    def run(implementation, operands, packings, d_output):
        one = functools.partial(gradients, implementation)
        return jax.vmap(one, in_axes=(0, 0, None))(operands, packings, d_output)

    assert_like_the_recurrence(run, operands, stacked, small.d_output)


def test_vmap_over_values_of_one_packing(small, by_packing):
    packing = pack_segments(IDS, max_num_segments=3)
    value = small.operands["value"]

    def one(value):
        return attend({**small.operands, "value": value}, packing)

    found = jax.jit(jax.vmap(one), compiler_options=QUICK)(jnp.stack([value, 0.5 * value]))
    wanted = by_packing(small.operands, packing)
    # halves round to nothing
    np.testing.assert_array_equal(found, jnp.stack([wanted, 0.5 * wanted]))


WRONG = [
    (
        dict(segment_ids=IDS, max_num_segments=3, cu_seqlens=LENGTHS),
        ValueError,
        "segment_ids: give",
    ),
    (dict(), ValueError, "segment_ids: give"),
    (dict(segment_ids=IDS), ValueError, "max_num_segments: got None"),
    (dict(segment_ids=IDS, max_num_segments=0), ValueError, "max_num_segments: got 0"),
    (dict(segment_ids=IDS, max_num_segments=2.0), TypeError, "max_num_segments: got 2.0"),
    (dict(segment_ids=IDS, max_num_segments=2), ValueError, "segment_ids: got ids from 0 to 3"),
    (dict(segment_ids=IDS[0], max_num_segments=3), ValueError, r"segment_ids: got shape \(40,\)"),
    (dict(segment_ids=IDS * 1.0, max_num_segments=3), ValueError, "segment_ids: got dtype float"),
    (dict(segment_ids=IDS.tolist(), max_num_segments=3), TypeError, "segment_ids: got list"),
    (dict(cu_seqlens=LENGTHS), ValueError, "tokens: got None"),
    (dict(cu_seqlens=LENGTHS, tokens=40.0), TypeError, "tokens: got 40.0"),
    (dict(cu_seqlens=LENGTHS, tokens=0), ValueError, "tokens: got 0"),
    (dict(segment_ids=IDS, max_num_segments=3, tokens=41), ValueError, "tokens: got 41.* be 40"),
    (
        dict(cu_seqlens=LENGTHS, tokens=40, max_num_segments=4),
        ValueError,
        "max_num_segments: got 4.* be 3",
    ),
    (dict(cu_seqlens=LENGTHS, tokens=39), ValueError, "cu_seqlens: got a last value of 40"),
    (dict(cu_seqlens=LENGTHS, tokens=40, batch=3), ValueError, r"cu_seqlens: got shape \(2, 4\)"),
    (dict(cu_seqlens=LENGTHS[0], tokens=40, batch=2), ValueError, r"cu_seqlens: got shape \(4,\)"),
    (dict(cu_seqlens=LENGTHS[:, :1], tokens=40), ValueError, "cu_seqlens: .*2 boundaries or more"),
    (dict(cu_seqlens=LENGTHS * 1.0, tokens=40), ValueError, "cu_seqlens: got dtype float"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=[w[2][:40] for w in WRONG])
def test_wrong_arguments_of_pack_segments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        pack_segments(**arguments)


def test_a_packing_of_another_call_is_refused_by_name(small):
    for ids in (IDS[:1], IDS[:, :39], np.concatenate([IDS, IDS])):
        packing = pack_segments(ids, max_num_segments=3)
        with pytest.raises(ValueError, match=r"segment_ids: got .*a packing of \[B, 2, T\]"):
            attend(small.operands, packing)
    packing = pack_segments(IDS, max_num_segments=3)
    with pytest.raises(ValueError, match=r"max_num_segments: got N = 4.*must be 3"):
        attend(small.operands, packing, max_num_segments=4)
    with pytest.raises(ValueError, match="cu_seqlens: got it together with segment_ids"):
        attend(small.operands, packing, cu_seqlens=LENGTHS)


@pytest.mark.parametrize("implementation", ["pallas", "xla_chunked"])
def test_no_rank_is_promoted_in_silence(implementation):
    case = case_of("softplus", PACKINGS["nothing, and all"])
    with jax.numpy_rank_promotion("raise"):
        run = functools.partial(call, use_gate_in_kernel=True, implementation=implementation)
        jax.eval_shape(run, case.operands, cu_seqlens=case.boundaries)
