"""The chunk form in plain JAX: a loop over chunks of batched matrix products, and its gradient.

`forward` and `backward` are the two halves that a custom VJP wraps; neither is meant to be
differentiated itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kdagen.reference.activation import l2_normalize, log_decay
from kdagen.reference.chunk import chunk_step
from kdagen.reference.layout import heads_first_shape
from kdagen.reference.options import PER_TOKEN, Options
from kdagen.reference.varying import as_varying, varying_axes
from kdagen.reference.windows import Windows, plan

Operands = Mapping[str, jax.Array | None]


def _window_step(
    rows: Mapping[str, jax.Array],
    state: jax.Array,
    live: jax.Array,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """One chunk from its raw rows: masks, normalises, activates, repeats grouped heads, steps."""
    mask = live[None, :, :, None]
    # Selected before anything is computed: a row that is not the chunk's own may hold NaN.
    full = {name: jnp.where(mask if rows[name].ndim == 4 else mask[..., 0], rows[name], 0)
            for name in PER_TOKEN}  # fmt: skip
    q, k, v, gate, beta = (full[name].astype(jnp.float32) for name in PER_TOKEN)
    if options.use_qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    a_log, bias = rows.get("a_log"), rows.get("delta_time_bias")
    decay = log_decay(
        gate,
        None if a_log is None else a_log[:, None, None, None],
        None if bias is None else bias[:, None, None, :],
        use_gate_in_kernel=options.use_gate_in_kernel,
        lower_bound=options.lower_bound,
    )
    decay = jnp.where(mask, decay, 0)
    group = v.shape[0] // q.shape[0]
    q, k = jnp.repeat(q * options.scale, group, axis=0), jnp.repeat(k, group, axis=0)
    output, state = chunk_step(q, k, v, decay, beta, state)
    return jnp.where(mask, output, 0), state


def _slots(boundaries: jax.Array | None) -> int:
    return 1 if boundaries is None else boundaries.shape[1] - 1


def _entering(
    windows: Windows, i: jax.Array, state: jax.Array, initial: jax.Array | None
) -> jax.Array:
    """The state [HV, B, K, V] that chunk i starts from: carried, or its segment's own."""
    if windows.first is None:
        return state
    assert windows.slot is not None
    begin = windows.first[i][:, None, None]
    if initial is None:
        return jnp.where(begin, 0, state)
    rows = jnp.arange(initial.shape[0])
    return jnp.where(begin, jnp.moveaxis(initial[rows, windows.slot[i]], 1, 0), state)


def _store(
    windows: Windows, i: jax.Array, states: jax.Array, state: jax.Array, where: jax.Array
) -> jax.Array:
    """states [B, N, HV, K, V] with the chunk's slot replaced by state [HV, B, K, V] where asked."""
    assert windows.slot is not None
    rows, slot = jnp.arange(states.shape[0]), windows.slot[i]
    new = jnp.where(where[:, None, None, None], jnp.moveaxis(state, 0, 1), states[rows, slot])
    return states.at[rows, slot].set(new)


def _sequence_rows(windows: Windows, operands: Operands) -> dict[str, jax.Array]:
    rows = {name: x for name, x in operands.items() if x is not None and name != "initial_state"}
    return {name: windows.pad(x) if name in PER_TOKEN else x for name, x in rows.items()}


def _window_rows(
    windows: Windows, rows: Mapping[str, jax.Array], i: jax.Array, operands: Operands
) -> dict[str, jax.Array]:
    def take(name: str, x: jax.Array) -> jax.Array:
        whole = operands[name]
        assert whole is not None
        return windows.take(x, i, whole.shape) if name in PER_TOKEN else x

    return {name: take(name, x) for name, x in rows.items()}


