"""Which stages run at a grid step, and that every block goes through all of them in order."""

from __future__ import annotations

import dataclasses

import pytest

from kdagen.kernels.pipeline import (
    DRAIN,
    INVERSE,
    RECURRENCE,
    RELATIONS,
    STAGES,
    active,
    written_out,
)
from kdagen.measure import kinds
from kdagen.variant import Variant
from tests.kernels.calls import assert_close
from tests.kernels.test_forward import BOUNDED

ENDS = range(DRAIN + 1)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("blocks", range(1, 9))
def test_every_block_goes_through_all_stages(blocks, ends):
    """Runs the steps with two slots of scratch that hold the number of a block: at its own step a
    block's recurrence finds what its relations and its inverse have left, and only there counts."""
    apart = written_out(blocks, ends)
    relations, inverses = [None, None], [None, None]
    results, inverted = [None] * blocks, [None] * blocks
    for step in range(blocks + DRAIN):
        stages = apart.get(step, STAGES)
        assert set(active(step, blocks)) <= set(stages)
        mine, other = step % 2, (step + 1) % 2
        if RECURRENCE in stages:
            results[max(step - DRAIN, 0)] = relations[mine], inverses[mine]
        if INVERSE in stages:
            inverses[other] = inverted[min(max(step - 1, 0), blocks - 1)] = relations[other]
        if RELATIONS in stages:
            relations[mine] = min(step, blocks - 1)
    assert results == [(block, block) for block in range(blocks)]
    assert inverted == list(range(blocks))


@pytest.mark.parametrize("blocks", range(1, 6))
def test_steps_of_their_own_run_nothing_idle(blocks):
    for ends in ENDS:
        apart = written_out(blocks, ends)
        assert len(apart) == min(2 * ends, blocks + DRAIN)
        assert all(stages == active(step, blocks) for step, stages in apart.items())
    every = written_out(blocks, DRAIN)
    assert all(step in every or active(step, blocks) == STAGES for step in range(blocks + DRAIN))


@pytest.mark.parametrize(("blocks", "ends"), [(1, 1), (1, 2), (2, 2), (3, 2), (4, 1), (5, 2)])
def test_results_with_ends_of_their_own(blocks, ends):
    """Of one block, of two, of more; the last one not full."""
    variant = Variant(heads=1, chunks=2, ends=ends)
    problem = dataclasses.replace(BOUNDED, tokens=blocks * variant.block_tokens - 9)
    assert_close(problem, variant, kinds.telling(problem), blocks)
