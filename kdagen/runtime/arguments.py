"""Validation of a call: every argument is checked while tracing, and named where it is wrong."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdagen.reference.layout import heads_first_shape
from kdagen.reference.options import Options
from kdagen.reference.packing import Packing
from kdagen.runtime import segments
from kdagen.runtime.segments import array

LAYOUTS = ("HBTD", "BTHD")
RESIDUAL_POLICIES = ("save", "rematerialize")
IMPLEMENTATIONS = ("pallas", "xla_chunked", "recurrent")
_OTHER_NAMES = {"mosaic": "pallas", "xla": "recurrent"}
LARGEST_WIDTH = 256


@dataclass(frozen=True)
class Call:
    """A checked call, its arrays in the caller's layout.

    Attributes:
      operands: query, key [H, B, T, K]; value [HV, B, T, V]; gate [HV, B, T, K]; beta [HV, B, T],
        or all of those with the heads behind the tokens where `options.layout` is "BTHD"; a_log
        [HV], delta_time_bias [HV, K] and initial_state [B, N, HV, K, V], or None where the call
        has none or does not use it.
      packing: where the segments lie, or None without any.
      options: the static part.
      implementations: names to try in order; empty for the default.
    """

    operands: dict[str, jax.Array | None]
    packing: Packing | None
    options: Options
    implementations: tuple[str, ...]


def _dtype(name: str, x: Any, takes: tuple[str, ...]) -> None:
    if jnp.dtype(x.dtype).name not in takes:
        raise ValueError(f"{name}: got dtype {x.dtype}; it must be {' or '.join(takes)}")


def _shape(name: str, x: Any, expected: tuple[int, ...], meaning: str) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}; it must be {meaning} = {expected}")


def _flag(name: str, x: Any) -> bool:
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name}: got {x!r}; it must be True or False")
    return bool(x)


def _number(name: str, x: Any) -> float:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name}: got a traced value; it must be a number known while tracing")
    if isinstance(x, jax.Array | np.ndarray) and x.ndim == 0:
        x = x.item()
    if not isinstance(x, numbers.Real) or isinstance(x, bool):
        raise TypeError(f"{name}: got {x!r}; it must be a number")
    if not math.isfinite(x):
        raise ValueError(f"{name}: got {x!r}; it must be finite")
    return float(x)


def _scale(x: Any) -> float:
    number = _number("scale", x)
    if abs(number) > float(jnp.finfo(jnp.float32).max):
        raise ValueError(f"scale: got {number}; it must be finite in float32")
    return number


def _choice(name: str, x: Any, takes: tuple[str, ...]) -> str:
    if not isinstance(x, str):
        raise TypeError(f"{name}: got {x!r}; it must be a string")
    if x not in takes:
        raise ValueError(f"{name}: got {x!r}; it must be one of {', '.join(map(repr, takes))}")
    return x


def implementation_names(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    """This project's names of what was asked for, in order; empty for None.

    "mosaic" is "pallas" and "xla" is "recurrent", as in tokamax.

    Raises:
      TypeError: neither a string nor a sequence of strings.
      ValueError: an unknown name, or an empty sequence.
    """
    if implementation is None:
        return ()
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence):
        raise TypeError(f"implementation: got {implementation!r}; it must be a name, names or None")
    if not names:
        raise ValueError("implementation: got an empty sequence; it must hold a name")
    takes = (*IMPLEMENTATIONS, *_OTHER_NAMES)
    return tuple(
        _OTHER_NAMES.get(n, n) for n in (_choice("implementation", x, takes) for x in names)
    )


def _tensors(query: Any, key: Any, value: Any, gate: Any, beta: Any, layout: str) -> dict[str, Any]:
    """The five per-token tensors, checked against each other."""
    given = dict(query=query, key=key, value=value, gate=gate, beta=beta)
    axes = {"HBTD": "[{0}, B, T, {1}]", "BTHD": "[B, T, {0}, {1}]"}[layout]
    for name, x in given.items():
        rank = 3 if name == "beta" else 4
        array(name, x)
        if x.ndim != rank:
            meaning = axes.format("HV" if name in ("value", "gate", "beta") else "H", "D")
            meaning = meaning.replace(", D]", "]") if rank == 3 else meaning
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}; it must have {rank} axes, {meaning}"
            )
        _dtype(name, x, ("bfloat16", "float32"))
    for name in ("key", "value"):
        if given[name].dtype != query.dtype:
            raise ValueError(
                f"{name}: got dtype {given[name].dtype}; it must be that of query, {query.dtype}"
            )
    if layout == "HBTD":
        (heads, batch, tokens, width_k), (value_heads, _, _, width_v) = query.shape, value.shape
        shape = lambda h, *d: (h, batch, tokens, *d)  # noqa: E731
    else:
        (batch, tokens, heads, width_k), (_, _, value_heads, width_v) = query.shape, value.shape
        shape = lambda h, *d: (batch, tokens, h, *d)  # noqa: E731
    for name, size in (("heads", heads), ("batch", batch), ("tokens", tokens)):
        if size < 1:
            raise ValueError(f"query: got {size} {name} in shape {query.shape}; it takes 1 or more")
    for name, letter, width in (("query", "K", width_k), ("value", "V", width_v)):
        if not 1 <= width <= LARGEST_WIDTH:
            raise ValueError(f"{name}: got {letter} = {width}; it must be 1 to {LARGEST_WIDTH}")
    if value_heads < 1 or value_heads % heads:
        raise ValueError(
            f"value: got {value_heads} heads; they must be a multiple of query's {heads} heads"
        )
    _shape("key", key, shape(heads, width_k), axes.format("H", "K"))
    _shape("value", value, shape(value_heads, width_v), axes.format("HV", "V"))
    _shape("gate", gate, shape(value_heads, width_k), axes.format("HV", "K"))
    _shape("beta", beta, shape(value_heads), axes.format("HV", "D").replace(", D]", "]"))
    return {name: jnp.asarray(x) for name, x in given.items()}


def _gate_parameters(
    a_log: Any, bias: Any, lower_bound: Any, raw: bool, heads: int, width: int
) -> tuple[jax.Array | None, jax.Array | None, float | None]:
    """a_log [HV], bias [HV, K] and bound of a raw gate; all None where the gate is not raw."""
    if lower_bound is not None:
        lower_bound = _number("lower_bound", lower_bound)
        if not -5.0 <= lower_bound < 0.0:
            raise ValueError(f"lower_bound: got {lower_bound}; it must be in [-5, 0), or None")
    if a_log is not None:
        _shape("a_log", array("a_log", a_log), (heads,), "[HV]")
        _dtype("a_log", a_log, ("float32",))
    elif raw and lower_bound is None:
        raise ValueError(
            "a_log: got None; a raw gate (use_gate_in_kernel=True) without lower_bound needs "
            f"a float32 array [HV] = ({heads},)"
        )
    if bias is not None:
        name = "delta_time_bias"
        _dtype(name, array(name, bias), ("float32",))
        if tuple(bias.shape) not in ((heads * width,), (heads, width)):
            raise ValueError(
                f"{name}: got shape {tuple(bias.shape)}; it must be [HV * K] = ({heads * width},) "
                f"or [HV, K] = ({heads}, {width})"
            )
    if not raw:
        return None, None, None
    bias = None if bias is None else jnp.asarray(bias).reshape(heads, width)
    return None if a_log is None else jnp.asarray(a_log), bias, lower_bound


def _packing(
    segment_ids: Any, cu_seqlens: Any, max_num_segments: Any, state: Any, batch: int, tokens: int
) -> tuple[Packing | None, int]:
    """Where the segments lie, None without any, and the number of state slots N."""
    asked = segments.slot_count(max_num_segments)
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError("cu_seqlens: got it together with segment_ids; only one may be given")
    of_state = None
    if state is not None:
        if array("initial_state", state).ndim != 5:
            raise ValueError(
                f"initial_state: got shape {tuple(state.shape)}; it must have 5 axes, "
                "[B, N, HV, K, V]"
            )
        of_state = state.shape[1]
    packing = None
    if isinstance(segment_ids, Packing):
        packing, of_slots = segment_ids, "that of segment_ids"
        _shape("segment_ids", packing.spans, (batch, 2, tokens), "a packing of [B, 2, T]")
        slots = packing.slots
    elif cu_seqlens is not None:
        segments.integers("cu_seqlens", cu_seqlens)
        segments.lengths_shape(cu_seqlens, batch)
        slots, of_slots = cu_seqlens.shape[-1] - 1, "the number in cu_seqlens"
    elif segment_ids is not None:
        segments.integers("segment_ids", segment_ids)
        _shape("segment_ids", segment_ids, (batch, tokens), "[B, T]")
        if asked is None and of_state is None:
            raise ValueError(
                "max_num_segments: got None; segment_ids without initial_state need the number of "
                "segment slots"
            )
        slots = of_state if asked is None else asked  # type: ignore[assignment]
        of_slots = "that of max_num_segments"
    else:
        slots, of_slots = 1, "since the call has no segments"
    for name, number in (("max_num_segments", asked), ("initial_state", of_state)):
        if number is not None and number != slots:
            raise ValueError(
                f"{name}: got N = {number} segment slots; it must be {slots}, {of_slots}"
            )
    if packing is None and (segment_ids is not None or cu_seqlens is not None):
        packing = segments.pack_segments(
            segment_ids, cu_seqlens=cu_seqlens, max_num_segments=slots, batch=batch, tokens=tokens
        )
    return (None if packing is None else jax.tree.map(jnp.asarray, packing)), slots


def check_call(
    query: Any, key: Any, value: Any, gate: Any, beta: Any, *,
    a_log: Any, delta_time_bias: Any, lower_bound: Any, use_gate_in_kernel: Any,
    scale: Any, use_qk_l2norm: Any, initial_state: Any, output_final_state: Any,
    segment_ids: Any, cu_seqlens: Any, max_num_segments: Any, context_parallel: Any,
    layout: Any, residuals: Any, implementation: Any,
) -> Call:  # fmt: skip
    """The call of `kimi_delta_attention` with these arguments, checked.

    Raises:
      ValueError: a wrong shape, dtype, value or combination; TypeError: a wrong type. The message
        names the argument, what it got and what it takes.
    """
    layout = _choice("layout", layout, LAYOUTS)
    if residuals is not None:
        residuals = _choice("residuals", residuals, RESIDUAL_POLICIES)
    names = implementation_names(implementation)
    if context_parallel is not None:
        axis = getattr(context_parallel, "axis_name", None)
        if not isinstance(axis, str):
            raise TypeError(
                f"context_parallel: got {context_parallel!r}; it must have an axis_name, or be None"
            )
        raise ValueError(
            f"context_parallel: got axis_name={axis!r}; no implementation of this version runs "
            "context parallel, it must be None"
        )
    raw = _flag("use_gate_in_kernel", use_gate_in_kernel)
    operands: dict[str, Any] = _tensors(query, key, value, gate, beta, layout)
    value_heads, batch, tokens = heads_first_shape(operands["beta"].shape, layout)
    width_k, width_v = query.shape[-1], value.shape[-1]
    log, bias, bound = _gate_parameters(
        a_log, delta_time_bias, lower_bound, raw, value_heads, width_k
    )
    packing, slots = _packing(
        segment_ids, cu_seqlens, max_num_segments, initial_state, batch, tokens
    )
    if initial_state is not None:
        expected = (batch, slots, value_heads, width_k, width_v)
        _shape("initial_state", initial_state, expected, "[B, N, HV, K, V]")
        _dtype("initial_state", initial_state, ("float32",))
        initial_state = jnp.asarray(initial_state)
    operands |= {"a_log": log, "delta_time_bias": bias, "initial_state": initial_state}
    options = Options(
        scale=width_k**-0.5 if scale is None else _scale(scale),
        use_qk_l2norm=_flag("use_qk_l2norm", use_qk_l2norm),
        use_gate_in_kernel=raw,
        lower_bound=bound,
        output_final_state=_flag("output_final_state", output_final_state),
        residuals=residuals,
        layout=layout,
    )
    return Call(operands, packing, options, names)