def forward(
    operands: Operands,
    boundaries: jax.Array | None,
    options: Options,
    *,
    keep_states: bool = False,
    keep_output: bool = True,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Output, final state and chunk-start states.

    Args:
      operands: query, key [H, B, T, K]; value [HV, B, T, V]; gate [HV, B, T, K]; beta [HV, B, T],
        or those in `options.layout`, float32 or bfloat16; and, or None, a_log [HV],
        delta_time_bias [HV, K] and initial_state [B, N, HV, K, V], float32. Any T >= 1, K and V.
      boundaries: int32 [B, N + 1], first token of each segment and end of the last one, or None
        for one segment of T tokens. Tokens past the last boundary are padding: output 0.
      options: the static part of the call.
      keep_states: whether the chunk-start states are returned.
      keep_output: whether the output is; a backward that rebuilds the states does without.

    Returns:
      output in value's shape and dtype or None; final state [B, N, HV, K, V] float32, None
      unless `options.output_final_state`; states [chunks, HV, B, K, V] float32 or None.
    """
    axes = varying_axes(operands, boundaries)
    operands = as_varying(dict(operands), axes)
    value, key, initial = operands["value"], operands["key"], operands.get("initial_state")
    assert value is not None and key is not None
    heads, batch, tokens, width_v = heads_first_shape(value.shape, options.layout)
    width_k = key.shape[-1]
    edges = None if boundaries is None else as_varying(boundaries, axes)
    windows = plan(tokens, edges, options.layout)
    rows = _sequence_rows(windows, operands)

    def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
        return as_varying(jnp.zeros(shape, dtype), axes)

    state_shape = (heads, batch, width_k, width_v)
    carry = {"state": zeros(*state_shape)}
    if windows.first is None and initial is not None:
        carry["state"] = jnp.moveaxis(initial[:, 0], 1, 0)
    if keep_output:
        carry["output"] = windows.pad(zeros(*value.shape, dtype=value.dtype))
    if keep_states:
        carry["states"] = zeros(windows.bound, *state_shape)
    collect_final = windows.first is not None and options.output_final_state and keep_output
    if collect_final:
        slots = _slots(boundaries)
        empty = zeros(batch, slots, heads, width_k, width_v)
        carry["final"] = empty if initial is None else initial

    def body(i: jax.Array, carry: dict[str, jax.Array]) -> dict[str, jax.Array]:
        i = lax.convert_element_type(i, jnp.int32)
        state = _entering(windows, i, carry["state"], initial)
        live = windows.live(i)
        output, after = _window_step(_window_rows(windows, rows, i, operands), state, live, options)
        new = {"state": after}
        if keep_output:
            new["output"] = windows.put(carry["output"], i, output.astype(value.dtype))
        if keep_states:
            new["states"] = lax.dynamic_update_index_in_dim(carry["states"], state, i, axis=0)
        if collect_final:
            assert windows.last is not None
            new["final"] = _store(windows, i, carry["final"], after, windows.last[i])
        return new

    carry = lax.fori_loop(0, windows.count, body, carry)
    final = None
    if options.output_final_state and keep_output:
        final = carry["final"] if collect_final else jnp.moveaxis(carry["state"], 0, 1)[:, None]
    output = windows.cut(carry["output"], value.shape) if keep_output else None
    return output, final, carry.get("states")


def backward(
    operands: Operands,
    boundaries: jax.Array | None,
    states: jax.Array | None,
    output_cotangent: jax.Array | None,
    state_cotangent: jax.Array | None,
    wanted: Collection[str],
    options: Options,
) -> dict[str, jax.Array]:
    """Gradients of the operands named in `wanted`, and of no others.

    Walks the chunks in reverse. Each is run again from its start state and pulled back, so that
    what lies inside a chunk (relations, decays, solution) lives for one chunk only.

    Args:
      operands, boundaries, options: as `forward` had them.
      states: chunk-start states that `forward` kept, or None to rebuild them first.
      output_cotangent: of value's shape, or None for zeros.
      state_cotangent: of the final state, [B, N, HV, K, V] float32, or None for zeros.
      wanted: names of operands.

    Returns:
      name to gradient, each of its operand's shape and dtype. Inside `shard_map` they vary over
      every axis that any operand or cotangent varies over: summing is left to the caller.
    """
    if states is None:
        _, _, states = forward(operands, boundaries, options, keep_states=True, keep_output=False)
    axes = varying_axes(operands, boundaries, states, output_cotangent, state_cotangent)
    operands = as_varying(dict(operands), axes)
    states, boundaries, output_cotangent, state_cotangent = as_varying(
        (states, boundaries, output_cotangent, state_cotangent), axes
    )
    assert states is not None
    value = operands["value"]
    assert value is not None
    tokens = heads_first_shape(value.shape, options.layout)[2]
    windows = plan(tokens, boundaries, options.layout)
    rows = _sequence_rows(windows, operands)
    differentiated = [name for name in rows if name in wanted]
    want_initial = "initial_state" in wanted
    if output_cotangent is not None:
        output_cotangent = windows.pad(output_cotangent)

    def zeros_like(x: jax.Array) -> jax.Array:
        return as_varying(jnp.zeros(x.shape, x.dtype), axes)

    packed = windows.first is not None
    carry = {"d_state": zeros_like(states[0])}
    carry |= {name: zeros_like(rows[name]) for name in differentiated}
    if not packed and state_cotangent is not None:
        carry["d_state"] = jnp.moveaxis(state_cotangent[:, 0], 1, 0)
    initial = operands.get("initial_state")
    if packed and want_initial:
        assert initial is not None
        carry["initial_state"] = zeros_like(initial) if state_cotangent is None else state_cotangent

    def body(step: jax.Array, carry: dict[str, jax.Array]) -> dict[str, jax.Array]:
        i = lax.convert_element_type(windows.count - 1 - step, jnp.int32)
        d_state, live = carry["d_state"], windows.live(i)
        if packed:
            d_state = _leaving(windows, i, d_state, state_cotangent)
        here = _window_rows(windows, rows, i, operands)

        def run(moving: dict[str, jax.Array], state: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _window_step({**here, **moving}, state, live, options)

        state = lax.dynamic_index_in_dim(states, i, axis=0, keepdims=False)
        moving = {name: here[name] for name in differentiated}
        output, pull = jax.vjp(run, moving, state)
        d_output = jnp.zeros_like(output[0])
        if output_cotangent is not None:
            d_output = windows.take(output_cotangent, i, value.shape).astype(jnp.float32)
        found, d_state = pull((d_output, d_state))
        new = {"d_state": d_state}
        for name in differentiated:
            if name in PER_TOKEN:
                new[name] = windows.put(carry[name], i, found[name])
            else:
                new[name] = carry[name] + found[name]
        if "initial_state" in carry:
            assert windows.first is not None
            new["initial_state"] = _store(
                windows, i, carry["initial_state"], d_state, windows.first[i]
            )
        return new

    carry = lax.fori_loop(0, windows.count, body, carry)
    grads = {name: carry[name] for name in differentiated}
    for name in filter(PER_TOKEN.__contains__, differentiated):
        whole = operands[name]
        assert whole is not None
        grads[name] = windows.cut(grads[name], whole.shape)
    if want_initial:
        whole = jnp.moveaxis(carry["d_state"], 0, 1)[:, None]
        grads["initial_state"] = carry["initial_state"] if packed else whole
    return grads


def _leaving(
    windows: Windows, i: jax.Array, d_state: jax.Array, final: jax.Array | None
) -> jax.Array:
    """Cotangent [HV, B, K, V] of the state after chunk i: carried, or that of its final state."""
    assert windows.last is not None and windows.slot is not None
    ends = windows.last[i][:, None, None]
    if final is None:
        return jnp.where(ends, 0, d_state)
    rows = jnp.arange(final.shape[0])
    return jnp.where(ends, jnp.moveaxis(final[rows, windows.slot[i]], 1, 0), d_state)
