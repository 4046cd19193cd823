"""Seconds from a schedule: the offline model's prediction, never a measurement.

The core issues its bundles at an effective rate and stalls where the compiler says that it does;
DMAs of both directions share one queue to HBM with a bandwidth and a latency; a wait lasts until
its data have come. Time is what the walk of the scalar code takes under those rules, so that the
overlap of transfer and work and the two ends of a pipeline come out of the kernel's own code.

Stalls are the compiler's own count: the empty bundles of the listing before it drops them. The
other way is to fit result latencies to published times (matrix results 210 cycles after issue,
cross-lane ones 120). On dense kernels both are right. On matrix work that is not, the count is:
a softmax loss measured at 6505 us on v5p has 2443 us of bundles and 6472 us of counted cycles. It
also needs no constant of the chip, and left-out families err by 7.5% on v7x where the fitted
latencies were reported to err by 13% (``benchmarks/calibrate.py --fit``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kdagen.chips import Chip, ModelParameters
from kdagen.compiler.aot import libtpu_version
from kdagen.compiler.schedule import Scalars, Schedule, ScheduleError
from kdagen.compiler.walk import DmaTiming, Totals, Walk

# Steps at either end of a sweep that may differ from those between: a kernel that carries work
# across steps fills and drains its pipeline there, and the first DMAs have nothing to hide behind.
_EDGE_STEPS = 3
MIN_STEPS = 2 * _EDGE_STEPS + 2


@dataclass(frozen=True)
class Prediction:
    """A modelled time.

    Attributes:
      seconds: of one device (one core, or the slower core of a megacore).
      source: always "compiler": this is not a measurement.
      chip: its name.
      libtpu_version: of the compiler that made the schedule.
      known_error: mean relative error of the model on this chip, as a fraction, on kernels it was
        not fitted to; None where the chip is not calibrated and nominal rates were used.
      bound: "hbm" where moving the bytes alone takes longer than issuing the bundles alone, else
        "schedule".
      hbm_seconds, schedule_seconds: those two.
      hbm_bytes: of the device, both directions.
      cycles: issued, stalls included, of the slower core.
      bundles: executed, of the device.
      steps: length of the last grid axis the time is for, None for a kernel without a grid.
    """

    seconds: float
    source: Literal["compiler"]
    chip: str
    libtpu_version: str
    known_error: float | None
    bound: Literal["hbm", "schedule"]
    hbm_seconds: float
    schedule_seconds: float
    hbm_bytes: int
    cycles: float
    bundles: float
    steps: int | None

    @property
    def hbm_share(self) -> float:
        """Share of the time that HBM is busy."""
        return self.hbm_seconds / self.seconds


def predict(
    schedule: Schedule,
    *,
    steps: int | None = None,
    scalars: Scalars | None = None,
    version: str | None = None,
    parameters: ModelParameters | None = None,
) -> Prediction:
    """The modelled time of a kernel.

    Args:
      schedule: of the kernel.
      steps: length of the grid's last axis to predict for, where the kernel was compiled with
        another; None is as compiled. The other axes are as compiled: compile the real ones, they
        cost nothing. The compiled length must be at least ``MIN_STEPS``: the walk's steady state is
        extended by the steps that are missing, in each sweep of the last axis. What the kernel does
        at a step must not depend on scalar-prefetch data then.
      scalars: by operand index, the values of scalar-prefetch operands, flattened.
      version: of libtpu, the installed one where None.
      parameters: rates to use in place of the chip's, as a fit does; no error is known of them.

    Raises:
      WalkError: the kernel's control depends on data not given.
      ScheduleError: ``steps`` cannot be extended to.
    """
    chip = schedule.chip
    rates = parameters or chip.parameters
    calibration = chip.calibration if parameters is None else None
    timing = DmaTiming(
        bytes_per_cycle=rates.hbm_bytes_per_second / rates.effective_hz,
        latency_cycles=rates.dma_latency_seconds * rates.effective_hz,
    )
    totals = []
    for core in range(schedule.cores):
        walked = schedule.walk(scalars, timing, core)
        total = walked.totals
        if steps is not None and steps != schedule.steps:
            total = extend(schedule, walked, steps)
        totals.append(total)
    slowest = max(totals, key=lambda one: one.cycles)
    hbm_bytes = [one.bytes_in + one.bytes_out for one in totals]
    hbm_seconds = max(hbm_bytes) / rates.hbm_bytes_per_second
    schedule_seconds = slowest.issue_cycles / rates.effective_hz
    return Prediction(
        seconds=slowest.cycles / rates.effective_hz,
        source="compiler",
        chip=chip.name,
        libtpu_version=version or libtpu_version() or "unknown",
        known_error=calibration.mean_error if calibration else None,
        bound="hbm" if hbm_seconds > schedule_seconds else "schedule",
        hbm_seconds=hbm_seconds,
        schedule_seconds=schedule_seconds,
        hbm_bytes=round(sum(hbm_bytes)),
        cycles=slowest.issue_cycles,
        bundles=sum(one.bundles for one in totals),
        steps=steps if steps is not None else schedule.steps,
    )


def extend(schedule: Schedule, walked: Walk, steps: int) -> Totals:
    """Totals for a last grid axis of ``steps`` from a walk of a shorter (or longer) one.

    A pipelined grid is one loop, over all sweeps of the last axis, plus two rounds: step j's work
    is done in round j + 1. Each sweep is lengthened by the mean of its own steady rounds.

    Raises:
      ScheduleError: the kernel has no single grid, or too few steps to show a steady state, or XLA
        moved an operand to VMEM beforehand, as it would not at full length.
    """
    moved = [operand for operand in schedule.listing.operands if operand.space == "vmem"]
    if moved:
        raise ScheduleError(
            f"{schedule.name}: operand {moved[0].index} ({moved[0].shape}) lies in VMEM; compile "
            "with keep_in_hbm=True to extend the time to another length"
        )
    compiled = schedule.steps
    if compiled is None:
        raise ScheduleError(
            f"{schedule.name}: steps given for a kernel of grid {schedule.listing.grids}"
        )
    if min(compiled, steps) < MIN_STEPS:
        raise ScheduleError(
            f"steps: got {steps} from a kernel compiled with {compiled}, expected both to be "
            f"{MIN_STEPS} or more"
        )
    loop = schedule.main_loop(walked)
    if loop is None:
        return walked.totals
    rounds = walked.rounds[loop.head]
    sweeps, rest = divmod(len(rounds) - 1, compiled)
    if rest or not sweeps:
        raise ScheduleError(
            f"{schedule.name}: {len(rounds) + 1} rounds do not make sweeps of {compiled} steps"
        )
    extra = Totals()
    # An even number of rounds: double-buffered transfers alternate.
    steady = (compiled - 2 * _EDGE_STEPS) // 2 * 2
    for sweep in range(sweeps):
        first = sweep * compiled + _EDGE_STEPS
        extra += (rounds[first + steady] - rounds[first]) * ((steps - compiled) / steady)
    return walked.totals + extra


def hbm_floor_seconds(chip: Chip, hbm_bytes: float) -> float:
    """Least time to move that many bytes on one core, by the model's bandwidth."""
    return hbm_bytes / chip.parameters.hbm_bytes_per_second
