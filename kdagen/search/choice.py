"""The variant of a problem that is worth looking at, and its source."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdagen.chips import Chip
from kdagen.errors import KdagenError
from kdagen.generate import generate
from kdagen.problem import Problem, ProblemError
from kdagen.store import lookup
from kdagen.variant import Variant, VariantError, check, default_variant


@dataclass(frozen=True)
class Chosen:
    """A generated module and how its variant was come by, in words."""

    source: str
    origin: str


def choose(
    problem: Problem,
    chip: Chip,
    tables: Iterable[Path],
    *,
    use_default: bool = False,
    parameters: str | None = None,
) -> Chosen:
    """Generate the winner that ``tables`` hold for a problem, or the default variant if none.

    Args:
      problem, chip: what to generate for.
      tables: result databases, looked into in turn.
      use_default: take the default variant whatever the tables hold.
      parameters: JSON of a variant to take instead. Parameters that it does not name have the
        default variant's values.

    Raises:
      VariantError: ``parameters`` is not the JSON of a variant, or of one that is not legal; or no
        variant serves the problem.
    """
    if parameters is not None:
        variant = _parse_variant(parameters, default_variant(problem, chip))
        violation = check(variant, problem, chip)
        if violation is not None:
            raise VariantError(f"variant: not legal for this shape on {chip.name}: {violation}")
        return Chosen(generate(problem, variant, chip).source, "as given")
    found = None if use_default else lookup.find_winner(problem, chip, tables)
    if found is not None:
        variant, path = found
        return Chosen(generate(problem, variant, chip).source, f"winner of {path}")
    default = default_variant(problem, chip)
    origin = "default" if use_default else f"default, since no table has a winner on {chip.name}"
    return Chosen(generate(problem, default, chip).source, origin)


def parse_problem(text: str) -> Problem:
    """The problem of a JSON object of its fields; those that are left out have their defaults.

    Raises:
      ProblemError: not such an object.
    """
    return Problem.from_dict(_object("problem", text, ProblemError))


def _parse_variant(text: str, default: Variant) -> Variant:
    return Variant.from_dict({**default.to_dict(), **_object("variant", text, VariantError)})


def _object(name: str, text: str, kind: type[KdagenError]) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise kind(f"{name}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise kind(f"{name}: got {text}, it must be a JSON object")
    return fields
