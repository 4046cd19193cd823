"""Who is checked next, and who wins."""

from __future__ import annotations

import dataclasses

from kdagen.search.finals import FINALISTS, MODEL_NOISE, finalists, leader, noise
from kdagen.store.rows import Result
from tests.store.rows import DEFAULT, result


def timed(number: int, seconds: float, **changes) -> Result:
    """The result of one of many variants, none of them the default."""
    variant = dataclasses.replace(DEFAULT, recurrence_span=20 + number)
    return result(variant, seconds=seconds, **changes)


DEFAULT_RESULT = result(seconds=100e-6)


def test_the_fastest_leads() -> None:
    results = [DEFAULT_RESULT, timed(1, 90e-6), timed(2, 80e-6)]
    assert leader(results, MODEL_NOISE) == results[2]


def test_a_tie_within_the_noise_keeps_the_default() -> None:
    close = timed(1, 99.6e-6)
    assert leader([DEFAULT_RESULT, close], 0.005) == DEFAULT_RESULT
    assert leader([DEFAULT_RESULT, close], 0.003) == close


def test_of_two_equals_the_smaller_loop_leads() -> None:
    large = timed(1, 80e-6, loop_bundles=9000)
    small = timed(2, 80.2e-6, loop_bundles=7000)
    slower = timed(3, 81e-6, loop_bundles=1000)
    assert leader([DEFAULT_RESULT, large, small, slower], 0.005) == small


def test_a_smaller_loop_does_not_lead_if_it_is_no_faster_than_the_default() -> None:
    faster = timed(1, 99.4e-6, loop_bundles=9000)
    equal = timed(2, 99.6e-6, loop_bundles=10)
    assert leader([DEFAULT_RESULT, faster, equal], 0.005) == faster


def test_what_came_to_nothing_does_not_lead() -> None:
    wrong = timed(1, 10e-6, status="wrong", reason="off")
    vmem = timed(2, 1.0, status="vmem", reason="too much")
    vmem = dataclasses.replace(vmem, seconds=None)
    assert leader([DEFAULT_RESULT, wrong, vmem], 0.005) == DEFAULT_RESULT
    assert leader([wrong, vmem], 0.005) is None


def test_without_a_default_that_works_the_fastest_leads() -> None:
    broken = dataclasses.replace(DEFAULT_RESULT, status="died", seconds=None)
    slow = timed(1, 500e-6)
    assert leader([broken, slow], 0.005) == slow


def test_noise_is_the_largest_spread_measured() -> None:
    assert noise([DEFAULT_RESULT]) == MODEL_NOISE
    assert noise([timed(1, 1.0, spread=0.02), timed(2, 1.0, spread=0.01)]) == 0.02


def test_finalists_are_the_fastest_and_the_default() -> None:
    others = [timed(n, (50 + n) * 1e-6) for n in range(8)]
    chosen = finalists([DEFAULT_RESULT, *reversed(others)])
    assert chosen == [*others[:FINALISTS], DEFAULT_RESULT]
    assert finalists([DEFAULT_RESULT]) == [DEFAULT_RESULT]
