"""Where every token's segment begins and ends, by NumPy and traced, against a loop."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kdagen.reference.packing import Packing

# Few shapes, so that drawn packings share the programs: B, T and N.
SHAPES = [(1, 1, 1), (1, 1, 4), (2, 7, 12), (2, 40, 3), (3, 130, 9)]


@st.composite
def packings(draw):
    rows, tokens, slots = draw(st.sampled_from(SHAPES))
    edges = st.lists(st.integers(0, tokens), min_size=slots, max_size=slots)
    return tokens, np.array([[0, *sorted(draw(edges))] for _ in range(rows)], np.int32)


def expected(boundaries, tokens):
    """Spans by a loop over the tokens of every segment."""
    spans = np.full((len(boundaries), 2, tokens), -1, np.int32)
    for row, edges in enumerate(boundaries):
        for begin, end in zip(edges, [*edges[1:], tokens], strict=True):
            for t in range(begin, end):
                assert (spans[row, :, t] == -1).all()
                spans[row, :, t] = begin, end
    return spans


@functools.partial(jax.jit, static_argnums=1)
def traced(boundaries, tokens):
    return Packing.of(boundaries, tokens)


@settings(max_examples=60, deadline=None)
@example((1, np.array([[0, 1]])))  # the whole of one token
@example((1, np.array([[0, 0, 0, 1, 1]])))  # empty segments on both sides of it
@example((1, np.array([[0, 0]])))  # nothing but padding
@example((7, np.array([range(13)] * 2).clip(max=7)))  # one-token segments, more slots than those
@example((40, np.array([[0, 0, 0, 40], [0, 0, 0, 0]])))  # no padding, and nothing else
@given(packings())
def test_spans_are_those_of_a_loop(packing):
    tokens, boundaries = packing
    boundaries = boundaries.astype(np.int32)
    known, found = Packing.of(boundaries, tokens), traced(boundaries, tokens)
    assert isinstance(known.spans, np.ndarray)
    for one in (known, found):
        np.testing.assert_array_equal(one.spans, expected(boundaries, tokens))
        np.testing.assert_array_equal(one.boundaries, boundaries)
        np.testing.assert_array_equal(one.lengths, boundaries[:, -1])
        assert one.spans.dtype == np.int32 and one.slots == boundaries.shape[1] - 1
        assert one.valid is None


@pytest.mark.parametrize("valid", [None, np.array([True, False])])
def test_a_packing_is_a_pytree_of_its_arrays(valid):
    packing = Packing.of(np.array([[0, 2, 5], [0, 0, 0]], np.int32), 6, valid)
    leaves, tree = jax.tree.flatten(packing)
    assert len(leaves) == (2 if valid is None else 3)
    again = jax.tree.unflatten(tree, leaves)
    assert isinstance(again, Packing) and again.slots == 2
    assert (again.valid is None) == (valid is None)
