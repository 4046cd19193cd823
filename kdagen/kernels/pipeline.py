"""Which stages of a pipelined kernel have work at a grid step. Plain Python, so that plans need no
JAX.

A block of chunks enters at the step of its own number and takes one step a stage.
"""

from __future__ import annotations

RELATIONS, INVERSE, RECURRENCE = "relations", "inverse", "recurrence"

STAGES = (RELATIONS, INVERSE, RECURRENCE)
"""In the order in which a block goes through them."""

DRAIN = len(STAGES) - 1
"""Grid steps after the last block has entered the pipeline."""


def active(step: int, blocks: int) -> tuple[str, ...]:
    """The stages that have one of so many blocks to work on at a step, from 0 to blocks + DRAIN."""
    return tuple(stage for i, stage in enumerate(STAGES) if 0 <= step - i < blocks)


def written_out(blocks: int, ends: int) -> dict[int, tuple[str, ...]]:
    """The first and the last ``ends`` steps of so many blocks, with their active stages.

    Those have code of their own. All others share the code of all stages, and where a stage has no
    block there what it computes is not used.
    """
    last = blocks + DRAIN - 1
    steps = {*range(ends), *range(last - ends + 1, last + 1)}
    return {step: active(step, blocks) for step in sorted(steps) if 0 <= step <= last}
