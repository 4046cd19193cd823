"""The helpers that kernels are made of, called as plain functions, against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from kdagen.emission import relation_tiles
from kdagen.kernels import relations
from kdagen.kernels.lanes import BF16, F32, LOG2_E, dot

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
