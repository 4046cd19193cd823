"""The space of training steps, and what its search asks for."""

from __future__ import annotations

import dataclasses

import pytest

from kdagen.chips import CHIPS, get_chip
from kdagen.gradient.step import KEPT, Step, check_step
from kdagen.measure.steps import residual_bytes
from kdagen.search.spaces import Forwards, space_of
from kdagen.search.steps import Steps
from kdagen.search.study import Study
from kdagen.store.rows import Entry
from kdagen.variant import MAX_LOOP_BUNDLES, VariantError
from tests.store.rows import (
    DEFAULT,
    ENVIRONMENT,
    FASTER,
    PROBLEM,
    STEP,
    TRAINED,
    result,
    step_result,
)

CHIP = get_chip("v6e")
REBUILT = dataclasses.replace(STEP, residuals="rematerialize")


def of_forward(**changes: object) -> Step:
    return dataclasses.replace(STEP, forward=dataclasses.replace(STEP.forward, **changes))


def of_backward(**changes: object) -> Step:
    return dataclasses.replace(STEP, backward=dataclasses.replace(STEP.backward, **changes))


def test_a_problem_that_is_trained_is_searched_for_steps() -> None:
    assert isinstance(space_of(TRAINED, CHIP), Steps)
    assert isinstance(space_of(PROBLEM, CHIP), Forwards)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_axes_cover_a_step_and_hold_the_default(chip: str, gate: str) -> None:
    bound = -5.0 if gate == "bounded" else None
    problem = dataclasses.replace(TRAINED, gate=gate, lower_bound=bound)
    space = Steps(problem, get_chip(chip))
    point = space.point(space.default)
    legal = 0
    for options in space.axes.values():
        assert {name: point[name] for name in options[0]} in options
        found = [
            check_step(space.candidate({**point, **o}), problem, get_chip(chip)) for o in options
        ]
        # what is legal for one kernel may not go with the default of the other
        assert {v.constraint for v in found if v} <= {"cuts", "packing", "code_size", "vmem"}
        legal += found.count(None)
    assert legal > 50
    fixed = {"forward.states", "forward.keep_gate"}
    assert {name for options in space.axes.values() for name in options[0]} == point.keys() - fixed
    assert space.candidate(point) == space.default


def made_up(step: Step) -> float:
    """A time with its least at long spans and everything kept."""
    kept = sum(getattr(step.forward, name) for name in KEPT)
    return 20.0 - step.forward.recurrence_span - step.backward.chunk / 64 - kept


def ask(study: Study, count: int) -> list[Step]:
    asked = []
    for _ in range(count):
        step = study.ask()
        assert isinstance(step, Step)
        study.tell(step, made_up(step))
        asked.append(step)
    return asked


def test_asks_are_legal_and_share_their_cuts() -> None:
    asked = ask(Study(Steps(TRAINED, CHIP), trials=60, seed=0), 60)
    assert len(set(asked)) == 60
    for step in asked:
        assert check_step(step, TRAINED, CHIP) is None
    apart = [step for step in asked if step.forward.heads != step.backward.heads]
    assert any(not step.backward.keep_inverse for step in apart)
    # an inverse lies as the forward's programs made it
    kept = [step for step in apart if step.backward.keep_inverse]
    assert all(step.forward.heads % step.backward.heads == 0 for step in kept)
    assert {step.residuals for step in asked} == {"save"}
    times = [made_up(step) for step in asked]
    assert sum(times[-20:]) < sum(times[:20])


def test_a_policy_that_is_asked_for_is_the_only_one() -> None:
    problem = dataclasses.replace(TRAINED, residuals="rematerialize")
    space = Steps(problem, CHIP)
    assert space.default.residuals == "rematerialize"
    assert {step.residuals for step in space.first} == {"rematerialize"}
    assert {s.residuals for s in ask(Study(space, 10, 0), 10)} == {"rematerialize"}


