"""The variant of a problem that is worth looking at, and its source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdagen.chips import Chip
from kdagen.errors import KdagenError
from kdagen.generate import generate
from kdagen.problem import Problem, ProblemError
from kdagen.runtime import dispatch
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
    """Generate what a call with these tables runs on: the winner, the nearest row or the default.

    Args:
      problem, chip: what to generate for.
      tables: result databases, looked into in turn (``kdagen.runtime.dispatch``).
      use_default: take the default variant whatever the tables hold.
      parameters: JSON of a variant to take instead. Parameters that it does not name have the
        default variant's values.

    Raises:
      VariantError: ``parameters`` is not the JSON of a variant, or of one that is not legal.
      NoKernelError: no variant serves the problem.
    """
    if parameters is not None:
        variant = _parse_variant(parameters, default_variant(problem, chip))
        violation = check(variant, problem, chip)
        if violation is not None:
            raise VariantError(f"variant: not legal for this shape on {chip.name}: {violation}")
        return Chosen(generate(problem, variant, chip).source, "as given")
    if use_default:
        return Chosen(generate(problem, default_variant(problem, chip), chip).source, "default")
    found = dispatch.find(problem, chip, tuple(tables))
    source = generate(problem, found.variant, chip).source
    return Chosen(source, found.note or f"winner of {found.table}")


def parse_problem(text: str) -> Problem:
    """The problem of a JSON object of its fields; those that are left out have their defaults.

    Raises:
      ProblemError: not such an object.
    """
    return Problem.from_dict(_object("problem", text, ProblemError))


def problem_name(problem: Problem) -> str:
    """A name for a problem that no file names: its sizes and gate, and a hash of all of it."""
    digest = hashlib.sha256(problem.to_json().encode()).hexdigest()[:6]
    return f"b{problem.batch}-t{problem.tokens}-h{problem.heads}-{problem.gate}-{digest}"


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
