"""What the results database holds, as values: environments, results and their errors."""

from __future__ import annotations

from dataclasses import dataclass, field

from kdagen.problem import Problem


@dataclass(frozen=True)
class Environment:
    """What a result depends on beside its problem and its variant.

    Attributes:
      chip: name of the chip.
      jax, jaxlib, libtpu, kdagen: versions.
      generator: hash of the templates and of the code that generated modules import.
      model: hash of the time model and of the chip's parameters in it.
    """

    chip: str
    jax: str
    jaxlib: str
    libtpu: str
    kdagen: str
    generator: str
    model: str


@dataclass(frozen=True)
class TensorError:
    """How far one output is from the float64 reference.

    Attributes:
      error: rms(x - reference) / rms(reference); None where the output is not finite.
      bound: the largest error that passes.
    """

    error: float | None
    bound: float

    @property
    def ok(self) -> bool:
        return self.error is not None and self.error <= self.bound


@dataclass(frozen=True)
class Result:
    """What became of one candidate for one problem in one environment.

    Attributes:
      variant, variant_id: canonical JSON of the parameters, and the hash of the generated code; of
        a problem that is trained those of a ``kdagen.gradient.step.Step``.
      source: "hardware" or "compiler".
      status: "ok", or what went wrong: "illegal", "compile_failed", "vmem", "died", "hung" or
        "wrong".
      reason: what went wrong, in one line; of an "ok" one why it may not win, or empty.
      is_default: whether it is the default variant of its problem.
      seconds: time of one call of the whole problem, or of one step: forward and gradient.
      spread: relative spread of repeated measurements; None for a modelled time.
      modelled_seconds: the model's time, beside the measured one where source is "hardware".
      model_error: mean relative error of the chip's model, None where it is not calibrated.
      loop_bundles: bundles in the loop over chunks.
      spills: loads and stores of spilled registers in that loop.
      dma_in_bytes, dma_out_bytes: of one call of the whole problem.
      floor_bytes, floor_seconds: operands read once and results written once, and the time that
        takes at the chip's HBM rate.
      vmem_used_bytes, vmem_limit_bytes: used by the kernel, and allowed to it.
      errors: by the name of the output, or of the operand of a gradient; None where the numbers
        were not checked.
      forward_seconds, backward_seconds: the parts of a step's time; None where not trained.
      residual_bytes: HBM kept from the forward pass to the gradient, beside the operands; None
        where not trained.
      temporary_bytes: HBM that the forward's program or the gradient's takes beside operands,
        results and residuals, the larger, by the compiler's memory analysis; None where it was not
        asked, as of candidates that are not checked.
    """

    variant: str
    variant_id: str
    source: str
    status: str
    reason: str = ""
    is_default: bool = False
    seconds: float | None = None
    spread: float | None = None
    modelled_seconds: float | None = None
    model_error: float | None = None
    loop_bundles: int | None = None
    spills: int | None = None
    dma_in_bytes: int | None = None
    dma_out_bytes: int | None = None
    floor_bytes: int | None = None
    floor_seconds: float | None = None
    vmem_used_bytes: int | None = None
    vmem_limit_bytes: int | None = None
    errors: dict[str, TensorError] | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    residual_bytes: int | None = None
    temporary_bytes: int | None = None

    @property
    def checked(self) -> bool:
        return self.errors is not None

    @property
    def error(self) -> float | None:
        """The largest error of any output; None where not checked, NaN where one is not finite."""
        if not self.errors:
            return None
        values = [e.error for e in self.errors.values()]
        return float("nan") if None in values else max(v for v in values if v is not None)


@dataclass(frozen=True)
class Entry:
    """A result with what it belongs to, as listings show it.

    ``residual_limit_bytes`` is the most that a winner's residuals were allowed, None for no limit.
    """

    name: str
    problem: Problem
    environment: Environment
    result: Result
    is_winner: bool
    environment_id: int = field(compare=False, default=0)
    residual_limit_bytes: int | None = None
