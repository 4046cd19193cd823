"""Where a search begins."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kdagen.chips import get_chip
from kdagen.problem import Problem
from kdagen.search.neighbours import neighbours as every_neighbour
from kdagen.search.spaces import space_of
from kdagen.space import default_variant
from kdagen.store.tuned import Store
from kdagen.variant import check
from tests.store.rows import ENVIRONMENT, FASTER, PROBLEM, result, tuned


def neighbours(store: Store, problem: Problem, chip: str, most: int = 4) -> list:
    of = get_chip(chip)
    return every_neighbour(store.entries(), problem, of, space_of(problem, of), most)


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "tuned.sqlite") as opened:
        yield opened


def test_the_best_of_another_length_is_taken_as_it_is(store: Store) -> None:
    tuned(store)
    longer = dataclasses.replace(PROBLEM, tokens=16384)
    assert neighbours(store, longer, "v6e") == [FASTER]


def test_a_variant_that_is_not_legal_is_fitted(store: Store) -> None:
    tuned(store)
    chip = get_chip("v7x")
    asked = Problem(tokens=2048, heads=3, gate="softplus", qk_l2norm=True)
    (found,) = neighbours(store, asked, "v7x")
    assert check(FASTER, asked, chip) is not None
    assert check(found, asked, chip) is None
    default = default_variant(asked, chip)
    assert (found.heads, found.chunks, found.decay) == (default.heads, default.chunks, "unbounded")
    assert found.recurrence_span == FASTER.recurrence_span


def test_the_nearest_come_first_and_no_more_than_asked(store: Store) -> None:
    tuned(store)
    environment_id = store.put_environment(ENVIRONMENT)
    near = dataclasses.replace(FASTER, lag=1)
    softer = dataclasses.replace(FASTER, order="irr")
    for problem, variant in (
        (dataclasses.replace(PROBLEM, heads=4, value_heads=4), near),
        (Problem(tokens=2048, heads=4, gate="softplus"), softer),
    ):
        store.put_result(environment_id, store.put_problem(problem, "x"), result(variant))
    asked = dataclasses.replace(PROBLEM, heads=4, value_heads=4, tokens=99)
    found = neighbours(store, asked, "v6e")
    assert [v.lag for v in found[:2]] == [1, 0]
    assert found[-1].order == "irr"
    assert neighbours(store, asked, "v6e", 1) == found[:1]


def test_what_came_to_nothing_or_is_of_another_version_is_no_neighbour(store: Store) -> None:
    where = store.put_environment(ENVIRONMENT), store.put_problem(PROBLEM, "small")
    store.put_result(*where, result(FASTER, status="wrong", reason="off"))
    too_large = dataclasses.replace(FASTER, lag=1)
    store.put_result(*where, result(too_large, reason="code_size: 9999 bundles in the loop"))
    store.put_result(*where, result(variant='{"chunk":64}', variant_id="old"))
    assert neighbours(store, PROBLEM, "v6e") == []
