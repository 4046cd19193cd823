"""The array arguments of a generated ``backward``: their shapes and dtypes."""

from __future__ import annotations

from kdagen.gradient.variant import BackwardVariant, Request
from kdagen.kernels.tiling import LANES
from kdagen.problem import Problem

Shaped = tuple[tuple[int, ...], str]


def inputs(
    problem: Problem, variant: BackwardVariant, request: Request, *, states: str = "bfloat16"
) -> dict[str, Shaped | None]:
    """Shape and dtype name of every array argument in its order, None if it is absent.

    query, key [H, B, T, K]; value [HV, B, T, V]; gate [HV, B, T, K]; beta [HV, B, T]; a_log [HV]
    and delta_time_bias [HV, K] of a raw gate; spans [B, 2, T] and boundaries [B, N + 1] of
    ``kdagen.kernels.packing``, and initial_state [B, N, HV, K, V], if there are segments; the
    residuals of ``kdagen.kernels.forward.Results``, states being of dtype ``states``; d_output as
    value; d_final [B, N, HV, K, V]. In layout "BTHD" the first five and d_output are [B, T, H, D].
    """
    heads, rows = problem.value_heads, problem.batch
    blocks = -(-problem.tokens // variant.block_tokens)
    key_dim, value_dim = (-(-d // LANES) * LANES for d in (problem.key_dim, problem.value_dim))

    def tensor(count: int, *width: int) -> tuple[int, ...]:
        if problem.layout == "HBTD":
            return (count, rows, problem.tokens, *width)
        return (rows, problem.tokens, count, *width)

    key: Shaped = (tensor(problem.heads, problem.key_dim), problem.dtype)
    value: Shaped = (tensor(heads, problem.value_dim), problem.dtype)
    raw, packed = problem.gate != "log_decay", problem.packed
    groups = (rows // variant.rows, heads // variant.heads, blocks)
    packs = variant.streams * variant.block_tokens // LANES
    state = (rows, problem.slots, heads, problem.key_dim, problem.value_dim)
    return {
        "query": key,
        "key": key,
        "value": value,
        "gate": (tensor(heads, problem.key_dim), problem.gate_dtype),
        "beta": (tensor(heads), problem.beta_dtype),
        "a_log": ((heads,), "float32") if raw else None,
        "delta_time_bias": ((heads, problem.key_dim), "float32") if raw else None,
        "spans": ((rows, 2, problem.tokens), "int32") if packed else None,
        "boundaries": ((rows, problem.slots + 1), "int32") if packed else None,
        "initial_state": (state, "float32") if packed and problem.initial_state else None,
        "states": ((rows, heads, blocks * variant.chunks, key_dim, value_dim), states),
        "inverse": ((*groups, packs, variant.chunk, LANES), problem.operand)
        if variant.keep_inverse
        else None,
        "corrected": (value[0], problem.operand) if variant.keep_corrected else None,
        "d_output": value if request.output_cotangent else None,
        "d_final": (state, "float32") if request.state_cotangent else None,
    }
