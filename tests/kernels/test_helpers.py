"""Products, inverse and recurrence against float64, and all helpers together."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdagen.emission import relation_tiles
from kdagen.kernels import inverse, recurrence, relations
from kdagen.kernels.lanes import BF16, F32, FULL, LOG2_E, NT, SPLIT, dot
from kdagen.reference.oracle import recurrent_float64
from tests.kernels.plain import BOUND_F32, DECAYS, error, log_decays, name_of, run


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


def inverted(strict, block, depth, dtype, passes, less_identity=False):
    chunk = strict.shape[0]
    return result(
        inverse.invert(
            lambda start, count: strict[start : start + count],
            chunk,
            block,
            depth,
            dtype=dtype,
            passes=passes,
            less_identity=less_identity,
        )
    )


def parallel_keys(rng: np.random.Generator, chunk: int, noise: float) -> np.ndarray:
    """Unit keys [chunk, 128] with a common direction, of unit variance beside ``noise``."""
    keys = rng.standard_normal((1, 128)) + noise * rng.standard_normal((chunk, 128))
    return keys / np.linalg.norm(keys, axis=-1, keepdims=True)


@pytest.mark.parametrize(("dtype", "passes"), MODES, ids=MODE_NAMES)
@pytest.mark.parametrize(("chunk", "block", "depth"), [(32, 4, 64), (64, 2, 128), (128, 4, 64)])
def test_an_inverse_is_right_to_its_dtype(chunk, block, depth, dtype, passes):
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
        strict = np.hstack(packed)
        got = run(inverted, strict, block=block, depth=depth, dtype=dtype, passes=passes)
        found = error(got, np.hstack(expected))
        assert found < bound * unit * 2.0**24, (kind, found)


def stepped(decayed, value, made, relations_of, keys, decay, state, dtype, inverse_dtype):
    """Outputs and states of ``recurrence.advance`` for streams side by side."""
    states, outputs = list(state), {}

    def read(x):
        return lambda: x

    handover = recurrence.Handover(
        decayed=[read(x) for x in decayed],
        value=[read(x) for x in value],
        inverse=read(made),
        relations=read(relations_of),
        keys_to_end=read(keys),
        decay=[read(x) for x in decay],
    )
    stage = recurrence.advance(
        handover,
        states,
        range(len(states)),
        outputs.__setitem__,
        dtype=dtype,
        inverse_dtype=inverse_dtype,
    )
    result(stage)
    return [outputs[i] for i in range(len(states))], states


@pytest.mark.parametrize(
    ("dtype", "inverse_dtype"), [(BF16, BF16), (BF16, F32), (F32, F32)], ids=name_of
)
@pytest.mark.parametrize("streams", [1, 2])
def test_a_step_of_the_recurrence(dtype, inverse_dtype, streams):
    rng = np.random.default_rng(0)
    shapes = ((128, 128), (64, 256), (64, 64), (64, 64), (128, 64), (128, 1), (128, 256))
    operands = [rng.standard_normal((streams, *shape)).astype("float32") for shape in shapes]
    bound = BOUND_F32 if dtype == F32 else 5e-3

    def errors() -> list[float]:
        decayed, value, made, of_query, keys, decay, state = (x.astype(float) for x in operands)
        seen = decayed @ state
        corrected = (made + np.eye(64)) @ (value - seen[:, 64:])
        expected = seen[:, :64] + of_query @ corrected, state * decay + keys @ corrected
        aside = [np.hstack(list(x)) if 2 <= i <= 4 else list(x) for i, x in enumerate(operands)]
        got = run(stepped, *aside, dtype=dtype, inverse_dtype=inverse_dtype)
        return [error(np.stack(x), y) for x, y in zip(got, expected, strict=True)]

    assert max(errors()) < bound
    # the first product alone is in ``dtype``
    operands[0][:] = 0.0
    assert max(errors()) < (2e-5 if dtype != inverse_dtype else bound)


def chunk_of(states, query, key, value, decay, beta, dtype, inverse_dtype):
    """Outputs [n, C, V] and states [n, K, V] of a pack of heads, from all helpers together."""
    chunk = query.shape[1]
    tiles = relation_tiles("tree", chunk, 0)
    factors = [relations.Tree(*given) for given in zip(query, key, decay, strict=True)]
    sides = relations.operands(factors, tiles, chunk, dtype=dtype)
    products = [relations.product(*pair, dtype=dtype) for pair in sides]
    diagonals = [factor.diagonal for factor in factors]
    of_query, of_key = relations.assemble(products, tiles, chunk, diagonals=diagonals)
    row = beta.reshape(1, -1)
    passes = FULL if dtype == F32 else SPLIT
    made = inverted(of_key * -row, 4, 64, inverse_dtype, passes, less_identity=True)
    ready = [factor.chunk_factors(1.0) for factor in factors]
    ends = jnp.concatenate([x.key_to_end for x in ready])
    outputs, after = stepped(
        [jnp.concatenate([x.query_decayed, x.key_decayed]) for x in ready],
        value,
        made,
        (of_query * row).astype(inverse_dtype),
        (ends.T * row).astype(inverse_dtype),
        [jnp.exp2(x.total).T for x in ready],
        states,
        dtype,
        inverse_dtype,
    )
    return jnp.stack(outputs), jnp.stack(after)


def errors_of_chunks(noise, largest, kind, dtype, inverse_dtype, chunk=64, chunks=4):
    """Errors of output and state over some chunks of a pack, against the token recurrence.

    Keys as in ``parallel_keys``, write strengths up to ``largest``, decays of ``log_decays``.
    """
    rng = np.random.default_rng(2)
    count, tokens = 128 // chunk, chunk * chunks
    keys = np.stack([parallel_keys(rng, tokens, noise) for _ in range(count)])
    queries, values = rng.standard_normal((2, count, tokens, 128))
    queries /= np.linalg.norm(queries, axis=-1, keepdims=True)
    beta = rng.uniform(max(0.9, largest - 1), largest, (count, tokens))
    given = [np.asarray(jnp.asarray(x).astype(dtype)) for x in (queries, keys, values, beta)]
    decay = log_decays(kind, keys.shape)
    expected = recurrent_float64(
        *(jnp.asarray(x[:, None]) for x in (*given[:3], decay, given[3])), scale=1.0
    )
    given = [x.astype("float32") for x in given]
    states, outputs = np.zeros((count, 128, 128), "float32"), []
    for start in range(0, tokens, chunk):
        at = (slice(None), slice(start, start + chunk))
        output, states = run(
            chunk_of,
            states.astype("float32"),
            *(x[at] for x in (*given[:3], decay * np.float32(LOG2_E), given[3])),
            dtype=dtype,
            inverse_dtype=inverse_dtype,
        )
        outputs.append(output)
    found = np.concatenate(outputs, axis=1), states
    return [error(x, y.reshape(x.shape)) for x, y in zip(found, expected, strict=True)]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_what_parallel_keys_ask_of_kernels_in_bf16(noise):
    """An f32 inverse holds the bounds from a state of zero, where none of bf16 does."""
    assert max(errors_of_chunks(noise, 1.0, "slow", BF16, F32)) < 1.7e-2
    assert max(errors_of_chunks(noise, 2.0, "slow", BF16, F32)) < 2e-2
    assert max(errors_of_chunks(noise, 1.0, "slow", BF16, BF16)) > 2e-2


@pytest.mark.parametrize("kind", DECAYS)
def test_f32_holds_its_bounds_at_every_decay(kind):
    assert max(errors_of_chunks(1e3, 1.0, kind, F32, F32)) < 5e-6
    assert max(errors_of_chunks(0.0, 1.0, kind, F32, F32)) < 2e-5
    assert max(errors_of_chunks(0.05, 2.0, kind, F32, F32)) < 5e-5
