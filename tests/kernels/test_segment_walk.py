"""Where segments lie, as kernels are told: by NumPy and traced, against a loop over them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kdagen.kernels.segment_walk import BEGIN, BEHIND, END, ENDED, FIRST, Table

BLOCK, BLOCKS, SLOTS = 8, 4, 6
TOKENS = BLOCK * BLOCKS
TABLE = Table(SLOTS, BLOCKS, BLOCK)
traced = jax.jit(TABLE.made)


def rows():
    edges = st.lists(st.integers(0, TOKENS), min_size=SLOTS, max_size=SLOTS)
    return st.lists(edges.map(lambda x: [0, *sorted(x)]), min_size=2, max_size=2)


def of_block(row, block):
    """The numbers of a block that say something, by what they are."""
    starts, ends = np.array(row[:-1]), np.array(row[1:])
    low, high = block * BLOCK, (block + 1) * BLOCK
    # the end of the block before is no token of this one, and before the first there is none
    ending = (ends > low) & (ends <= high) | (ends == 0) & (block == 0)
    there = (starts < high) & (ends > low) & (ends > starts)
    begin = (starts >= low) & (starts < high)
    told = {BEHIND: sum(starts < high), BEGIN: sum(begin), END: sum(ending)}
    if there.any():
        told[FIRST] = np.argmax(there)
    if ending.any():
        told[ENDED] = np.argmax(ending)
        assert ending[told[ENDED] :][: told[END]].all()
    return told, there


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@example([[0] * 7, [0, *[TOKENS] * 6]])
@example([[0, 0, 8, 8, 16, 31, 32], [0, 1, 2, 3, 3, 3, 3]])
@example([[0, 8, 16, 24, 32, 32, 32], [0, 0, 0, 9, 9, 17, 17]])
@given(rows())
def test_the_table_is_what_a_loop_over_segments_finds(given):
    boundaries = np.array(given, np.int32)
    told = TABLE.made(boundaries)
    assert told.dtype == np.int32
    found = traced(jnp.asarray(boundaries))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, told)
    assert len(told) == len(given) * (SLOTS + 1 + 5 * BLOCKS)
    for r, row in enumerate(given):
        assert [TABLE.boundary(told, r, slot) for slot in range(SLOTS + 1)] == row
        ended = []
        for block in range(BLOCKS):
            expected, there = of_block(row, block)
            number = functools.partial(TABLE.of_block, told, r, block)
            assert {which: number(which) for which in expected} == expected, (row, block)
            # none that has a token there is passed over
            assert not there[: number(FIRST)].any() and not there[number(BEHIND) :].any()
            assert number(FIRST) >= 0 and number(BEHIND) <= SLOTS
            ended += range(number(ENDED), number(ENDED) + number(END))
        # every segment ends somewhere, once
        assert ended == list(range(SLOTS))


@pytest.mark.parametrize("tokens", [1, 7, 8, 9])
def test_blocks_may_reach_beyond_the_tokens(tokens):
    """And a single slot has a table too."""
    blocks = -(-tokens // BLOCK)
    table = Table(1, blocks, BLOCK)
    told = table.made(np.array([[0, tokens]], np.int32))
    ends = [table.of_block(told, 0, block, END) for block in range(blocks)]
    assert ends == [0] * (blocks - 1) + [1]
    assert [table.of_block(told, 0, block, FIRST) for block in range(blocks)] == [0] * blocks
