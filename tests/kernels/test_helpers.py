"""The helpers that kernels are made of, called as plain functions, against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdagen.emission import relation_tiles
from kdagen.kernels import gates, inverse, recurrence, relations
from kdagen.kernels.lanes import BF16, F32, FULL, LOG2_E, NT, SPLIT, dot

# A product in bf16 is wrong by 2e-3.
BOUND_F32 = 1e-6


@functools.cache
def compiled(function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """For the CPU, hardly optimised."""
    fast = {"xla_backend_optimization_level": 0}
    return jax.jit(functools.partial(function, **static), compiler_options=fast)


def run(function: Callable[..., Any], *operands: Any, **static: Any) -> Any:
    """``function(*operands, **static)`` as float64."""
    made = compiled(function, **static)(*operands)
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), made)


def error(x: np.ndarray, reference: np.ndarray) -> float:
    """rms(x - reference) / rms(reference); infinite where x is not finite."""
    assert x.shape == reference.shape
    if not np.isfinite(x).all():
        return np.inf
    return float(np.sqrt(np.mean((x - reference) ** 2) / np.mean(reference**2)))


def test_a_product_is_in_its_dtype_whatever_the_default_precision():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 16, 16)).astype("float32")
    expected = a.astype(float) @ b.astype(float)
    with jax.default_matmul_precision("highest"):
        narrow = run(dot, a, b)
    assert 1e-3 < error(narrow, expected) < 1e-2
    with jax.default_matmul_precision("bfloat16"):
        traced = jax.make_jaxpr(lambda a, b: dot(a, b, dtype=F32))(a, b)
        wide = run(dot, a, b, dtype=F32)
    (product,) = (e for e in traced.jaxpr.eqns if e.primitive.name == "dot_general")
    assert product.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
    assert error(wide, expected) < BOUND_F32


DECAYS = ("zero", "slow", "-20", "resets", "mixed")


def log_decays(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Log decays in natural units, f32: ``resets`` in a tenth of the entries."""
    rng = np.random.default_rng(1)
    drawn = {
        "zero": np.zeros(shape),
        "slow": np.full(shape, -1e-3),
        "-20": np.full(shape, -20.0),
        "resets": np.where(rng.random(shape) < 0.1, -1e4, -0.05 * rng.random(shape)),
        "mixed": np.where(
            rng.random(shape) < 0.02,
            -1e4,
            -rng.permutation(np.geomspace(1e-3, 20.0, shape[-1])) * rng.random(shape),
        ),
    }
    return drawn[kind].astype("float32")


def related(rows: np.ndarray, columns: np.ndarray, decay: np.ndarray, diagonal: int) -> np.ndarray:
    """sum_c rows[t] columns[j] 2^(sum of decay over j < s <= t), float64, below a diagonal."""
    chunk = len(rows)
    found = np.zeros((chunk, chunk))
    for t in range(chunk):
        between = np.zeros(rows.shape[1])
        for j in range(t, -1, -1):
            found[t, j] = np.sum(rows[t] * columns[j] * np.exp2(between))
            between = between + decay[j]
    return np.tril(found, diagonal)


