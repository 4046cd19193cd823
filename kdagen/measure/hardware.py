"""Time on an attached TPU, by the device's own clock.

What is timed is the device's execution of the compiled module, as the profiler recorded it: at the
size of these kernels the time from dispatch to result is mostly the host's.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from kdagen.chips import get_chip
from kdagen.compiler.aot import worker_environment
from kdagen.measure import offline, operands
from kdagen.measure.rejected import Rejected
from kdagen.problem import Problem
from kdagen.variant import Variant

_PCI_VENDOR = "0x1ae0"
_PROBE_SECONDS = 300.0
_REPEATS = 20
_PAIRED_REPEATS = 50
_SEED = 7


def attached_device_kind() -> str | None:
    """``device_kind`` of this machine's first TPU, or None where there is none to be used.

    Asked in a child process: the process that asks JAX keeps the device.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return None
    # Where no such card is plugged in, libtpu would search for one for minutes.
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    if not any(path.read_text().strip() == _PCI_VENDOR for path in vendors):
        return None
    ask = "import jax, json; d = jax.devices()[0]; print(json.dumps([d.platform, d.device_kind]))"
    try:
        child = subprocess.run(
            [sys.executable, "-c", ask],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
        platform, kind = json.loads(child.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return None
    return kind if platform == "tpu" else None


def device_environment(dump_dir: Path) -> dict[str, str]:
    """The environment of the process that has the device and compiles for it."""
    environment = worker_environment(dump_dir)
    # On a TPU machine the metadata is there, and the default backend is the device.
    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES"):
        environment.pop(name, None)
        if name in os.environ:
            environment[name] = os.environ[name]
    return environment


def run(chip: str, problem: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    """The task of a worker that has the device: the figures of ``offline.run``, with the measured
    ``seconds`` and their ``spread``."""
    figures = offline.run(chip, problem, variant)
    (times,) = _measure(chip, problem, [variant], _REPEATS)
    return {**figures, **times}


def run_paired(
    chip: str, problem: dict[str, Any], variants: list[dict[str, Any]]
) -> dict[str, Any]:
    """The task for finalists: ``{"times": [{"seconds", "spread"}, ...]}`` in the order of
    ``variants``, from runs in turn, so that a drift of the device meets them all alike."""
    return {"times": _measure(chip, problem, variants, _PAIRED_REPEATS)}


def _measure(
    chip: str, problem: dict[str, Any], variants: Sequence[dict[str, Any]], repeats: int
) -> list[dict[str, float]]:
    import jax

    asked = Problem.from_dict(problem)
    values = operands.in_layout(operands.draw(asked, _SEED), asked)
    arguments = [
        None if given is None else values[name].reshape(given[0])
        for name, given in operands.projected(asked).items()
    ]
    calls: dict[str, Callable[[], Any]] = {}
    for index, fields in enumerate(variants):
        forward = offline.forward_of(asked, Variant.from_dict(fields), get_chip(chip))
        name = f"candidate_{index}"
        forward.__name__ = forward.__qualname__ = name
        calls[name] = functools.partial(jax.jit(forward), *arguments)
    with tempfile.TemporaryDirectory() as directory:
        for call in calls.values():
            jax.block_until_ready(call())
        with jax.profiler.trace(directory):
            for _ in range(repeats):
                for call in calls.values():
                    jax.block_until_ready(call())
        (trace,) = Path(directory).rglob("*.xplane.pb")
        durations = module_seconds(trace.read_bytes())
    return [_statistics(name, durations, repeats) for name in calls]


def _statistics(
    name: str, durations: Mapping[str, Sequence[float]], repeats: int
) -> dict[str, float]:
    times = durations.get(f"jit_{name}", ())
    if len(times) < repeats // 2:
        raise Rejected("died", f"the profiler recorded {len(times)} of {repeats} runs")
    low, _, high = quantiles(times, n=4)
    middle = median(times)
    # Half the interquartile range: half of the runs lie within it of the median.
    return {"seconds": middle, "spread": (high - low) / 2 / middle}


def module_seconds(trace: bytes) -> dict[str, list[float]]:
    """Device seconds of every execution of each XLA module in a serialized XSpace, by the module's
    name, on the first TPU."""
    from jax.profiler import ProfileData

    durations: dict[str, list[float]] = {}
    for plane in ProfileData.from_serialized_xspace(trace).planes:
        if plane.name != "/device:TPU:0":
            continue
        for line in plane.lines:
            if line.name != "XLA Modules":
                continue
            for event in line.events:
                # The profiler writes "jit_f(fingerprint)".
                name = event.name.split("(")[0]
                durations.setdefault(name, []).append(event.duration_ns * 1e-9)
    return durations
