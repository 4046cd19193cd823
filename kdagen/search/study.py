"""Which variant of a problem to try next: Optuna's sampler over the legal ones, by ask and tell."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from kdagen.chips import Chip
from kdagen.problem import Problem
from kdagen.variant import Variant, check, default_variant, legal_variants, space

# Asks in a row that bring nothing new before the space counts as exhausted.
_FRUITLESS_ASKS = 400
_STARTUP_TRIALS = 8
_LEGAL = "legal"

# Parameters whose legal values depend on each other: one axis of the sampler for each group, so
# that nearly all it proposes is legal. Every other parameter is an axis of its own.
_GROUPS = (("chunk", "heads", "rows", "chunks", "vmem_limit_mib"),)
# Variants with less work in flight than this share of the most leave the MXU waiting for the
# products of one chunk-head: with half of it they take 1.5 times as long, with a quarter 3 times.
_LEAST_IN_FLIGHT = 0.5

Option = dict[str, Any]

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Study:
    """Proposes each legal variant at most once, best guesses first.

    Where the legal variants are no more than ``trials`` it goes through all of them; else the
    sampler chooses. Its trials are scratch: what was found out is told to it by ``tell``, by this
    run or from the record of an earlier one.

    Args:
      problem, chip: what is searched for.
      trials: how many variants the search is going to try.
      seed: of the sampler; the same seed and the same tells give the same asks.
    """

    def __init__(self, problem: Problem, chip: Chip, trials: int, seed: int) -> None:
        self._problem, self._chip = problem, chip
        self._axes = axes(problem, chip)
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
        self._answers: dict[Variant, float | None] = {}
        self._waiting: dict[Variant, optuna.trial.Trial] = {}
        self._illegal: list[Variant] = []
        first = list(islice(legal_variants(problem, chip), trials + 1))
        self._all = first if len(first) <= trials else None

    @property
    def exhaustive(self) -> bool:
        """Whether it goes through every legal variant."""
        return self._all is not None

    def suggest(self, variants: Iterable[Variant]) -> None:
        """Propose these first, if they are points of the space."""
        for variant in variants:
            point = self._indices(variant)
            if point is not None:
                self._study.enqueue_trial(point, skip_if_exists=True)

    def claim(self, variant: Variant) -> None:
        """Take a variant that is going to be tried without being asked for."""
        self._answers[variant] = None

    def take_illegal(self) -> list[Variant]:
        """The illegal variants that the sampler came upon since the last call."""
        illegal, self._illegal = self._illegal, []
        return illegal

    def ask(self) -> Variant | None:
        """A legal variant that was not proposed or told before, or None: no other was found."""
        if self._all is not None:
            variant = next((v for v in self._all if v not in self._answers), None)
            if variant is not None:
                self._answers[variant] = None
            return variant
        for _ in range(_FRUITLESS_ASKS):
            trial = self._study.ask(self._distributions)
            variant = self._variant(trial.params)
            if variant in self._answers:
                self._finish(trial, self._answers[variant])
                continue
            if check(variant, self._problem, self._chip) is not None:
                self._answers[variant] = math.inf
                self._finish(trial, math.inf)
                self._illegal.append(variant)
                continue
            self._answers[variant] = None
            self._waiting[variant] = trial
            return variant
        return None

    def tell(self, variant: Variant, seconds: float | None) -> None:
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

    def _indices(self, variant: Variant) -> dict[str, int] | None:
        values = variant.to_dict()
        point = {}
        for name, options in self._axes.items():
            wanted = {parameter: values[parameter] for parameter in options[0]}
            if wanted not in options:
                return None
            point[name] = options.index(wanted)
        return point

    def _variant(self, point: dict[str, int]) -> Variant:
        fields: Option = {}
        for name, options in self._axes.items():
            fields |= options[point[name]]
        return Variant(**fields)


def axes(problem: Problem, chip: Chip) -> dict[str, list[Option]]:
    """The sampler's axes: for each an ordered list of options, partial parameter sets.

    An option is in it if it is legal beside the default variant's other parameters. The first axis
    is ordered by the work in flight, has a raised VMEM limit only where the chip's own does not do,
    and no programs longer than the sequence but the default's.
    """
    default = default_variant(problem, chip)
    values = space(problem, chip)
    grouped = {name for group in _GROUPS for name in group}
    groups = [*_GROUPS, *((name,) for name in values if name not in grouped)]
    found = {}
    for group in groups:
        options = [
            dict(zip(group, point, strict=True))
            for point in itertools.product(*(values[name] for name in group))
        ]
        own = {name: getattr(default, name) for name in group}
        if own not in options:
            options.append(own)
        found["+".join(group)] = [
            option
            for option in options
            if check(dataclasses.replace(default, **option), problem, chip) is None
        ]
    first = "+".join(_GROUPS[0])
    own = {name: getattr(default, name) for name in _GROUPS[0]}
    found[first] = _busy(found[first], own, problem.tokens)
    return found


def _busy(options: list[Option], own: Option, tokens: int) -> list[Option]:
    kept = [own]
    for option in options:
        unraised = {**option, "vmem_limit_mib": 0}
        needs_its_limit = option == unraised or unraised not in options
        fits = (option["chunks"] - 1) * option["chunk"] < tokens
        if option != own and needs_its_limit and fits:
            kept.append(option)
    least = _LEAST_IN_FLIGHT * max(map(_in_flight, kept))
    kept = [option for option in kept if _in_flight(option) >= least]
    return sorted(kept, key=lambda o: (_in_flight(o), o["chunk"], o["heads"]))


def _in_flight(option: Option) -> int:
    """Tokens of all chunk-heads of one grid step."""
    return option["chunk"] * option["heads"] * option["rows"] * option["chunks"]