def of_a_tree(query, key, decay, dtype):
    """Q and N of a pack, and what each chunk-head hands on with queries scaled by 2."""
    chunk = query.shape[1]
    tiles = relation_tiles("tree", chunk, 0)
    factors = [relations.Tree(*pair) for pair in zip(query, key, decay, strict=True)]
    sides = relations.operands(factors, tiles, chunk, dtype=dtype)
    products = [relations.product(*pair, dtype=dtype) for pair in sides]
    diagonals = [factor.diagonal for factor in factors]
    return (
        relations.assemble(products, tiles, chunk, diagonals=diagonals),
        [vars(factor.chunk_factors(2.0)) for factor in factors],
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("chunk", "key_dim"), [(32, 128), (64, 128), (64, 256), (128, 128)])
def test_a_tree_is_exact_at_every_decay(chunk, key_dim, dtype):
    count, bound = 128 // chunk, BOUND_F32 if dtype == F32 else 5e-3
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, count, chunk, key_dim)).astype("float32")
    query[..., -1] = key[..., -1] = 0.0  # a padded lane, whose decay may be any
    for kind in DECAYS:
        decay = log_decays(kind, key.shape) * np.float32(LOG2_E)
        (found_q, found_n), handed_on = run(of_a_tree, query, key, decay, dtype=dtype)
        for i, (q, k, d) in enumerate(
            zip(*(x.astype(float) for x in (query, key, decay)), strict=True)
        ):
            mine = (slice(None), slice(i * chunk, (i + 1) * chunk))
            before = np.cumsum(d, axis=0)
            after = np.cumsum(d[:0:-1], axis=0)[::-1]
            errors = {
                "Q": error(found_q[mine], related(q, k, d, 0)),
                "N": error(found_n[mine], related(k, k, d, -1)),
            }
            expected = {
                "query_decayed": 2 * q * np.exp2(before),
                "key_decayed": k * np.exp2(before),
                "key_to_end": k * np.exp2(np.concatenate([after, 0 * d[:1]])),
                "total": before[-1:],
            }
            errors |= {
                name: error(handed_on[i][name], x) for name, x in expected.items() if x.any()
            }
            assert all(e <= bound for e in errors.values()), (kind, errors)


def test_the_diagonal_of_a_tree_is_in_f32():
    """It is a sum of its own in either dtype, so a decay cannot reach it."""
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 2, 64, 128)).astype("float32")
    decay = np.full_like(key, -3e4)
    (found, strict), _ = run(of_a_tree, query, key, decay, dtype=BF16)
    expected = np.sum(query.astype(float) * key, axis=-1)
    assert error(np.stack([np.diag(found[:, :64]), np.diag(found[:, 64:])]), expected) < BOUND_F32
    assert not strict.any()


# Raw gates (and biases) from where only a large rate makes a decay of them to beyond every floor.
RAW_RANGES = ((-90, -60), (-60, -20), (-20, -8), (-8, -1), (-1, 1), (1, 8), (8, 100), (100, 1e4))


@pytest.mark.parametrize(("dtype", "bound"), [(F32, 2e-6), (BF16, 1e-4)], ids=str)
def test_softplus_keeps_its_relative_accuracy(dtype, bound):
    rng = np.random.default_rng(0)
    for low, high in RAW_RANGES:
        raw = rng.uniform(low, high, (64, 128)).astype("float32")
        bias = rng.uniform(-1, 1, (1, 128)).astype("float32")
        for a_log in (-20, 0, 20, 60, 88):
            rate = np.full((1, 128), np.exp(a_log)).astype("float32")
            got = run(gates.softplus, raw, rate, bias, floor=1e4, dtype=dtype)
            x = raw.astype(float) + bias
            expected = rate * (np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))
            expected = -LOG2_E * np.minimum(expected, 1e4)
            # what decays less in all the tokens of a sequence does not show in any result
            seen = expected < -1e-20
            relative = got[seen] / expected[seen] - 1.0
            assert np.sqrt(np.mean(relative**2)) <= bound if seen.any() else True, (low, a_log)
            assert (got[~seen] <= 0).all() and (got[~seen] > -1.1e-20).all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_a_large_rate_lifts_what_f32_cannot_hold(dtype):
    """e^-90 is below the smallest f32 that a TPU does not flush; e^88 of it is a decay of 0.14."""
    assert not run(halved, np.full((8, 128), 2.0**-126, "float32")).any(), (
        "no flush to be seen here"
    )
    raw, bias = np.full((8, 128), -90.0, "float32"), np.zeros((1, 128), "float32")
    rate = np.full((1, 128), np.exp(88.0), "float32")
    got = run(gates.softplus, raw, rate, bias, floor=1e4, dtype=dtype)
    assert error(got, np.full(raw.shape, -LOG2_E * np.exp(-2.0))) < 2e-5


