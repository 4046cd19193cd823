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
from kdagen.gradient import source
from kdagen.gradient.step import Step, check_any, keeping, of_first
from kdagen.gradient.variant import Request
from kdagen.problem import Problem, ProblemError
from kdagen.runtime import dispatch
from kdagen.search.spaces import Candidate, space_of
from kdagen.space import default_variant
from kdagen.variant import Variant, VariantError


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
    gradient: bool = False,
) -> Chosen:
    """Generate what a call with these tables runs on: the winner, the nearest row or the default.

    Args:
      problem, chip: what to generate for.
      tables: result databases, looked into in turn (``kdagen.runtime.dispatch``).
      use_default: take the default variant whatever the tables hold.
      parameters: JSON of a variant to take instead. Parameters that it does not name have the
        default variant's values. Of a problem that is trained it is that of a step, or of one
        of its kernels, by "forward" and "backward".
      gradient: of a problem that is trained, the backward kernel in place of the forward.

    Raises:
      VariantError: ``parameters`` is not the JSON of a variant, or of one that is not legal; or
        ``gradient`` of a problem that is not trained, or of parameters of a forward alone.
      NoKernelError: no variant serves the problem.
    """
    if gradient and not problem.trained:
        raise VariantError(
            "gradient: the shape is not trained; its residuals must be 'save', 'rematerialize' or "
            "'tuned'"
        )
    if parameters is not None:
        variant, origin = _given(parameters, problem, chip), "as given"
        if gradient and isinstance(variant, Variant):
            raise VariantError(
                f"variant: got {parameters}, parameters of a forward; those of a gradient's kernel "
                'are given as {"backward": {...}}'
            )
    elif use_default:
        variant, origin = space_of(problem, chip).default, "default"
    else:
        found = dispatch.find(problem, chip, tuple(tables))
        variant, origin = found.variant, found.note or f"winner of {found.table}"
    return Chosen(_source(variant, problem, chip, gradient), origin)


def _given(text: str, problem: Problem, chip: Chip) -> Candidate:
    fields = _object("variant", text, VariantError)
    variant: Candidate
    # a rendered forward that keeps residuals names its own parameters alone
    if problem.trained and fields.keys() <= {"forward", "backward", "residuals"}:
        default = space_of(problem, chip).default.to_dict()
        merged = {
            name: {**default[name], **of} if isinstance(of, dict) else of
            for name, of in fields.items()
        }
        variant = Step.from_dict({**default, **merged})
    else:
        variant = Variant.from_dict({**default_variant(problem, chip).to_dict(), **fields})
    violation = check_any(variant, problem, chip)
    if violation is not None:
        raise VariantError(f"variant: not legal for this shape on {chip.name}: {violation}")
    return variant


def _source(variant: Candidate, problem: Problem, chip: Chip, gradient: bool) -> str:
    if isinstance(variant, Variant):
        return generate(problem, variant, chip).source
    if not gradient:
        return generate(of_first(problem, variant), variant.first, chip).source
    request = Request.everything(problem)
    return source.generate(keeping(problem), request, variant.backward, chip).source


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


def _object(name: str, text: str, kind: type[KdagenError]) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise kind(f"{name}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise kind(f"{name}: got {text}, it must be a JSON object")
    return fields
