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
from kdagen.gradient.step import Step
from kdagen.measure import offline, operands, steps
from kdagen.measure.rejected import Rejected
from kdagen.problem import Problem
from kdagen.variant import Variant

Function = Callable[..., Any]

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
    asked = Problem.from_dict(problem)
    arguments = list(_drawn(asked).values())
    calls = {}
    for index, fields in enumerate(variants):
        forward = offline.forward_of(asked, Variant.from_dict(fields), get_chip(chip))
        calls[f"candidate_{index}"] = (forward, arguments)
    durations = timed(calls, repeats)
    return [statistics(name, durations, repeats) for name in calls]


def run_step(chip: str, problem: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    """As ``run``, of a training step: the figures of ``steps.run`` with measured times."""
    figures = steps.run(chip, problem, variant)
    (times,) = _measure_steps(chip, problem, [variant], _REPEATS)
    return {**figures, **times}


def run_steps_paired(
    chip: str, problem: dict[str, Any], variants: list[dict[str, Any]]
) -> dict[str, Any]:
    """As ``run_paired``, of training steps."""
    return {"times": _measure_steps(chip, problem, variants, _PAIRED_REPEATS)}


def _measure_steps(
    chip: str, problem: dict[str, Any], variants: Sequence[dict[str, Any]], repeats: int
) -> list[dict[str, float]]:
    import jax

    asked, target = Problem.from_dict(problem), get_chip(chip)
    drawn = _drawn(asked)
    calls: dict[str, tuple[Function, list[Any]]] = {}
    for index, fields in enumerate(variants):
        step = Step.from_dict(fields)
        forward, given = steps.forward_program(asked, step, target)
        arguments = [drawn[name] for name in given]
        gradient, wanted = steps.gradient_program(asked, step, target)
        results = jax.jit(forward)(*arguments)._asdict()
        # any values will do for cotangents: those of the results are of the right size and shape
        known = {**drawn, **{name: results[name] for name in steps.RESIDUALS}}
        known |= {"d_output": results["output"], "d_final": results["final_state"]}
        calls[f"forward_{index}"] = (forward, arguments)
        calls[f"backward_{index}"] = (gradient, [known[name] for name in wanted])
    durations = timed(calls, repeats)
    return [step_statistics(index, durations, repeats) for index in range(len(variants))]


def step_statistics(
    index: int, durations: Mapping[str, Sequence[float]], repeats: int
) -> dict[str, float]:
    """As ``statistics``, of the functions ``forward_`` and ``backward_`` with that index."""
    forward = statistics(f"forward_{index}", durations, repeats)
    backward = statistics(f"backward_{index}", durations, repeats)
    seconds = forward["seconds"] + backward["seconds"]
    off = sum(part["spread"] * part["seconds"] for part in (forward, backward))
    return {
        "seconds": seconds,
        "spread": off / seconds,
        "forward_seconds": forward["seconds"],
        "backward_seconds": backward["seconds"],
    }


def _drawn(problem: Problem) -> dict[str, Any]:
    """Random values of ``operands.projected``."""
    values = operands.in_layout(operands.draw(problem, _SEED), problem)
    return {
        name: None if given is None else values[name].reshape(given[0])
        for name, given in operands.projected(problem).items()
    }


def timed(calls: Mapping[str, tuple[Function, list[Any]]], repeats: int) -> dict[str, list[float]]:
    """Device seconds of ``repeats`` runs of each function of its arguments, taken in turn, by
    ``jit_`` and its name."""
    import jax

    jitted = {}
    for name, (function, arguments) in calls.items():
        function.__name__ = function.__qualname__ = name
        jitted[name] = functools.partial(jax.jit(function), *arguments)
    with tempfile.TemporaryDirectory() as directory:
        for call in jitted.values():
            jax.block_until_ready(call())
        with jax.profiler.trace(directory):
            for _ in range(repeats):
                for call in jitted.values():
                    jax.block_until_ready(call())
        (trace,) = Path(directory).rglob("*.xplane.pb")
        return module_seconds(trace.read_bytes())


def statistics(
    name: str, durations: Mapping[str, Sequence[float]], repeats: int
) -> dict[str, float]:
    """Median and spread of what ``timed`` recorded of one function.

    Raises:
      Rejected: fewer than half of the runs were recorded.
    """
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
