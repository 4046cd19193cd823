"""`kimi_delta_attention`, the function that a model calls.

Importing this module costs little more than importing JAX: Pallas, the template engine and the
tables are loaded by the first call that runs on a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from kdagen.runtime.arguments import Call, check_call
from kdagen.runtime.autodiff import Outputs, attend
from kdagen.runtime.implementations import ByPlatform, Chunked, Implementation, Recurrent
from kdagen.runtime.segments import without_rows
from kdagen.runtime.target import NoKernelError, Target, find_target, warn_once


def kimi_delta_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    *,
    a_log: jax.Array | None = None,
    delta_time_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    segment_ids: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    max_num_segments: int | None = None,
    context_parallel: Any = None,
    layout: str = "HBTD",
    residuals: str | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Kimi Delta Attention (arXiv:2510.26692, section 3.1).

    Per token of every batch row and value head, with a float32 state S [K, V]:

        S    <- exp(gate_t)[:, None] * S
        e    <- value_t - S^T key_t
        S    <- S + beta_t * key_t e^T
        out  <- S^T (scale * query_t)

    Shapes are those of layout "HBTD"; "BTHD" takes and returns [B, T, H, D] (and beta [B, T, HV]).
    Neither is copied into the other: gradients and what is kept for them have the caller's layout.

    Args:
      query, key: [H, B, T, K], bfloat16 or float32, K at most 256, any T of 1 or more.
      value: [HV, B, T, V], query's dtype, V at most 256. HV is a multiple of H; value head j reads
        query and key head j // (HV / H).
      gate: [HV, B, T, K], bfloat16 or float32: ln(alpha) of every channel, or the raw gate if
        `use_gate_in_kernel`. Values above 0 count as 0, below -1e4 as -1e4, with zero gradient.
      beta: [HV, B, T], bfloat16 or float32, write strength in [0, 2].
      a_log: [HV] float32, of a raw gate; A = exp(min(a_log, 88)). Needed by a raw gate without
        lower_bound; None means A = 1 with one. Not used if the gate is not raw.
      delta_time_bias: [HV * K] or [HV, K] float32, added to the raw gate. Not used otherwise.
      lower_bound: of a raw gate, in [-5, 0): ln(alpha) = lower_bound * sigmoid(A * x). None:
        ln(alpha) = -A * softplus(x). Not used if the gate is not raw.
      use_gate_in_kernel: whether gate is raw.
      scale: of the query, a number; K ** -0.5 by default.
      use_qk_l2norm: query and key are multiplied by rsqrt(sum(x * x) + 1e-6) first.
      initial_state: [B, N, HV, K, V] float32 or None for zeros; N = 1 without segments.
      output_final_state: whether the final state is returned.
      segment_ids: [B, T] integers. A token belongs to slot id - 1; ids do not decrease, may skip
        values (an empty segment), and are 0 for padding, at the end only. Or what
        `kdagen.runtime.segments.pack_segments` made of them, or of cu_seqlens, for several calls.
      cu_seqlens: [N + 1] (B = 1) or [B, N + 1] integers, the other way to say segments: their
        boundaries, from 0. Tokens past the last one are padding.
      max_num_segments: N, needed with segment_ids unless there is an initial_state.
      context_parallel: None; no implementation of this version runs context parallel.
      layout: "HBTD" or "BTHD".
      residuals: what is kept for the gradient: "save" the inputs and the states at the start of
        every chunk, with what else the tuned kernel reads; "rematerialize" the inputs only, from
        which the gradient makes the rest again; None what tuning chose for the call, else "save".
        They carry the checkpoint names "kda_chunk_states", "kda_query", "kda_key" and so on.
      implementation: "pallas" (generated TPU kernels; interpreted on other platforms),
        "xla_chunked" (chunk form in plain JAX), "recurrent" (token by token), tokamax's "mosaic"
        and "xla" for the first and the last, a sequence of names tried in order, or None: "pallas"
        on a TPU, or where the trace targets one (under `jax.set_mesh`), and "xla_chunked"
        elsewhere. A kernel that cannot
        serve the call is passed over with one warning for each reason; in a sequence, "pallas" is
        passed over likewise where no TPU is targeted.

    Returns:
      output [HV, B, T, V] in query's dtype, and the final state [B, N, HV, K, V] in float32 or
      None. Padding has output 0 whatever it holds; an empty segment's final state is its initial
      one. A row of traced segment_ids or cu_seqlens that break their rules is NaN, and its
      gradients are 0, as of padding.

    It can be differentiated once, in reverse, in query, key, value, gate, beta, a_log,
    delta_time_bias and initial_state; differentiating twice raises NotImplementedError. A gradient
    that is not asked for is not computed. The gradient of a "pallas" call is a kernel of its own.
    Under `jax.vmap` what is mapped becomes batch rows of one kernel; mapped a_log and
    delta_time_bias, and their gradients, run one after another.

    A bfloat16 kernel forms and applies its triangular inverse in bfloat16, which is not enough for
    nearly parallel or repeated keys with beta near 1 and little decay (errors of 3e-2 and more). A
    call made under `jax.default_matmul_precision("high")` has that inverse above bfloat16, and one
    under "highest" (or "float32") has products of float32 operands throughout, at about 2.5 and 4.5
    times the modelled time of a training step. Float32 calls have both always.

    Raises:
      ValueError: a wrong shape, dtype, value or combination of arguments.
      TypeError: an argument of a wrong type.
      NoKernelError: implementation="pallas", and no kernel serves the call.
    """
    call = check_call(
        query, key, value, gate, beta,
        a_log=a_log, delta_time_bias=delta_time_bias, lower_bound=lower_bound,
        use_gate_in_kernel=use_gate_in_kernel, scale=scale, use_qk_l2norm=use_qk_l2norm,
        initial_state=initial_state, output_final_state=output_final_state,
        segment_ids=segment_ids, cu_seqlens=cu_seqlens, max_num_segments=max_num_segments,
        context_parallel=context_parallel, layout=layout, residuals=residuals,
        implementation=implementation,
    )  # fmt: skip
    output, final = attend(_implementation(call, find_target()), call.operands, call.packing)
    if call.packing is not None and (valid := call.packing.valid) is not None:
        output = without_rows(output, valid, 1 if layout == "HBTD" else 0)
        final = None if final is None else without_rows(final, valid, 0)
    return output, final


