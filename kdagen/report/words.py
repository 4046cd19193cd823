"""Numbers and variants in words, the same wherever they are shown."""

from __future__ import annotations

from kdagen.chips import CALIBRATED_WITH, Chip
from kdagen.gradient.step import CUTS, KEPT, Step
from kdagen.gradient.variant import BackwardVariant
from kdagen.problem import Problem
from kdagen.store.rows import Environment, Result
from kdagen.variant import Variant

MIB = 1 << 20


def seconds(value: float | None) -> str:
    """A time of a kernel."""
    if value is None:
        return "-"
    return f"{value * 1e6:.1f} us" if value < 1e-3 else f"{value * 1e3:.3f} ms"


def duration(value: float) -> str:
    """A time that a person waits."""
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def ratio(result: Result | None, default: Result | None) -> str:
    """How much faster than the default: "1.25x"."""
    if result is None or default is None or not result.seconds or not default.seconds:
        return "-"
    return f"{default.seconds / result.seconds:.2f}x"


def kind(source: str) -> str:
    """What a time of that source is."""
    return "measured" if source == "hardware" else "modelled"


def hbm_share(result: Result) -> str:
    """The HBM floor as a share of the time."""
    if not result.seconds or not result.floor_seconds:
        return "-"
    return f"{result.floor_seconds / result.seconds:.0%}"


def vmem(result: Result) -> str:
    """VMEM used, and allowed, in MiB."""
    if result.vmem_limit_bytes is None:
        return "-"
    used = "?" if result.vmem_used_bytes is None else f"{result.vmem_used_bytes / MIB:.1f}"
    return f"{used} / {result.vmem_limit_bytes / MIB:.0f}"


def error(result: Result) -> str:
    """The largest relative error of any output."""
    if result.errors is None:
        return "not checked"
    value = result.error
    return "NaN" if value is None or value != value else f"{value:.1e}"


def mebibytes(value: int | None) -> str:
    """A size of HBM in MiB."""
    return "-" if value is None else f"{value / MIB:.1f}"


def limit(value: int | None) -> str:
    """What the residuals of a winner were allowed."""
    return "no limit" if value is None else f"limit {value / MIB:.1f} MiB"


def parts(result: Result) -> str:
    """Forward and gradient of a step's time."""
    return f"{seconds(result.forward_seconds)} + {seconds(result.backward_seconds)}"


def variant(v: Variant | Step | str) -> str:
    """The parameters, without names where their form tells; a text stands for itself."""
    if isinstance(v, str):
        return v
    if isinstance(v, Step):
        return f"{v.residuals}; forward: {variant(v.forward)}; backward: {_backward(v.backward)}"
    parts = [
        *_cuts(v),
        f"{v.decay} {v.sub_block}",
        f"inverse {v.inverse_block} {v.inverse_dtype}",
        f"depth {v.weight_depth}",
        f"spans {v.recurrence_span}/{v.inverse_span}/{v.relation_span}",
        f"lag {v.lag}",
        v.order,
    ]
    if v.ends:
        parts.append(f"ends {v.ends}")
    if v.vmem_limit_mib:
        parts.append(f"VMEM {v.vmem_limit_mib} MiB")
    if v.states != "none":
        kept = [name for name in ("inverse", "corrected", "gate") if getattr(v, f"keep_{name}")]
        parts.append(f"keeps {v.states} states" + "".join(f" and {name}" for name in kept))
    return ", ".join(parts)


def _cuts(v: Variant | BackwardVariant) -> list[str]:
    rows = [f"rows {v.rows}"] if v.rows > 1 else []
    return [f"chunk {v.chunk}", f"heads {v.heads}", *rows, f"chunks {v.chunks}"]


def _backward(v: BackwardVariant) -> str:
    """Its cuts, and what it does not share with the forward."""
    shared = {*CUTS, *KEPT}
    rest = [f"{name} {x}" for name, x in v.to_dict().items() if name not in shared and x]
    return ", ".join([*_cuts(v), *rest])


def problem(p: Problem) -> str:
    """The facts of a call that matter for its speed."""
    gate = p.gate if p.lower_bound is None else f"{p.gate} {p.lower_bound:g}"
    heads = f"H {p.heads}" if p.value_heads == p.heads else f"H {p.heads} HV {p.value_heads}"
    return f"B {p.batch} T {p.tokens} {heads} K {p.key_dim} V {p.value_dim} {p.dtype} {gate}" + (
        f", trained, residuals {p.residuals}" if p.trained else ""
    )


def origin(source: str, environment: Environment, chip: Chip) -> str:
    """Where a time comes from, and how wrong it may be."""
    versions = f"libtpu {environment.libtpu}, JAX {environment.jax}"
    if source == "hardware":
        return f'source "hardware": device time measured on {chip.name} ({versions})'
    known = calibration(chip)
    if chip.calibration is not None and environment.libtpu != CALIBRATED_WITH:
        known += (
            f"; calibrated with libtpu {CALIBRATED_WITH}, and how good it is on the schedules of "
            f"libtpu {environment.libtpu} is not known"
        )
    return (
        f'source "compiler": modelled from the compiler\'s schedule, not measured ({versions}); '
        f"{known}"
    )


def calibration(chip: Chip) -> str:
    """How good the chip's time model is known to be."""
    known = chip.calibration
    if known is None:
        return f"the model of {chip.name} is not calibrated and its error is not known"
    return (
        f"known error of the model of {chip.name}: {known.mean_error:.0%} on average, "
        f"{known.max_error:.0%} at most, on kernels it was not fitted to"
    )
