"""The search for one problem: which job is next, and what its outcome means."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kdagen.chips import Chip
from kdagen.measure.pool import Outcome
from kdagen.problem import Problem
from kdagen.search import finals
from kdagen.search.neighbours import neighbours
from kdagen.search.spaces import Candidate, space_of
from kdagen.search.study import Study
from kdagen.store.rows import Result, TensorError
from kdagen.store.tuned import Store

_NEIGHBOURS = 4

CANDIDATE_TASK = {"compiler": "offline", "hardware": "hardware"}
# A step has two kernels; what the interpreter compiles for them takes minutes on a busy machine.
_TIMEOUT_SECONDS = {"offline": 240.0, "hardware": 300.0, "paired": 900.0, "verify": 1200.0}


@dataclass(frozen=True)
class Job:
    """One request to a worker.

    Attributes:
      shape: name of the problem.
      task: of ``kdagen.measure.worker.TASKS``.
      variants: the candidate; several for the task "paired".
    """

    shape: str
    task: str
    variants: tuple[Candidate, ...]

    @property
    def timeout(self) -> float:
        """Seconds after which it counts as hung."""
        return _TIMEOUT_SECONDS[self.task]

    def request(self, problem: Problem, chip: Chip) -> dict[str, Any]:
        """What the worker is sent."""
        request = {"task": self.task, "chip": chip.name, "problem": problem.to_dict()}
        if self.task == "paired":
            return {**request, "variants": [v.to_dict() for v in self.variants]}
        return {**request, "variant": self.variants[0].to_dict()}


class ShapeSearch:
    """Hands out the jobs of one problem and writes a row for each that ends.

    The default variant is first. Then the study's candidates, until there are ``trials`` rows or
    the deadline has come. Then, on a device, the fastest and the default are measured against each
    other; then would-be winners are checked, best first, until one is right.

    Args:
      name, problem, chip: what is searched for.
      store, environment_id, source: where rows go. Rows of an earlier run are taken over.
      trials: candidates in all, the default among them and those of earlier runs.
      seed: of the sampler.
      residual_limit: most bytes that a training step may keep, None for no limit. The default is
        tried all the same, to compare with, and does not win above it.

    Attributes:
      deadline: ``time.monotonic()`` after which no candidate is handed out but the default.
      done, winner: set when nothing is left to do; no winner where no candidate was right.
      taken_over: candidates that an earlier run had tried.
    """

    def __init__(
        self,
        name: str,
        problem: Problem,
        chip: Chip,
        store: Store,
        environment_id: int,
        source: str,
        trials: int,
        seed: int,
        residual_limit: int | None = None,
    ) -> None:
        self.name, self.problem, self.source = name, problem, source
        self._chip, self._store, self._environment_id = chip, store, environment_id
        self._trials = trials
        self._space = space_of(problem, chip, residual_limit)
        self._problem_id = store.put_problem(problem, name)
        self._residual_limit = residual_limit
        self.default = self._space.default
        self._study = Study(self._space, trials, seed)
        self.results: dict[Candidate, Result] = {}
        for result in store.results(environment_id, self._problem_id, source):
            variant = self._space.read(result.variant)
            self.results[variant] = result
            self._space.unproven(variant, result)
            self._tell(variant)
        self.taken_over = len(self.tried)
        self._running: set[Job] = set()
        self._suggested = self._exhausted = self._paired = False
        self.deadline = math.inf
        self.done = False
        self.winner: Result | None = None

    @property
    def tried(self) -> list[Result]:
        """The candidates that count against ``trials``: all but the illegal ones and, under a limit
        on residuals, those that keep more."""
        return [
            r
            for variant, r in self.results.items()
            if r.status != "illegal" and not self._space.excess(variant)
        ]

    @property
    def remaining(self) -> int:
        """Jobs still to come, as far as one can tell: candidates, and one check."""
        if self.done:
            return 0
        candidates = max(self._trials - len(self.tried), 0) if self._wants_candidates() else 0
        return max(candidates, len(self._running)) + 1

    @property
    def best(self) -> Result | None:
        """The fastest result so far that may win, checked or not."""
        able = self._able()
        return min(able, key=lambda r: (r.seconds or math.inf, r.variant_id), default=None)

    def _able(self) -> list[Result]:
        """The results that may win if their numbers are right."""
        return [
            r
            for variant, r in self.results.items()
            if r.status == "ok" and not r.reason and not self._space.excess(variant)
        ]

    @property
    def default_result(self) -> Result | None:
        return self.results.get(self.default)

    def reasons(self) -> Counter[str]:
        """How many candidates came to nothing, by status and reason."""
        return Counter(f"{r.status}: {_kind(r)}" for r in self.results.values() if r.reason)

    def next(self, tasks: Collection[str]) -> Job | None:
        """The next job among ``tasks``, or None: there is none before another one ends, or none
        at all (see ``done``)."""
        if self.done:
            return None
        job = None
        if self._wants_candidates():
            if CANDIDATE_TASK[self.source] in tasks:
                job = self._next_candidate()
            if job is None and not self._exhausted:
                return None
        if job is None and not self._running:
            job = self._next_final(tasks)
        if job is not None:
            self._running.add(job)
        return job

    def _wants_candidates(self) -> bool:
        if self._default_is_missing():
            return True
        return (
            not self._exhausted
            and len(self.tried) + len(self._running) < self._trials
            and time.monotonic() < self.deadline
        )

    def _default_is_missing(self) -> bool:
        running = any(self.default in job.variants for job in self._running)
        return self.default not in self.results and not running

    def _next_candidate(self) -> Job | None:
        if self._default_is_missing():
            variant: Candidate | None = self.default
            self._study.claim(self.default)
        else:
            if not self._suggested:
                # Not earlier: the problems searched before this one may have found something.
                self._suggested = True
                entries = self._store.entries()
                near = neighbours(entries, self.problem, self._chip, self._space, _NEIGHBOURS)
                self._study.suggest([*self._space.first, *near])
            variant = self._recombined() or self._study.ask()
            for illegal in self._study.take_illegal():
                reason = str(self._space.check(illegal))
                self._record(illegal, status="illegal", reason=reason)
            self._exhausted = variant is None
        if variant is None:
            return None
        return Job(self.name, CANDIDATE_TASK[self.source], (variant,))

    def _recombined(self) -> Candidate | None:
        variant = self._space.recombined(self.results)
        if variant is None or any(variant in job.variants for job in self._running):
            return None
        self._study.claim(variant)
        return variant

    def _next_final(self, tasks: Collection[str]) -> Job | None:
        results = self._able()
        if self.source == "hardware" and not self._paired:
            finalists = finals.finalists(results)
            if len(finalists) > 1:
                if "paired" not in tasks:
                    return None
                self._paired = True
                return Job(self.name, "paired", tuple(map(self._variant, finalists)))
        leader = finals.leader(results, finals.noise(finals.finalists(results)))
        if leader is None or leader.checked:
            self._end(leader)
        elif "verify" in tasks:
            return Job(self.name, "verify", (self._variant(leader),))
        return None

    def _end(self, winner: Result | None) -> None:
        self.done, self.winner = True, winner
        where = (self._environment_id, self._problem_id, self.source)
        if winner is None:
            self._store.forget_choice(*where)
        else:
            limit = self._residual_limit if self.problem.trained else None
            self._store.choose(*where, winner.variant_id, limit)

    def finish(self, job: Job, outcome: Outcome) -> None:
        """Take the end of a job that ``next`` gave out."""
        self._running.discard(job)
        variant = job.variants[0]
        if job.task == "verify":
            self._take_check(variant, outcome)
        elif job.task == "paired":
            # Where it came to nothing, the times measured one by one stand.
            for one, measured in zip(job.variants, _values(outcome), strict=False):
                self._update(one, **measured)
        else:
            value = outcome.value or {}
            self._record(variant, status=outcome.status, reason=outcome.reason, **value)
            if unproven := self._space.unproven(variant, self.results[variant]):
                self._update(variant, reason=unproven)
            self._tell(variant)

    def _tell(self, variant: Candidate) -> None:
        result = self.results[variant]
        able = result.status == "ok" and not result.reason and not self._space.excess(variant)
        self._study.tell(variant, result.seconds if able else None)

    def _take_check(self, variant: Candidate, outcome: Outcome) -> None:
        if outcome.value is None:
            # It timed well, and its numbers could not even be computed.
            status = outcome.status if outcome.status in ("died", "hung") else "wrong"
            reason = f"while its numbers were checked: {outcome.reason}"
            seconds = self.results[variant].seconds if status == "wrong" else None
            self._update(variant, status=status, reason=reason, seconds=seconds)
            return
        errors = {name: TensorError(**e) for name, e in outcome.value["errors"].items()}
        wrong = [
            f"{name} is off by {_shown(e.error)}, allowed {e.bound:.1e}"
            for name, e in errors.items()
            if not e.ok
        ]
        status = "wrong" if wrong else "ok"
        rest = {name: x for name, x in outcome.value.items() if name != "errors"}
        self._update(variant, status=status, reason="; ".join(wrong), errors=errors, **rest)

    def _record(self, variant: Candidate, **values: Any) -> None:
        self._put(
            variant,
            Result(
                variant=variant.to_json(),
                variant_id=self._space.identity(variant),
                source=self.source,
                is_default=variant == self.default,
                **values,
            ),
        )

    def _variant(self, result: Result) -> Candidate:
        return self._space.read(result.variant)

    def _update(self, variant: Candidate, **changes: Any) -> None:
        self._put(variant, dataclasses.replace(self.results[variant], **changes))

    def _put(self, variant: Candidate, result: Result) -> None:
        self.results[variant] = result
        self._store.put_result(self._environment_id, self._problem_id, result)


def _values(outcome: Outcome) -> list[dict[str, Any]]:
    return outcome.value["times"] if outcome.value else []


def _kind(result: Result) -> str:
    """What candidates that failed alike have in common: the constraint, or the reason without its
    numbers and the name of the kernel."""
    if result.status in ("illegal", "ok"):
        return result.reason.split(":")[0]
    unnamed = re.sub(r"\bkda_(?:forward|backward)_\w+(\.\d+)?:? ?", "", result.reason)
    return re.sub(r"\b(0x[0-9a-f]+|\d[\d.]*(e[+-]?\d+)?)\b", "#", unnamed)[:80]


def _shown(error: float | None) -> str:
    return "NaN or infinity" if error is None else f"{error:.1e}"
