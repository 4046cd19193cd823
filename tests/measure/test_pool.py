"""Worker processes: a candidate's accident costs that candidate, and nothing else."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from kdagen.chips import get_chip
from kdagen.compiler import aot, model
from kdagen.measure import offline, operands, worker
from kdagen.measure.pool import Outcome, Pool, PoolError
from kdagen.problem import Problem
from kdagen.space import default_variant
from kdagen.variant import Variant

PROBLEM = Problem(tokens=4096, heads=2, gate="bounded", lower_bound=-5.0, final_state=True)
VARIANT = dataclasses.replace(default_variant(PROBLEM, get_chip("v6e")), heads=2, chunks=1)
WHOLE = 64 * model.MIN_STEPS


def request(variant: Variant = VARIANT, problem: Problem = PROBLEM) -> dict:
    return {
        "task": "offline",
        "chip": "v6e",
        "problem": problem.to_dict(),
        "variant": variant.to_dict(),
    }


def run(pool: Pool, job: str, asked: dict, timeout: float = 200.0) -> Outcome:
    pool.submit(job, asked, timeout)
    return end(pool)


def end(pool: Pool) -> Outcome:
    while not (outcomes := pool.wait(10)):
        assert pool.busy
    (outcome,) = outcomes
    assert not pool.busy
    return outcome


@pytest.fixture(scope="module")
def pool():
    with Pool(1, aot.worker_environment) as opened:
        yield opened


def test_a_candidate_gets_its_figures(pool: Pool) -> None:
    outcome = run(pool, "good", request())
    assert (outcome.job, outcome.status, outcome.reason) == ("good", "ok", "")
    figures = outcome.value
    assert figures is not None
    assert figures["seconds"] == figures["modelled_seconds"] > figures["floor_seconds"] > 0
    known = get_chip("v6e").calibration
    assert known is not None and figures["model_error"] == known.mean_error
    assert figures["floor_bytes"] == operands.floor_bytes(PROBLEM)
    # All but beta and the gate's parameters comes into the kernel as the caller has it.
    moved = figures["dma_in_bytes"] + figures["dma_out_bytes"]
    assert moved == pytest.approx(figures["floor_bytes"], rel=0.02)
    assert 0 < figures["loop_bundles"] < 9400
    assert 0 < figures["vmem_used_bytes"] < figures["vmem_limit_bytes"] == 32 << 20


def test_a_length_that_was_compiled_whole_agrees_with_one_that_was_not(pool: Pool) -> None:
    whole = dataclasses.replace(PROBLEM, tokens=WHOLE)
    assert offline.shortened(whole, VARIANT.block_tokens) == whole
    found = [
        run(pool, "scaled", request(problem=dataclasses.replace(PROBLEM, tokens=n * WHOLE))).value
        for n in (1, 2, 3)
    ]
    first, second, third = (figures["seconds"] for figures in found if figures is not None)
    assert third - second == pytest.approx(second - first, rel=0.02)


def test_what_the_compiler_refuses_has_a_reason(pool: Pool) -> None:
    lavish = dataclasses.replace(VARIANT, vmem_limit_mib=1)
    outcome = run(pool, "vmem", request(lavish))
    assert outcome.status == "vmem"
    assert "1.00 MiB allowed" in outcome.reason
    assert outcome.value is None
    outcome = run(pool, "broken", request(dataclasses.replace(VARIANT, heads=1, chunk=64)))
    assert outcome.status == "compile_failed"
    assert outcome.reason


def test_a_process_that_is_killed_costs_one_candidate(pool: Pool) -> None:
    run(pool, "before", request())
    pool.submit("killed", request(dataclasses.replace(VARIANT, lag=1)), 200.0)
    os.kill(pool.pids()["killed"], signal.SIGKILL)
    outcome = end(pool)
    assert (outcome.job, outcome.status) == ("killed", "died")
    assert "SIGKILL" in outcome.reason
    assert run(pool, "after", request()).status == "ok"


def test_a_process_that_hangs_costs_one_candidate(pool: Pool) -> None:
    run(pool, "before", request())
    pool.submit("hung", request(dataclasses.replace(VARIANT, lag=1)), 0.2)
    pid = pool.pids()["hung"]
    os.kill(pid, signal.SIGSTOP)
    outcome = end(pool)
    assert (outcome.job, outcome.status) == ("hung", "hung")
    assert not Path(f"/proc/{pid}").exists()
    assert run(pool, "after", request()).status == "ok"


def test_a_process_that_takes_too_much_memory_costs_one_candidate() -> None:
    with Pool(1, aot.worker_environment, memory_bytes=64 << 20) as small:
        outcome = run(small, "large", request())
    assert outcome.status == "died"
    assert "of memory" in outcome.reason


def test_a_process_that_does_not_start_is_nobodys_fault() -> None:
    with (
        Pool(
            1, lambda dumps: {**os.environ, "PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"}
        ) as broken,
        pytest.raises(PoolError, match="did not start"),
    ):
        run(broken, "any", request())


def test_closing_ends_what_runs_and_leaves_nothing() -> None:
    with Pool(2, aot.worker_environment) as pool:
        for job in ("one", "two"):
            pool.submit(job, request(), 200.0)
        pids = list(pool.pids().values())
        directories = [worker.directory for worker in pool._workers]
        assert pool.idle == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(directory.exists() for directory in directories)


def test_a_worker_does_not_outlive_its_parent() -> None:
    with Pool(1, aot.worker_environment) as pool:
        assert run(pool, "before", request()).status == "ok"
        process = pool._workers[0].process
        assert process is not None and process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def test_a_forward_of_a_trained_problem_is_no_step() -> None:
    trained = {"residuals": "save"}
    kept = Variant(states="bfloat16").to_dict()
    assert not worker._of_steps({"problem": trained, "variant": kept})
    step = {"forward": kept, "backward": {}, "residuals": "save"}
    assert worker._of_steps({"problem": trained, "variant": step})
    assert worker._of_steps({"problem": trained})
    assert not worker._of_steps({"problem": {"residuals": None}, "variant": kept})
