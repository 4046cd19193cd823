"""Times measured on real TPUs and published, and how to compile what was measured.

Two sources: the times that tokamax's authors give for three kernels of their KDA backward, and the
tables of tuned configurations, with times, that tokamax's wheel ships for other operations. From a
table come the first two entries of an operation that take at least ``SHORTEST_US``; what is
shorter has a share of launch overhead that the model leaves out.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

SHORTEST_US = 100.0
ENTRIES = 2
TABLES = {"v5p": "tpu_v5", "v6e": "tpu_v6_lite", "v7x": "tpu7x"}

# bf16, 16 heads, batch 1, K = V = 128, 8192 tokens in five segments, padded to chunks.
HEADS, CHUNK, WIDTH, TOKENS = 16, 64, 128, 8192
SEGMENTS = (1800, 1500, 2000, 1200, 800)
KDA_US = {
    "recompute w, u, v_new": {"v6e": 285.0, "v7x": 181.7},
    "dAv": {"v6e": 148.3, "v7x": 100.2},
    "dhu, WY, intra, cumsum": {"v6e": 900.1, "v7x": 784.3},
}


@dataclass(frozen=True)
class Measured:
    """One published time.

    Attributes:
      family: what is left out together when the error of a fit is estimated.
      kernel_only: the time is the Pallas kernel's; else the whole program's.
      scalars: of scalar-prefetch operands, as for ``kdagen.compiler.model.predict``.
    """

    chip: str
    family: str
    name: str
    microseconds: float
    function: Callable[..., Any]
    args: list[Any]
    kernel_only: bool = False
    scalars: dict[int, list[int]] = field(default_factory=dict)


def published(chip: str) -> Iterator[Measured]:
    """Every published time of the chip that is used."""
    for name, (function, args) in _kda_kernels().items():
        if chip in KDA_US[name]:
            yield Measured(
                chip=chip,
                family="KDA backward",
                name=name,
                microseconds=KDA_US[name][chip],
                function=function,
                args=args,
                kernel_only=True,
                scalars={0: chunk_segments()},
            )
    for family, table, wanted, call, operands in _table_operations():
        found = 0
        for asked, microseconds in _entries(chip, table):
            if found == ENTRIES or microseconds < SHORTEST_US or not wanted(asked):
                continue
            found += 1
            yield Measured(
                chip=chip,
                family=family,
                name=" ".join(asked[operand] for operand in operands),
                microseconds=microseconds,
                function=call(asked),
                args=[_array(asked[operand]) for operand in operands],
            )


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


def _kda_kernels() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Functions that call one kernel each, and their operands."""
    from tokamax._src.ops.kda import pallas_mosaic_tpu_bwd_kernel as backward

    chunks = len(chunk_segments())
    tokens = chunks * CHUNK
    wide = ((HEADS, 1, tokens, WIDTH), "bfloat16")
    gate = ((HEADS, 1, tokens, WIDTH), "float32")
    square = ((HEADS, 1, tokens, CHUNK), "bfloat16")
    square_f32 = ((HEADS, 1, tokens, CHUNK), "float32")
    beta = ((HEADS, 1, tokens), "bfloat16")
    states = ((HEADS, 1, chunks, WIDTH, WIDTH), "bfloat16")
    slots = ((1, len(SEGMENTS), HEADS, WIDTH, WIDTH), "float32")
    ids = ((1, tokens), "int32")
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


def _table_operations() -> Iterator[tuple[str, str, Callable, Callable, tuple[str, ...]]]:
    """Family, table, which of its entries, the call for one, and its array operands."""
    import tokamax

    def loss(_):
        return lambda x, labels, w: tokamax.linear_softmax_cross_entropy_loss(
            x, labels, w, reduction="mean", implementation="mosaic_tpu"
        )

    def attention(_):
        return lambda q, k, v: tokamax.dot_product_attention(q, k, v, implementation="mosaic_tpu")

    def norm(asked):
        return lambda x, scale, offset: tokamax.layer_norm(
            x, scale, offset, axis=asked["axis"], epsilon=asked["epsilon"], implementation="xla"
        )

    yield (
        "softmax loss",
        "pallas_mosaic_tpu_linear_softmax_cross_entropy_loss",
        lambda asked: asked["reduction"] == "mean",
        loss,
        ("x", "labels", "w"),
    )
    yield (
        "attention",
        "pallas_mosaic_tpu_flash_attention",
        lambda asked: not any(asked["mask"].values()),
        attention,
        ("q", "k", "v"),
    )
    yield ("layer norm", "normalization", lambda _: True, norm, ("x", "scale", "offset"))


def _entries(chip: str, table: str) -> Iterator[tuple[dict[str, Any], float]]:
    """Operands and microseconds of the table's entries without residuals."""
    if chip not in TABLES:
        return
    path = resources.files("tokamax") / "data" / "autotuning" / TABLES[chip] / f"{table}.json"
    for key, configurations in json.loads(path.read_text()).items():
        asked = json.loads(key)
        if configurations and not asked.get("return_residuals"):
            best = min(
                statistics.median(one["evaluation_times_ms"]) for one in configurations.values()
            )
            yield asked, best * 1e3


def _array(text: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of "bf16[4,128]"."""
    found = re.fullmatch(r"([a-z]+)(\d+)\[([\d,]*)\]", text)
    assert found, text
    kind, bits, dims = found.groups()
    name = {"bf": "bfloat", "f": "float", "i": "int"}[kind]
    return tuple(int(dim) for dim in dims.split(",") if dim), f"{name}{bits}"
