"""From a problem, a request and a variant to the source of a backward kernel."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path

from kdagen.chips import Chip
from kdagen.generate import TEMPLATE as FORWARD_TEMPLATE
from kdagen.generate import (
    Generated,
    GenerateError,
    _environment,
    code_hash,
    facts,
)
from kdagen.gradient.step import Step
from kdagen.gradient.variant import BackwardVariant, Request, handover
from kdagen.kernels.tiling import LANES
from kdagen.problem import Problem, canonical_json
from kdagen.variant import MIB

TEMPLATE = "kda_backward.py.j2"
SPECIALISED = ("dtype", "gate", "gate_dtype", "qk_l2norm", "layout", "key_dim")
"""Facts of a problem that its generated code depends on; the others are the call's shapes."""


def variant_id(problem: Problem, request: Request, variant: BackwardVariant, chip: Chip) -> str:
    """sha256, hex, of parameters, specialised facts, request, plan, chip, templates and helpers."""
    asked = {
        "chip": chip.name,
        "code": code_hash(TEMPLATE),
        "parameters": variant.to_dict(),
        "plan": variant.plan(request),
        "problem": _facts(problem, request),
    }
    return hashlib.sha256(canonical_json(asked).encode()).hexdigest()


@functools.cache
def step_hash() -> str:
    """sha256, hex, of the templates, helpers and plans of both kernels of a training step."""
    digest = hashlib.sha256()
    for template in (TEMPLATE, FORWARD_TEMPLATE):
        digest.update(code_hash.__wrapped__(template).encode())
    digest.update((Path(__file__).parent / "plan.py").read_bytes())
    return digest.hexdigest()


def step_id(problem: Problem, step: Step, chip: Chip) -> str:
    """sha256, hex, of a step's parameters, of what its kernels are specialised on, the chip, and
    all that generates them; one that is not legal has an id too."""
    asked = {
        "chip": chip.name,
        "code": step_hash(),
        "parameters": step.to_dict(),
        "problem": facts(problem),
    }
    return hashlib.sha256(canonical_json(asked).encode()).hexdigest()


def generate(problem: Problem, request: Request, variant: BackwardVariant, chip: Chip) -> Generated:
    """Renders the backward kernel of a variant, a module with a function ``backward``.

    Whether the variant is legal ``kdagen.gradient.variant.check`` says.

    Raises:
      GenerateError: the template does not render.
    """
    import jinja2

    identity = variant_id(problem, request, variant, chip)
    handed = handover(variant, problem, request)
    try:
        source = (
            _environment()
            .get_template(TEMPLATE)
            .render(
                template=TEMPLATE,
                code_hash=code_hash(TEMPLATE),
                variant_id=identity,
                chip=chip.name,
                problem=_facts(problem, request),
                parameters=variant.to_dict(),
                again="kdagen.gradient.source.generate of these facts, request and parameters",
                p=variant,
                plan=variant.plan(request),
                handover=dataclasses.asdict(handed),
                wanted=request.wanted,
                output_cotangent=request.output_cotangent,
                state_cotangent=request.state_cotangent,
                raw_gate=problem.gate != "log_decay",
                per_pack=LANES // variant.chunk,
                exact=problem.exact,
                packed=problem.packed,
                segment_states=handed.initial or handed.final,
                layout=problem.layout,
                vmem_limit_bytes=variant.vmem_limit_mib * MIB or None,
                kernel_name=f"kda_backward_{identity[:12]}",
            )
        )
    except jinja2.TemplateError as error:
        raise GenerateError(f"template {TEMPLATE}: {error}") from error
    return Generated(source, identity, f"kda_backward_{identity}")


def _facts(problem: Problem, request: Request) -> dict[str, object]:
    found = facts(problem, SPECIALISED)
    if problem.packed:
        found["initial_state"] = problem.initial_state
    return found | {
        "wanted": request.wanted,
        "output_cotangent": request.output_cotangent,
        "state_cotangent": request.state_cotangent,
    }
