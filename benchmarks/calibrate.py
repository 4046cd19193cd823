"""Predicted against measured: how good the offline model is, on kernels measured on real TPUs.

    python benchmarks/calibrate.py

compiles tokamax's three kernels of the KDA backward for v6e and v7x with the compiler of an
environment of its own, reads their schedules and prints the modelled times against the times that
tokamax's authors published for these chips. No TPU is needed, nothing is measured here.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import peer

# Published: bf16, 16 heads, batch 1, K = V = 128, 8192 tokens in five segments, padded to chunks.
HEADS, CHUNK, WIDTH = 16, 64, 128
SEGMENTS = (1800, 1500, 2000, 1200, 800)
TOKENS = 8192
MEASURED_US = {
    "recompute w, u, v_new": {"v6e": 285.0, "v7x": 181.7},
    "dAv": {"v6e": 148.3, "v7x": 100.2},
    "dhu, WY, intra, cumsum": {"v6e": 900.1, "v7x": 784.3},
}
PUBLISHED_MB = {
    "recompute w, u, v_new": 418.9,
    "dAv": 209.2,
    "dhu, WY, intra, cumsum": 951.8,
}


@dataclass(frozen=True)
class Point:
    """One kernel on one chip; times in microseconds."""

    chip: str
    kernel: str
    predicted: float
    measured: float
    hbm_mb: float
    bound: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def chunk_segments() -> list[int]:
    """The segment id of each chunk: segments padded to whole chunks, 0 behind the last.

    The buffer has room for every segment to waste a chunk.
    """
    chunks = TOKENS // CHUNK + len(SEGMENTS)
    ids = [
        number + 1
        for number, length in enumerate(SEGMENTS)
        for _ in range(math.ceil(length / CHUNK))
    ]
    return ids + [0] * (chunks - len(ids))


def kernels() -> dict:
    """Functions that call one kernel each, and their operands' shapes and dtypes."""
    import jax.numpy as jnp
    from tokamax._src.ops.kda import pallas_mosaic_tpu_bwd_kernel as backward

    chunks = len(chunk_segments())
    tokens = chunks * CHUNK
    bf16, f32 = jnp.bfloat16, jnp.float32
    wide = ((HEADS, 1, tokens, WIDTH), bf16)
    gate = ((HEADS, 1, tokens, WIDTH), f32)
    square = ((HEADS, 1, tokens, CHUNK), bf16)
    square_f32 = ((HEADS, 1, tokens, CHUNK), f32)
    beta = ((HEADS, 1, tokens), bf16)
    states = ((HEADS, 1, chunks, WIDTH, WIDTH), bf16)
    slots = ((1, len(SEGMENTS), HEADS, WIDTH, WIDTH), f32)
    ids = ((1, tokens), jnp.int32)
    scale = WIDTH**-0.5

    def recompute(q, k, v, b, a, g, h):
        return backward.fused_recompute_w_u_vnew_from_h_pallas(q, k, v, b, a, g, h)

    def value_gradient(q, k, v, do, a):
        return backward.chunk_kda_bwd_dAv_kernel(q, k, v, do, a, scale)

    def fused(q, k, v, v_new, qg, kg, w, g, b, a, h, do, dv, d_a, dht, segment_ids):
        return backward._fused_dhu_wy_intra_cumsum_pallas_jit(
            *(q, k, v, v_new, qg, kg, w, g, b, a, h, do, dv, d_a, dht, scale),
            segment_ids=segment_ids,
            max_num_segments=len(SEGMENTS),
        )

    return {
        "recompute w, u, v_new": (recompute, [wide, wide, wide, beta, square, gate, states]),
        "dAv": (value_gradient, [wide, wide, wide, wide, square]),
        "dhu, WY, intra, cumsum": (
            fused,
            [*[wide] * 7, gate, beta, square, states, wide, wide, square_f32, slots, ids],
        ),
    }


def points() -> list[Point]:
    """Compile every kernel for every chip it was measured on, and predict its time."""
    from kdagen.chips import get_chip
    from kdagen.compiler.aot import compile_for
    from kdagen.compiler.model import predict
    from kdagen.compiler.schedule import read_schedule

    found = []
    for name, (function, args) in kernels().items():
        for chip_name, measured in MEASURED_US[name].items():
            chip = get_chip(chip_name)
            compiled = compile_for(chip, function, args)
            assert compiled.dump_dir is not None
            schedule = read_schedule(compiled.dump_dir, chip)
            prediction = predict(schedule, scalars={0: chunk_segments()})
            found.append(
                Point(
                    chip=chip_name,
                    kernel=name,
                    predicted=prediction.seconds * 1e6,
                    measured=measured,
                    hbm_mb=prediction.hbm_bytes / 1e6,
                    bound=prediction.bound,
                )
            )
    return found


def report(found: list[Point]) -> str:
    """The table, and the errors of each chip."""
    from kdagen.chips import get_chip

    lines = [
        f"{'chip':5} {'kernel':24} {'predicted us':>12} {'measured us':>12} {'error':>7} "
        f"{'HBM MB':>8} {'published':>10}  bound"
    ]
    for point in sorted(found, key=lambda one: one.chip):
        lines.append(
            f"{point.chip:5} {point.kernel:24} {point.predicted:12.1f} {point.measured:12.1f} "
            f"{point.error:+7.1%} {point.hbm_mb:8.1f} {PUBLISHED_MB[point.kernel]:10.1f}  "
            f"{point.bound}"
        )
    lines.append("")
    for chip_name in sorted({point.chip for point in found}):
        errors = [point.error for point in found if point.chip == chip_name]
        logs = [math.log1p(error) for error in errors]
        rms = math.sqrt(sum(log * log for log in logs) / len(logs))
        mean = sum(map(abs, errors)) / len(errors)
        calibration = get_chip(chip_name).calibration
        assert calibration is not None
        rates = calibration.parameters
        lines.append(
            f"{chip_name}: mean error {mean:.1%}, largest {max(map(abs, errors)):.1%}, "
            f"rms log error {rms:.1%}, {len(errors)} kernels; with {rates.effective_hz / 1e9:.2f} "
            f"GHz, {rates.hbm_bytes_per_second / 1e12:.2f} TB/s, "
            f"{rates.dma_latency_seconds * 1e6:.1f} us"
        )
    return "\n".join(lines)


def main() -> int:
    options = peer.parser(__doc__ or "").parse_args()
    if options.dump is None:
        return peer.run(str(Path(__file__).resolve()), options, sys.argv[1:])
    from importlib.metadata import version

    import jax

    from kdagen.compiler.aot import libtpu_version

    found = points()
    print(f"tokamax {version('tokamax')}, JAX {jax.__version__}, libtpu {libtpu_version()}")
    print(report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