def test_a_limit_leaves_out_what_keeps_more() -> None:
    limit = residual_bytes(TRAINED, STEP)
    assert limit == 8 * (2048 // 64) * 128 * 128 * 2 + 8 * 2048 * (64 + 128) * 2
    space = Steps(TRAINED, CHIP, limit)
    study = Study(space, 40, seed=1)
    study.suggest(space.first)
    asked = ask(study, 40)
    assert max(residual_bytes(TRAINED, step) for step in asked) <= limit
    assert {step.residuals for step in asked} == {"save", "rematerialize"}
    assert space.excess(STEP) == ""
    assert "keeps 14.0 MiB of residuals, of 1.0 allowed" in Steps(TRAINED, CHIP, 1 << 20).excess(
        STEP
    )
    none = Steps(TRAINED, CHIP, 0)
    assert {step.residuals for step in ask(Study(none, 10, 0), 10)} == {"rematerialize"}


def test_a_limit_that_nothing_fits_is_an_error() -> None:
    saving = dataclasses.replace(TRAINED, residuals="save")
    with pytest.raises(VariantError, match=r"keeps 4\.0 MiB at least, of 1\.0 allowed"):
        Steps(saving, CHIP, 1 << 20)
    assert Steps(saving, CHIP, 4 << 20).default.residuals == "save"


def test_a_loop_that_no_published_kernel_has_may_not_win() -> None:
    space = Steps(TRAINED, CHIP)
    assert space.unproven(STEP, step_result(loop_bundles=MAX_LOOP_BUNDLES)) == ""
    assert "code_size: 9701" in space.unproven(STEP, step_result(loop_bundles=MAX_LOOP_BUNDLES + 1))


def test_what_must_be_as_large_as_what_was_too_large_is_not_tried() -> None:
    space = Steps(TRAINED, CHIP)
    assert not space.hopeless(STEP)
    space.unproven(STEP, step_result(loop_bundles=2 * MAX_LOOP_BUNDLES))
    assert space.hopeless(STEP) and space.hopeless(of_forward(lag=1))
    halved = space.candidate({**space.point(STEP), "backward.heads": STEP.backward.heads // 2})
    assert not space.hopeless(halved)
    # one of as much work that is not too large says that there are such
    space.unproven(of_forward(lag=1), step_result(loop_bundles=MAX_LOOP_BUNDLES))
    assert not space.hopeless(STEP)


def test_the_search_begins_with_everything_kept_and_with_fewer_heads() -> None:
    first = Steps(TRAINED, CHIP).first
    heads = STEP.backward.heads
    cuts = {(s.backward.heads, s.forward.keep_inverse, s.forward.keep_corrected) for s in first}
    # with an inverse to form, all heads at once would take too large a loop
    assert cuts == {(heads // 2, *kept) for kept in ((0, 0), (0, 1), (1, 1))}
    assert all(check_step(step, TRAINED, CHIP) is None for step in first)
    under = Steps(TRAINED, CHIP, 0).first
    assert REBUILT in under and {step.residuals for step in under} == {"rematerialize"}


def test_the_fastest_halves_are_put_together() -> None:
    space = Steps(TRAINED, CHIP)
    forward, backward = of_forward(lag=1), of_backward(weight_depth=128)
    both = dataclasses.replace(forward, backward=backward.backward)
    results = {
        forward: step_result(forward, seconds=5e-4, forward_seconds=1e-4, backward_seconds=4e-4),
        backward: step_result(backward, seconds=5e-4, forward_seconds=2e-4, backward_seconds=3e-4),
    }
    assert space.recombined(results) == both
    assert space.recombined({**results, both: step_result(both, seconds=4e-4)}) is None
    # what keeps or cuts otherwise, runs a forward again, or is unproven has no part in it
    apart = {
        forward: results[forward],
        dataclasses.replace(backward, residuals="rematerialize"): results[backward],
    }
    assert space.recombined(apart) is None
    unproven = dataclasses.replace(results[backward], reason="code_size: too large")
    assert space.recombined({forward: results[forward], backward: unproven}) is None


def test_under_a_limit_the_fastest_that_keeps_too_much_is_rebuilt() -> None:
    results = {
        step: step_result(step, seconds=seconds, forward_seconds=1e-4)
        for step, seconds in ((of_forward(lag=1), 5e-4), (STEP, 6e-4))
    }
    wanted = dataclasses.replace(of_forward(lag=1), residuals="rematerialize")
    space = Steps(TRAINED, CHIP, 0)
    assert space.recombined(results) == wanted
    assert space.recombined({**results, wanted: step_result(wanted, seconds=6e-4)}) is None
    assert Steps(TRAINED, CHIP).recombined(results) is None


def entry(problem, of) -> Entry:
    return Entry("x", problem, ENVIRONMENT, result(of), True)


def test_steps_begin_where_steps_and_forwards_nearby_did_well() -> None:
    space = Steps(TRAINED, CHIP)
    of_step, _ = space.adapted(entry(TRAINED, of_backward(weight_depth=128)))
    assert of_step == of_backward(weight_depth=128)
    taken, fitted = space.adapted(entry(PROBLEM, FASTER))
    assert taken.forward.recurrence_span == fitted.forward.recurrence_span == FASTER.recurrence_span
    assert taken.forward.chunks == FASTER.chunks
    assert fitted.backward == STEP.backward and check_step(fitted, TRAINED, CHIP) is None
    assert Forwards(PROBLEM, CHIP).adapted(entry(TRAINED, STEP)) == []
    assert Forwards(PROBLEM, CHIP).adapted(entry(PROBLEM, DEFAULT))[0] == DEFAULT