def halved(x):
    return 0.5 * x


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_a_gate_is_finite_whatever_it_is_given(dtype):
    largest = float(np.finfo("float32").max)
    values = [-largest, largest, -1e30, 1e30, -200.0, 200.0, -103.0, -88.0, 88.0, 0.0, -0.0, 1e-30]
    raw = np.resize(np.float32(values), (8, 128))
    for rate in (0.0, 1e-38, 1.0, 1e38, np.exp(88.0)):
        for bias in (0.0, largest, -largest, 5.0):
            row = [np.full((1, 128), x, "float32") for x in (rate, bias)]
            for got, least in (
                (run(gates.softplus, raw, *row, floor=1e4, dtype=dtype), -1e4),
                (run(gates.bounded, raw, *row, lower_bound=-5.0), -5.0),
            ):
                assert ((got <= 0) & (got >= 1.00001 * least * LOG2_E)).all(), (rate, bias)


def test_bounded_keeps_its_relative_accuracy():
    rng = np.random.default_rng(0)
    raw = rng.uniform(-12, 12, (64, 128)).astype("float32")
    bias = rng.uniform(-1, 1, (1, 128)).astype("float32")
    for a_log in (-20, -1, 0, 5, 88):
        rate = np.full((1, 128), np.exp(a_log)).astype("float32")
        got = run(gates.bounded, raw, rate, bias, lower_bound=-5.0)
        with np.errstate(over="ignore"):
            expected = -5 * LOG2_E / (1 + np.exp(-rate.astype(float) * (raw.astype(float) + bias)))
        seen = expected < -1e-6
        assert error(got[seen], expected[seen]) < BOUND_F32
        assert np.abs(got[~seen]).max(initial=0.0) < 1.1e-6


@pytest.mark.parametrize(("dtype", "bound"), [(F32, 3e-7), (BF16, 1e-3)], ids=str)
def test_inverse_norms(dtype, bound):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 64, 256)).astype("float32")
    x[0, :, 100:] = 0.0  # padded lanes
    x[1, 0] = 0.0  # a row past the end
    x[1, 1] *= 1e-3
    x[1, 2] *= 1e4
    got = run(gates.inverse_norms, list(x), dtype=dtype)
    expected = 1 / np.sqrt(np.sum(x.astype(float) ** 2, axis=-1, keepdims=True) + 1e-6)
    assert np.abs(np.stack(got) / expected - 1).max() < 4 * bound
    assert np.sqrt(np.mean((np.stack(got) / expected - 1) ** 2)) < bound


@pytest.mark.parametrize("block", [8, 16, 32])
def test_cumulative_sums(block):
    rng = np.random.default_rng(0)
    decay = -5 * rng.random((64, 256)).astype("float32")
    expected = np.cumsum(decay.astype(float).reshape(-1, block, 256), axis=1).reshape(64, 256)
    assert error(run(gates.cumulative, decay, block=block, dtype=F32), expected) < 1e-7
    # two bf16 parts of 8 bits and a guard bit each
    assert error(run(gates.cumulative, decay, block=block), expected) < 1e-5
    rounded = np.asarray(jnp.asarray(decay).astype(BF16).astype(F32))
    expected = np.cumsum(rounded.astype(float).reshape(-1, block, 256), axis=1).reshape(64, 256)
    assert error(run(gates.cumulative, rounded, block=block, exact=True), expected) < 1e-7


MODES = [(BF16, FULL), (F32, SPLIT), (F32, FULL)]
MODE_NAMES = ["bfloat16", "three passes", "six passes"]


@pytest.mark.parametrize(
    ("dtype", "passes", "bound"),
    [(*mode, bound) for mode, bound in zip(MODES, (5e-3, 1e-5, 3e-7), strict=True)],
    ids=MODE_NAMES,
)
def test_the_error_of_a_product(dtype, passes, bound):
    a, b = np.random.default_rng(0).standard_normal((2, 64, 64)).astype("float32")
    wide = a.astype(float), b.astype(float)
    found = error(run(dot, a, b, dtype=dtype, passes=passes), wide[0] @ wide[1])
    assert bound / 10 < found < bound
    transposed = run(dot, a, b, dims=NT, dtype=dtype, passes=passes)
    assert bound / 10 < error(transposed, wide[0] @ wide[1].T) < bound
    # operands that are bf16 already have no second part
    narrow = [jnp.asarray(x).astype(BF16) for x in (a, b)]
    expected = np.matmul(*(np.asarray(x).astype(float) for x in narrow))
    assert error(run(dot, *narrow, dtype=dtype, passes=passes), expected) < BOUND_F32


