"""Predicted against measured: how good the offline model is, on times measured on real TPUs.

    python benchmarks/calibrate.py [--chips v6e,v7x,v5p] [--fit]

compiles what was measured (tokamax's KDA kernels and entries of its tuned tables) with the compiler
of an environment of its own, reads the schedules and prints the modelled times beside the published
ones. No TPU is needed, nothing is measured here. --fit also searches the effective rate and the HBM
bandwidth that fit best, with the error on each family of operations when it is left out.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peer
from published import Measured, published

# Fractions of the nominal rates that --fit tries.
RATES = (0.76, 0.84, 0.92, 1.0)
BANDWIDTHS = (0.55, 0.68, 0.81, 0.94)


@dataclass(frozen=True)
class Point:
    """A published time and the schedules of what was measured."""

    measured: Measured
    schedules: tuple[Any, ...]

    def predict(self, parameters: Any = None) -> tuple[float, str]:
        """Modelled microseconds with the chip's parameters or others, and what bounds the most."""
        from kdagen.compiler.model import predict

        total, longest, bound = 0.0, 0.0, ""
        for schedule in self.schedules:
            one = predict(schedule, scalars=self.measured.scalars, parameters=parameters)
            total += one.seconds
            if one.seconds > longest:
                longest, bound = one.seconds, one.bound
        return total * 1e6, bound


def compiled(chip_name: str) -> list[Point]:
    """Every published time of the chip with its schedules."""
    import tokamax

    from kdagen.chips import get_chip
    from kdagen.compiler.aot import compile_for
    from kdagen.compiler.schedule import read_schedules

    chip = get_chip(chip_name)
    points = []
    for measured in published(chip_name):
        with tokamax.config.cross_compile(True):
            program = compile_for(chip, measured.function, measured.args)
        assert program.dump_dir is not None
        schedules = read_schedules(program.dump_dir, chip)
        if measured.kernel_only:
            schedules = [schedule for schedule in schedules if schedule.is_kernel]
        points.append(Point(measured, tuple(schedules)))
    return points


def errors_of(errors: list[float]) -> str:
    logs = [math.log1p(error) for error in errors]
    rms = math.sqrt(sum(log * log for log in logs) / len(logs))
    mean = sum(map(abs, errors)) / len(errors)
    largest = max(errors, key=abs)
    return f"mean error {mean:.1%}, largest {largest:+.1%}, rms log error {rms:.1%}"


def report(chip_name: str, points: list[Point]) -> list[str]:
    """The table of one chip and its errors."""
    from kdagen.chips import get_chip

    chip = get_chip(chip_name)
    rates = chip.parameters
    kind = "calibrated" if chip.is_calibrated else "nominal, not calibrated"
    lines = [
        f"{chip.name}: {rates.effective_hz / 1e9:.2f} GHz, "
        f"{rates.hbm_bytes_per_second / 1e12:.2f} TB/s, "
        f"{rates.dma_latency_seconds * 1e6:.1f} us ({kind})",
        f"  {'predicted us':>12} {'measured us':>12} {'error':>7}  bound     what",
    ]
    errors = []
    for point in points:
        predicted, bound = point.predict()
        measured = point.measured
        errors.append(predicted / measured.microseconds - 1)
        lines.append(
            f"  {predicted:12.1f} {measured.microseconds:12.1f} {errors[-1]:+7.1%}  {bound:8}  "
            f"{measured.family}: {measured.name}"
        )
    lines.append(f"  {errors_of(errors)}, {len(errors)} times")
    kernels = [e for e, p in zip(errors, points, strict=True) if p.measured.kernel_only]
    if kernels:
        lines.append(f"  of the KDA kernels alone: {errors_of(kernels)}, {len(kernels)} times")
    return lines


def fit(chip_name: str, points: list[Point]) -> list[str]:
    """The rate and bandwidth of least squared log error, and the errors out of sample.

    Predictions are made on a grid of both and interpolated between.
    """
    import numpy as np

    from kdagen.chips import ModelParameters, get_chip

    nominal = get_chip(chip_name).nominal
    latency = get_chip(chip_name).parameters.dma_latency_seconds
    grid = np.zeros((len(points), len(RATES), len(BANDWIDTHS)))
    for i, rate in enumerate(RATES):
        for j, bandwidth in enumerate(BANDWIDTHS):
            parameters = ModelParameters(
                nominal.effective_hz * rate, nominal.hbm_bytes_per_second * bandwidth, latency
            )
            for row, point in enumerate(points):
                predicted, _ = point.predict(parameters)
                grid[row, i, j] = math.log(predicted / point.measured.microseconds)
    fine_rates = np.linspace(RATES[0], RATES[-1], 61)
    fine_bandwidths = np.linspace(BANDWIDTHS[0], BANDWIDTHS[-1], 81)

    def refine(row):
        along = np.stack([np.interp(fine_bandwidths, BANDWIDTHS, line) for line in row])
        return np.stack([np.interp(fine_rates, RATES, line) for line in along.T])

    fine = np.stack([refine(row) for row in grid])  # [points, bandwidth, rate], log error

    def best(rows):
        loss = np.square(fine[rows]).sum(axis=0)
        return np.unravel_index(np.argmin(loss), loss.shape)

    everything = list(range(len(points)))
    chosen = best(everything)
    families = [point.measured.family for point in points]
    out_of_sample = [0.0] * len(points)
    lines = []
    for family in dict.fromkeys(families):
        rest = [row for row in everything if families[row] != family]
        where = best(rest)
        for row in everything:
            if families[row] == family:
                out_of_sample[row] = math.expm1(fine[(row, *where)])
        left = [out_of_sample[row] for row in everything if families[row] == family]
        lines.append(f"    without {family}: {', '.join(f'{error:+.1%}' for error in left)}")
    rate, bandwidth = fine_rates[chosen[1]], fine_bandwidths[chosen[0]]
    fitted = [math.expm1(fine[(row, *chosen)]) for row in everything]
    return [
        f"  fit: {nominal.effective_hz * rate / 1e9:.3f} GHz ({rate:.3f} of nominal), "
        f"{nominal.hbm_bytes_per_second * bandwidth / 1e12:.3f} TB/s ({bandwidth:.3f} of nominal)",
        f"    fitted: {errors_of(fitted)}",
        f"    each family left out in turn: {errors_of(out_of_sample)}",
        *lines,
    ]


def main() -> int:
    parser = peer.parser(__doc__ or "")
    parser.add_argument("--chips", default="v6e,v7x,v5p", help="v6e,v7x,v5p if not given")
    parser.add_argument("--fit", action="store_true", help="also fit the parameters (minutes)")
    options = parser.parse_args()
    if options.dump is None:
        return peer.run(str(Path(__file__).resolve()), options, sys.argv[1:])
    from importlib.metadata import version

    import jax

    from kdagen.compiler.aot import libtpu_version

    peer.quiet()
    print(f"tokamax {version('tokamax')}, JAX {jax.__version__}, libtpu {libtpu_version()}")
    for chip_name in options.chips.split(","):
        points = compiled(chip_name)
        print("\n".join(report(chip_name, points)), flush=True)
        if options.fit:
            print("\n".join(fit(chip_name, points)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
