"""Which variant of a problem to try next: Optuna's sampler over the legal ones, by ask and tell."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from kdagen.search.axes import Option
from kdagen.search.spaces import Candidate, Space

# Asks in a row that bring nothing new before the space counts as exhausted.
_FRUITLESS_ASKS = 400
_STARTUP_TRIALS = 8
_LEGAL = "legal"

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Study:
    """Proposes each legal variant at most once, best guesses first.

    Where the legal variants are no more than ``trials`` it goes through all of them; else the
    sampler chooses. Its trials are scratch: what was found out is told to it by ``tell``, by this
    run or from the record of an earlier one.

    Args:
      space: what is searched.
      trials: how many variants the search is going to try.
      seed: of the sampler; the same seed and the same tells give the same asks.
    """

    def __init__(self, space: Space, trials: int, seed: int) -> None:
        self._space, self._axes = space, space.axes
        # The sampler gets indices into the ordered options, so that it can tell near from far.
        self._distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(options) - 1) for name, options in self._axes.items()
        }
        sampler = optuna.samplers.TPESampler(
            seed=seed,
            multivariate=True,
            constant_liar=True,
            n_startup_trials=_STARTUP_TRIALS,
        )
        self._study = optuna.create_study(sampler=sampler)
        # None: proposed, and no answer yet. Infinity: came to nothing.
        self._answers: dict[Candidate, float | None] = {}
        self._waiting: dict[Candidate, optuna.trial.Trial] = {}
        self._illegal: list[Candidate] = []
        first = list(islice(space.legal(), trials + 1))
        self._all = first if len(first) <= trials else None

    @property
    def exhaustive(self) -> bool:
        """Whether it goes through every legal variant."""
        return self._all is not None

    def suggest(self, variants: Iterable[Candidate]) -> None:
        """Propose these first, if they are points of the space."""
        for variant in variants:
            point = self._indices(variant)
            if point is not None:
                self._study.enqueue_trial(point, skip_if_exists=True)

    def claim(self, variant: Candidate) -> None:
        """Take a variant that is going to be tried without being asked for."""
        self._answers[variant] = None

    def take_illegal(self) -> list[Candidate]:
        """The illegal variants that the sampler came upon since the last call."""
        illegal, self._illegal = self._illegal, []
        return illegal

    def ask(self) -> Candidate | None:
        """A legal variant that was not proposed or told before, or None: no other was found."""
        if self._all is not None:
            left = (v for v in self._all if v not in self._answers)
            variant = next((v for v in left if not self._space.hopeless(v)), None)
            if variant is not None:
                self._answers[variant] = None
            return variant
        for _ in range(_FRUITLESS_ASKS):
            trial = self._study.ask(self._distributions)
            variant = self._variant(trial.params)
            if variant in self._answers:
                self._finish(trial, self._answers[variant])
                continue
            illegal = self._space.check(variant) is not None
            if illegal or self._space.excess(variant) or self._space.hopeless(variant):
                self._answers[variant] = math.inf
                self._finish(trial, math.inf)
                if illegal:
                    self._illegal.append(variant)
                continue
            self._answers[variant] = None
            self._waiting[variant] = trial
            return variant
        return None

    def tell(self, variant: Candidate, seconds: float | None) -> None:
        """What became of a variant: its time, or None where it came to nothing.

        Variants that were never asked for are told too: the default, and earlier runs' results.
        """
        answer = math.inf if seconds is None else seconds
        self._answers[variant] = answer
        trial = self._waiting.pop(variant, None)
        if trial is not None:
            self._finish(trial, answer)
            return
        point = self._indices(variant)
        if point is None or self._all is not None:
            return
        feasible = answer != math.inf
        self._study.add_trial(
            create_trial(
                params=point,
                distributions=self._distributions,
                state=TrialState.COMPLETE if feasible else TrialState.PRUNED,
                value=answer if feasible else None,
                constraints={_LEGAL: 0.0 if feasible else 1.0},
            )
        )

    def _finish(self, trial: optuna.trial.Trial, answer: float | None) -> None:
        feasible = answer != math.inf
        # FAILED trials are invisible to the sampler, which would go on asking for the like.
        trial.set_constraint(_LEGAL, 0.0 if feasible else 1.0)
        if feasible and answer is not None:
            self._study.tell(trial, answer)
        else:
            self._study.tell(trial, state=TrialState.PRUNED)

    def _indices(self, variant: Candidate) -> dict[str, int] | None:
        values = self._space.point(variant)
        point = {}
        for name, options in self._axes.items():
            wanted = {parameter: values[parameter] for parameter in options[0]}
            if wanted not in options:
                return None
            point[name] = options.index(wanted)
        return point

    def _variant(self, point: dict[str, int]) -> Candidate:
        fields: Option = {}
        for name, options in self._axes.items():
            fields |= options[point[name]]
        return self._space.candidate(fields)