def result(stage: Generator[None, None, Any]) -> Any:
    """What a stage returns."""
    while True:
        try:
            next(stage)
        except StopIteration as end:
            return end.value


def inverted(strict, block, depth, dtype, passes):
    chunk = strict.shape[0]
    return result(
        inverse.invert(
            lambda start, count: strict[start : start + count],
            chunk,
            block,
            depth,
            dtype=dtype,
            passes=passes,
        )
    )


def parallel_keys(rng: np.random.Generator, chunk: int, noise: float) -> np.ndarray:
    """Unit keys [chunk, 128] with a common direction, of unit variance beside ``noise``."""
    keys = rng.standard_normal((1, 128)) + noise * rng.standard_normal((chunk, 128))
    return keys / np.linalg.norm(keys, axis=-1, keepdims=True)


@pytest.mark.parametrize(("dtype", "passes"), MODES, ids=MODE_NAMES)
@pytest.mark.parametrize(("chunk", "depth"), [(32, 64), (64, 64), (64, 128), (128, 128)])
def test_an_inverse_is_right_to_its_dtype(chunk, depth, dtype, passes):
    """Relative to the norm of the inverse, for blocks of which no power grows; see ``check``."""
    rng = np.random.default_rng(0)
    bounds = {"one": 3e-7, "near": 5e-7, "near and 2": 1e-5, "any": 3e-7}
    unit = {(BF16, FULL): 2.0**-9, (F32, SPLIT): 2.0**-16, (F32, FULL): 2.0**-24}[dtype, passes]
    for kind, bound in bounds.items():
        noise = {"one": 0.0, "any": 1e3}.get(kind, 0.05)
        largest = 2.0 if kind == "near and 2" else 1.0
        packed, expected = [], []
        for _ in range(128 // chunk):
            keys = parallel_keys(rng, chunk, noise)
            beta = rng.uniform(0.9 * largest, largest, chunk)
            strict = np.tril(-(keys @ keys.T) * beta, -1).astype("float32")
            packed.append(strict)
            expected.append(np.linalg.inv(np.eye(chunk) - strict.astype(float)))
        for block in (2, 4):
            got = run(
                inverted, np.hstack(packed), block=block, depth=depth, dtype=dtype, passes=passes
            )
            found = error(got, np.hstack(expected))
            assert found < bound * unit * 2.0**24, (kind, block, found)


def stepped(decayed, value, made, relations_of, keys, decay, state, dtype, inverse_dtype):
    """Output and state of ``recurrence.advance``."""
    states, outputs = [state], []
    handover = recurrence.Handover(
        *(functools.partial(lambda x: x, x) for x in (decayed, value, made, relations_of, keys)),
        decay=lambda: decay,
    )
    result(
        recurrence.advance(
            handover, states, 0, outputs.append, dtype=dtype, inverse_dtype=inverse_dtype
        )
    )
    return outputs[0], states[0]


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, F32), (F32, F32)], ids=str)
def test_a_step_of_the_recurrence(dtypes):
    rng = np.random.default_rng(0)
    shapes = ((128, 128), (64, 256), (64, 64), (64, 64), (128, 64), (128, 1), (128, 256))
    operands = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    decayed, value, made, relations_of, keys, decay, state = (x.astype(float) for x in operands)
    seen = decayed @ state
    corrected = made @ (value - seen[64:])
    expected = seen[:64] + relations_of @ corrected, state * decay + keys @ corrected
    got = run(stepped, *operands, dtype=dtypes[0], inverse_dtype=dtypes[1])
    bound = BOUND_F32 if dtypes[0] == F32 else 5e-3
    assert all(error(x, y) < bound for x, y in zip(got, expected, strict=True))
    # the first product alone is in ``dtype``
    decayed[:] = operands[0][:] = 0.0
    corrected = made @ value
    expected = relations_of @ corrected, state * decay + keys @ corrected
    got = run(stepped, *operands, dtype=dtypes[0], inverse_dtype=dtypes[1])
    bound = {(BF16, F32): 2e-5}.get(dtypes, bound)
    assert all(error(x, y) < bound for x, y in zip(got, expected, strict=True))
