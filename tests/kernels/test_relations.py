"""Relations within a chunk against float64."""

from __future__ import annotations

import numpy as np
import pytest

from kdagen.emission import relation_tiles
from kdagen.kernels import gates, relations
from kdagen.kernels.lanes import BF16, F32, LOG2_E
from tests.kernels.plain import BOUND_F32, DECAYS, error, log_decays, name_of, run


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


@pytest.mark.parametrize(
    ("chunk", "key_dim", "dtype"),
    [(32, 128, F32), (64, 256, F32), (128, 128, F32), (64, 128, BF16)],
    ids=name_of,
)
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


def of_blocks(query, key, decay, factorisation, sub_block, dtype):
    """Q and N of one pack from sums of the decay within each block."""
    chunk = query.shape[1]
    tiles = relation_tiles(factorisation, chunk, sub_block)
    made = {"bounded": relations.Bounded, "unbounded": relations.Unbounded}[factorisation]
    sums = gates.cumulative(list(decay), sub_block, dtype=dtype)
    factors = [made(*given, sub_block) for given in zip(query, key, sums, strict=True)]
    sides = relations.operands(factors, tiles, chunk, dtype=dtype)
    products = [relations.product(*pair, dtype=dtype) for pair in sides]
    return relations.assemble(products, tiles, chunk)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize(
    ("factorisation", "sub_block", "largest"), [("bounded", 16, 5.0), ("unbounded", 8, 22.0)]
)
def test_blocks_hold_their_range_of_decays(factorisation, sub_block, largest, dtype):
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 2, 64, 256)).astype("float32")
    query[..., 100:] = key[..., 100:] = 0.0
    # exponents of the factors reach 58 and 111, where an f32 is right to 2^-18
    bound = 5e-6 if dtype == F32 else 5e-3
    for decay in (
        np.full(key.shape, -largest),
        -largest * rng.random(key.shape),
        np.where(rng.random(key.shape) < 0.5, -largest, -1e-3),
    ):
        given = query, key, (decay * LOG2_E).astype("float32")
        of_query, of_key = run(
            of_blocks, *given, factorisation=factorisation, sub_block=sub_block, dtype=dtype
        )
        for i, (q, k, d) in enumerate(zip(*(x.astype(float) for x in given), strict=True)):
            mine = (slice(None), slice(i * 64, (i + 1) * 64))
            # N is added to the identity: what a token of e^-22 leaves counts against that
            own = np.diag(np.sum(k * k, axis=1))
            found = (
                error(of_query[mine], related(q, k, d, 0)),
                error(of_key[mine] + own, related(k, k, d, -1) + own),
            )
            assert max(found) < bound, found
