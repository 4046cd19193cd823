"""A tuning run over several problems on one chip."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kdagen.chips import Chip, chip_for_device_kind
from kdagen.compiler import aot
from kdagen.errors import KdagenError
from kdagen.measure import hardware
from kdagen.measure.pool import Pool
from kdagen.problem import Problem
from kdagen.search import environment
from kdagen.search.shape import Job, ShapeSearch
from kdagen.store.rows import Environment
from kdagen.store.tuned import Store
from kdagen.variant import VariantError

DEFAULT_TRIALS = 24

_POLL_SECONDS = 1.0

_OFF_DEVICE = ("offline", "verify")
_ON_DEVICE = ("hardware", "paired")

Pools = list[tuple[Pool, tuple[str, ...]]]


class TuneError(KdagenError):
    """A run that cannot begin, or cannot go on."""


@dataclass(frozen=True)
class Plan:
    """What to tune, and how far.

    Attributes:
      chip: what to tune for.
      shapes: problems by name.
      trials: candidates a problem, those of earlier runs included.
      budget_seconds: no candidate but the defaults starts later than this after the beginning; what
        runs then, and the checks of would-be winners, still end. None is no limit.
      jobs: worker processes.
      seed: of the samplers.
      residual_limit_bytes: most bytes that a training step may keep from its forward pass to its
        gradient; None is no limit. Problems that are not trained do not heed it.
    """

    chip: Chip
    shapes: Mapping[str, Problem]
    trials: int = DEFAULT_TRIALS
    budget_seconds: float | None = None
    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)
    seed: int = 0
    residual_limit_bytes: int | None = None


@dataclass(frozen=True)
class Progress:
    """How far a run is, after a job has ended.

    Attributes:
      done, total: jobs ended in this run, and those plus the ones to come as far as known.
      seconds_left: an estimate; None before there is anything to go by.
      search: the problem that the job was of.
      job: the job that ended, and how.
      status, reason: how it ended.
    """

    done: int
    total: int
    seconds_left: float | None
    search: ShapeSearch
    job: Job
    status: str
    reason: str


@dataclass(frozen=True)
class Run:
    """What a run searches, and how it comes by its times.

    Attributes:
      chip, source: what the rows are made for and with.
      environments: what they are made in, by whether the problem is trained.
      searches: of every problem that some variant serves.
      refused: why no variant serves the others, by name.
      same: names whose problem has another name before them, and that one.
    """

    chip: Chip
    environments: dict[bool, Environment]
    source: str
    searches: list[ShapeSearch]
    refused: dict[str, str]
    same: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> Environment:
        """One of them: the versions are the same in all."""
        return next(iter(self.environments.values()))


@dataclass(frozen=True)
class Summary:
    """What a run came to.

    Attributes:
      run: what it was.
      interrupted: whether it was stopped by Ctrl-C.
      seconds: that it took.
    """

    run: Run
    interrupted: bool
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether every problem has a winner."""
        winners = [search.winner for search in self.run.searches]
        return not self.run.refused and None not in winners


def tune(
    plan: Plan,
    store: Store,
    begin: Callable[[Run], None] = lambda run: None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Search for the best variant of every problem of ``plan``.

    Times are measured where a TPU of that chip is attached, else modelled. Rows are committed one
    by one. KeyboardInterrupt ends the workers and the run; what was recorded stays, and a run of
    the same plan goes on from it.

    Args:
      plan: what to tune.
      store: the database that rows go to, and an earlier run's rows come from.
      begin: called once, before the first job.
      report: called after each job.

    Raises:
      TuneError: this machine can neither compile for the chip nor has one; the directory for
        temporary files has white space in its path; or the templates, the kernels or the model were
        changed during the run.
      PoolError: worker processes do not start.
    """
    started = time.monotonic()
    chip = plan.chip
    kind = hardware.attached_device_kind()
    source = "hardware" if kind and chip_for_device_kind(kind) == chip else "compiler"
    reason = None if source == "hardware" else aot.can_compile(chip)
    if reason is not None:
        raise TuneError(f"cannot compile for {chip.name} here: {reason}")
    temporary = str(Path(tempfile.gettempdir()).resolve())
    if any(character.isspace() for character in temporary):
        raise TuneError(
            f"TMPDIR: got {temporary!r}; the compiler's flags take no path with white space, so "
            "that it must name a directory without"
        )
    made_with = {
        trained: environment.current(chip, trained)
        for trained in {problem.trained for problem in plan.shapes.values()}
    }
    ids = {trained: store.put_environment(one) for trained, one in made_with.items()}
    searches, refused, same = [], {}, {}
    first: dict[Problem, str] = {}
    for name, problem in plan.shapes.items():
        if first.setdefault(problem, name) != name:
            same[name] = first[problem]
            continue
        try:
            searches.append(
                ShapeSearch(
                    name,
                    problem,
                    chip,
                    store,
                    ids[problem.trained],
                    source,
                    plan.trials,
                    plan.seed,
                    plan.residual_limit_bytes,
                )
            )
        except VariantError as error:
            refused[name] = str(error)
    for index, search in enumerate(searches, start=1):
        if plan.budget_seconds is not None:
            search.deadline = started + plan.budget_seconds * index / len(searches)
    run = Run(chip, made_with, source, searches, refused, same)
    begin(run)
    interrupted = False
    with _pools(plan, source) as pools:
        try:
            _run(plan, run, pools, report)
        except KeyboardInterrupt:
            interrupted = True
    return Summary(run, interrupted, time.monotonic() - started)


@contextlib.contextmanager
def _pools(plan: Plan, source: str) -> Iterator[Pools]:
    with contextlib.ExitStack() as stack:
        pools: Pools = [(stack.enter_context(Pool(plan.jobs, aot.worker_environment)), _OFF_DEVICE)]
        if source == "hardware":
            # One process at a time can have the device.
            pool = stack.enter_context(Pool(1, hardware.device_environment))
            pools.append((pool, _ON_DEVICE))
        yield pools


def _run(
    plan: Plan,
    run: Run,
    pools: Pools,
    report: Callable[[Progress], None],
) -> None:
    searches = run.searches
    by_name = {search.name: search for search in searches}
    started, done = time.monotonic(), 0
    while True:
        for pool, tasks in pools:
            _fill(plan, searches, pool, tasks)
        if not any(pool.busy for pool, _ in pools):
            return
        for pool, _ in pools:
            outcomes = pool.wait(_POLL_SECONDS / len(pools))
            if outcomes and any(
                environment.current(run.chip, trained) != made_with
                for trained, made_with in run.environments.items()
            ):
                # What the workers made is not what its row would say.
                raise TuneError(
                    "the templates, the kernels or the model changed during the run; what was "
                    "recorded before stands, and a new run starts anew"
                )
            for outcome in outcomes:
                job = outcome.job
                assert isinstance(job, Job)
                search = by_name[job.shape]
                search.finish(job, outcome)
                done += 1
                remaining = sum(s.remaining for s in searches)
                left = (time.monotonic() - started) / done * remaining
                report(
                    Progress(
                        done, done + remaining, left, search, job, outcome.status, outcome.reason
                    )
                )


def _fill(plan: Plan, searches: list[ShapeSearch], pool: Pool, tasks: tuple[str, ...]) -> None:
    """Give idle workers jobs: of the first problem that has one, so that the checks of one problem
    run while the next is searched."""
    for search in searches:
        while pool.idle:
            job = search.next(tasks)
            if job is None:
                break
            pool.submit(job, job.request(search.problem, plan.chip), job.timeout)