def _implementation(call: Call, target: Target) -> Implementation:
    """The first implementation that serves the call.

    In order: those that were asked for; with none, the kernels where a TPU is targeted, then the
    chunk form.
    """
    if not call.implementations and target.may_be_tpu:
        return _by_platform(call)
    names = call.implementations or (
        ("pallas", "xla_chunked") if target.is_tpu else ("xla_chunked",)
    )
    reasons: list[str] = []
    for name in names:
        if name != "pallas":
            for reason in reasons:
                warn_once(_fallback(reason, name))
            return Chunked(call.options) if name == "xla_chunked" else Recurrent(call.options)
        if len(names) > 1 and not target.is_tpu:
            reasons.append(f"no TPU is targeted: {target.description}")
            continue
        from kdagen.runtime import pallas

        try:
            return pallas.kernel_for(call, target)
        except NoKernelError as error:
            if names == ("pallas",):
                raise
            reasons.append(str(error))
    raise NoKernelError("; ".join(dict.fromkeys(reasons)))


def _by_platform(call: Call) -> Implementation:
    """For a trace that may or may not be for a TPU."""
    from kdagen.runtime import pallas

    chunked = Chunked(call.options)
    try:
        kernel = pallas.portable_kernel(call)
    except NoKernelError as error:
        return ByPlatform(chunked, chunked, (_fallback(str(error), "xla_chunked"),))
    note = (
        "kimi_delta_attention was traced without knowing of the TPU that it is now lowered for: it "
        "runs on a default kernel that is legal on every chip. To have the tuned one, trace under "
        "jax.set_mesh of a mesh of its devices."
    )
    return ByPlatform(kernel, chunked, (note,))


def _fallback(reason: str, name: str) -> str:
    return f"kimi_delta_attention runs on {name!r}, not on a Pallas kernel: {reason}"


__all__ = ["Outputs", "kimi_delta_attention"]
