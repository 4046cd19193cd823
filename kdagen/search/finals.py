"""Which result to believe: the order in which would-be winners are checked, and who wins."""

from __future__ import annotations

from collections.abc import Sequence

from kdagen.store.rows import Result

# A modelled time is the same in every process; below this the model does not tell two apart.
MODEL_NOISE = 0.005

FINALISTS = 4


def noise(results: Sequence[Result]) -> float:
    """Relative difference of times that means nothing: the largest spread of repeated
    measurements, and ``MODEL_NOISE`` at least."""
    return max([MODEL_NOISE, *(r.spread for r in results if r.spread is not None)])


def finalists(results: Sequence[Result]) -> list[Result]:
    """The fastest results and the default, for a paired measurement."""
    ok = sorted((r for r in results if r.status == "ok"), key=_by_time)
    chosen = ok[:FINALISTS]
    return chosen + [r for r in ok[FINALISTS:] if r.is_default]


def leader(results: Sequence[Result], tolerance: float) -> Result | None:
    """The result that should win if its numbers are right, or None where none is left.

    The default, unless something beats it by more than ``tolerance``. Of those that do and are
    within ``tolerance`` of the fastest, the one with the smallest loop: loops larger than any that
    was seen to run on a TPU at its modelled speed may stall on instruction fetch.
    """
    ok = [r for r in results if r.status == "ok"]
    if not ok:
        return None
    limit = float("inf")
    default = next((r for r in ok if r.is_default), None)
    if default is not None:
        limit = _seconds(default) * (1.0 - tolerance)
    better = [r for r in ok if _seconds(r) < limit]
    if not better:
        return default
    fastest = min(_seconds(r) for r in better)
    equals = [r for r in better if _seconds(r) <= fastest * (1.0 + tolerance)]
    return min(equals, key=lambda r: (r.loop_bundles or float("inf"), *_by_time(r)))


def _seconds(result: Result) -> float:
    assert result.seconds is not None
    return result.seconds


def _by_time(result: Result) -> tuple[float, str]:
    return _seconds(result), result.variant_id
