"""A training step's figures, and its numbers held to float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kdagen.chips import get_chip
from kdagen.compiler import aot
from kdagen.generate import Generated
from kdagen.gradient import source
from kdagen.gradient.step import Step, check_step, paired
from kdagen.gradient.variant import Request
from kdagen.measure import hardware, kinds, steps, verify, verify_steps
from kdagen.measure.pool import Pool
from kdagen.problem import Problem
from kdagen.space import default_variant

CHIP = get_chip("v6e")
PROBLEM = Problem(
    tokens=4096, heads=2, gate="bounded", lower_bound=-5.0, qk_l2norm=True, residuals="tuned"
)


def small_step(problem: Problem, **kept: bool) -> Step:
    """Two chunk-heads a program, quick to compile; but for ``kept`` it keeps the states alone."""
    step = paired(problem, default_variant(problem, CHIP), (CHIP,))
    kept = {"keep_inverse": False, "keep_corrected": False, **kept}
    cuts = {"chunk": 64, "heads": 2, "rows": 1, "chunks": 1, **kept}
    return dataclasses.replace(
        step,
        forward=dataclasses.replace(step.forward, **cuts),
        backward=dataclasses.replace(step.backward, **cuts),
    )


STEP = small_step(PROBLEM)
REBUILT = dataclasses.replace(STEP, residuals="rematerialize")


@pytest.fixture(scope="module")
def figures() -> dict[str, dict]:
    """What a worker finds of either policy."""
    found = {}
    with Pool(1, aot.worker_environment) as pool:
        for step in (STEP, REBUILT):
            request = {"task": "offline", "chip": "v6e", "problem": PROBLEM.to_dict()}
            pool.submit(step.residuals, {**request, "variant": step.to_dict()}, 200.0)
            while not (outcomes := pool.wait(10)):
                assert pool.busy
            (outcome,) = outcomes
            assert outcome.value is not None, outcome.reason
            found[step.residuals] = outcome.value
    return found


def test_a_step_is_as_long_as_its_halves(figures: dict[str, dict]) -> None:
    for one in figures.values():
        assert one["seconds"] == one["forward_seconds"] + one["backward_seconds"]
        assert one["seconds"] > one["floor_seconds"] > 0
        assert 0 < one["vmem_used_bytes"] < one["vmem_limit_bytes"] == 32 << 20
        assert 0 < one["loop_bundles"] < 9700


def test_a_gradient_that_runs_the_forward_again_takes_its_time(figures: dict[str, dict]) -> None:
    saved, rebuilt = figures["save"], figures["rematerialize"]
    again = rebuilt["backward_seconds"] - saved["backward_seconds"]
    assert again == pytest.approx(saved["forward_seconds"], rel=1e-6)
    # without states to write the forward is no slower
    assert rebuilt["forward_seconds"] <= saved["forward_seconds"] * 1.02
    assert rebuilt["dma_in_bytes"] > saved["dma_in_bytes"]


def test_residuals_are_the_states_and_what_else_is_kept(figures: dict[str, dict]) -> None:
    states = 2 * (4096 // 64) * 128 * 128 * 2
    assert figures["save"]["residual_bytes"] == states
    assert figures["rematerialize"]["residual_bytes"] == 0
    everything = small_step(PROBLEM, keep_inverse=True, keep_corrected=True)
    inverse, corrected = 2 * 4096 * 64 * 2, 2 * 4096 * 128 * 2
    assert steps.residual_bytes(PROBLEM, everything) == states + inverse + corrected


KEPT = small_step(PROBLEM, keep_inverse=True, keep_corrected=True)
# a forward of all chunk-heads at once and a backward of few
APART = dataclasses.replace(
    small_step(PROBLEM, keep_corrected=True),
    forward=dataclasses.replace(KEPT.forward, keep_inverse=False, heads=1, chunks=4),
)
# an inverse of more heads and more chunks than a program of the backward takes
CUT = dataclasses.replace(KEPT, forward=dataclasses.replace(KEPT.forward, heads=4, chunks=2))
STEPS = {"rebuilt": REBUILT, "all kept": KEPT, "cut apart": APART, "an inverse in cuts": CUT}


@pytest.mark.parametrize("residuals", ["save", "rematerialize"])
@pytest.mark.parametrize(
    ("layout", "cut"),
    [
        ("HBTD", "all kept"),
        ("BTHD", "all kept"),
        ("HBTD", "cut apart"),
        ("BTHD", "an inverse in cuts"),
    ],
)
def test_the_programs_of_a_step_fit_together(residuals: str, layout: str, cut: str) -> None:
    import jax

    # the blocks of a forward of several chunks reach beyond those of the backward
    problem = dataclasses.replace(
        PROBLEM, tokens=200, heads=4, value_heads=4, layout=layout,
        final_state=True, initial_state=True,
    )  # fmt: skip
    step = dataclasses.replace(STEPS[cut], residuals=residuals)
    assert check_step(step, dataclasses.replace(problem, residuals=residuals), CHIP) is None
    forward, given = steps.forward_program(problem, step, CHIP)
    gradient, wanted = steps.gradient_program(problem, step, CHIP)
    results = jax.eval_shape(forward, *given.values())._asdict()
    for name in steps.RESIDUALS:
        if residuals == "save" and results[name] is not None:
            assert (results[name].shape, results[name].dtype) == (
                wanted[name].shape,
                wanted[name].dtype,
            )
        else:
            assert wanted.get(name) is None and results[name] is None
    assert results["output"].shape == wanted["d_output"].shape
    assert results["final_state"].shape == wanted["d_final"].shape
    grads = jax.eval_shape(gradient, *wanted.values())
    assert grads.keys() == set(Request.everything(problem).wanted)
    for name, x in grads.items():
        assert (x.shape, x.dtype) == (given[name].shape, given[name].dtype)


@pytest.mark.parametrize("name", STEPS)
def test_a_right_step_is_within_its_bounds(name: str) -> None:
    step = STEPS[name]
    small = verify_steps.reduced(PROBLEM, step, 4 * len(kinds.telling(PROBLEM)))
    found = verify.worst(small, verify_steps.relative_errors(small, step, "v6e"))
    assert found.keys() == {"output", *Request.everything(PROBLEM).wanted}
    for tensor, of in found.items():
        assert of["error"] is not None and 1e-4 < of["error"] <= of["bound"], tensor


@pytest.mark.parametrize("layout", ["HBTD", "BTHD"])
def test_a_gradient_that_is_off_by_a_hundredth_is_seen(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    made: Callable[..., Generated] = source.generate

    def altered(*asked) -> Generated:
        good = made(*asked)
        text = good.source.replace(
            "(item_of(at), step.value(at)", "(item_of(at), 1.02 * step.value(at)"
        )
        assert text != good.source
        return Generated(text, good.variant_id, f"{good.module_name}_altered")

    problem = dataclasses.replace(
        PROBLEM, gate="log_decay", lower_bound=None, layout=layout, final_state=True
    )
    step = small_step(problem)
    small = verify_steps.reduced(problem, step, len(kinds.telling(problem)))
    monkeypatch.setattr(source, "generate", altered)
    found = verify.worst(small, verify_steps.relative_errors(small, step, "v6e"))
    off = {name for name, tensor in found.items() if tensor["error"] > tensor["bound"]}
    assert {"query", "gate"} <= off and not off & {"output", "final_state"}


def test_measured_halves_make_a_step() -> None:
    durations = {
        "jit_forward_3": [1.0, 1.1, 0.9, 1.0],
        "jit_backward_3": [3.0, 3.3, 2.7, 3.0],
    }
    found = hardware.step_statistics(3, durations, 4)
    assert (found["seconds"], found["forward_seconds"], found["backward_seconds"]) == (4, 1, 3)
    parts = [hardware.statistics(f"{name}_3", durations, 4) for name in ("forward", "backward")]
    assert found["spread"] == pytest.approx(sum(p["spread"] * p["seconds"] for p in parts) / 4)
