"""The chunks of packed sequences against what they have to be, for drawn packings."""

import itertools

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kdagen.reference.windows import chunk_size, plan


@st.composite
def packings(draw):
    tokens = draw(st.integers(1, 200))
    slots = draw(st.integers(1, 7))
    rows = draw(st.integers(1, 2))
    edges = st.lists(st.integers(0, tokens), min_size=slots, max_size=slots)
    return tokens, np.array([[0, *sorted(draw(edges))] for _ in range(rows)], np.int32)


@settings(max_examples=30, deadline=None)
@given(packings())
def test_every_token_of_a_segment_is_in_one_chunk_of_it(packing):
    tokens, boundaries = packing
    windows = plan(tokens, jnp.asarray(boundaries))
    start, length, slot, first, last = (
        np.asarray(x)
        for x in (windows.start, windows.length, windows.slot, windows.first, windows.last)
    )
    assert int(windows.count) <= windows.bound
    for row, edges in enumerate(boundaries):
        expected = []
        for s, (begin, end) in enumerate(itertools.pairwise(edges)):
            for at in range(begin, end, windows.chunk):
                rows = min(windows.chunk, end - at)
                expected.append((at, rows, s, at == begin, at + rows == end))
        busy = length[:, row] > 0
        columns = [x[busy, row].tolist() for x in (start, length, slot, first, last)]
        assert list(zip(*columns, strict=True)) == expected
        assert not busy[int(windows.count) :].any()
        assert not first[~busy, row].any() and not last[~busy, row].any()


def test_chunk_size():
    assert [chunk_size(n) for n in (1, 2, 3, 16, 17, 64, 65, 8192)] == [1, 2, 4, 16, 32, 64, 64, 64]
