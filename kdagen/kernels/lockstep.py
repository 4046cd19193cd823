"""Runs stages that are written as generators in the order of a plan."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

Stage = Generator[None, None, None]


def run(
    slots: Sequence[Sequence[tuple[str, Sequence[int]]]],
    stages: Mapping[str, Callable[[int], Stage]],
) -> None:
    """Slot after slot, advances the generators of (stage, items) by one segment each.

    A stage yields after every matrix product, so that products of different chunk-heads are
    emitted side by side; nothing of this is left at run time.

    Raises:
      AssertionError: a generator has more or fewer segments than the plan was proved with.
    """
    running: dict[tuple[str, int], Stage] = {}
    finished = set()
    for slot in slots:
        for stage, items in slot:
            for item in items:
                assert (stage, item) not in finished, f"{stage} of item {item} is planned too long"
                if (stage, item) not in running:
                    running[stage, item] = stages[stage](item)
                if next(running[stage, item], "done") == "done":
                    finished.add((stage, item))
                    del running[stage, item]
    assert not running, f"planned too short: {sorted(running)}"
