"""The token recurrence in plain JAX: slow, obvious, differentiable by JAX itself."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kdagen.reference.activation import l2_normalize, log_decay
from kdagen.reference.layout import heads_first, in_layout
from kdagen.reference.options import PER_TOKEN, Options
from kdagen.reference.varying import as_varying, varying_axes

_TOKENS_PER_CHECKPOINT = 32


def segment_of_token(boundaries: jax.Array, tokens: int) -> jax.Array:
    """Slot of every token, N for padding: boundaries [B, N + 1] to int32 [B, T]."""
    at = jnp.arange(tokens, dtype=jnp.int32)
    return jnp.sum(at[None, :, None] >= boundaries[:, None, 1:], axis=-1, dtype=jnp.int32)


def recurrent(
    operands: Mapping[str, jax.Array | None],
    boundaries: jax.Array | None,
    options: Options,
    *,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Kimi Delta Attention, one token after another.

        S    <- exp(gate_t)[:, None] * S
        e    <- value_t - S^T key_t
        S    <- S + beta_t * key_t e^T
        out  <- S^T (scale * query_t)

    Args:
      operands: query, key [H, B, T, K]; value [HV, B, T, V]; gate [HV, B, T, K]; beta [HV, B, T];
        those five in `options.layout`; and, or None, a_log [HV], delta_time_bias [HV, K],
        initial_state [B, N, HV, K, V].
      boundaries: int32 [B, N + 1], first token of each segment and end of the last, or None for
        one segment of T tokens. Tokens past the last boundary are padding.
      options: see `Options`; `residuals` and `output_final_state` play no part.
      dtype: of the state and of all arithmetic, float32 or (under x64) float64.

    Returns:
      output in value's shape and query's dtype (`dtype` if that is float64), 0 on padding, and the
      final state [B, N, HV, K, V] in `dtype`.
    """
    axes = varying_axes(operands, boundaries)
    operands = {
        name: heads_first(x, options.layout) if x is not None and name in PER_TOKEN else x
        for name, x in as_varying(dict(operands), axes).items()
    }
    query, key, value = operands["query"], operands["key"], operands["value"]
    assert query is not None and key is not None and value is not None
    heads, batch, tokens, width_v = value.shape
    width_k, group = query.shape[-1], heads // query.shape[0]
    start = operands.get("initial_state")
    slots = 1 if boundaries is None else boundaries.shape[1] - 1
    if start is None:
        start = as_varying(jnp.zeros((batch, slots, heads, width_k, width_v), dtype), axes)
    start = start.astype(dtype)

    if boundaries is None:
        slot = jnp.zeros((batch, tokens), jnp.int32)
        first = jnp.broadcast_to(jnp.arange(tokens) == 0, (batch, tokens))
        live = jnp.ones((batch, tokens), bool)
    else:
        slot = segment_of_token(boundaries, tokens)
        live = slot < slots
        first = jnp.concatenate([live[:, :1], (slot[:, 1:] != slot[:, :-1]) & live[:, 1:]], axis=1)
        slot = jnp.minimum(slot, slots - 1)

    def prepared(name: str) -> jax.Array:
        x = operands[name]
        assert x is not None
        mask = live if x.ndim == 3 else live[:, :, None]
        return jnp.where(mask, x.astype(dtype), 0)

    q, k, v, beta = prepared("query"), prepared("key"), prepared("value"), prepared("beta")
    if options.use_qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    q = q * options.scale
    a_log, bias = operands.get("a_log"), operands.get("delta_time_bias")
    decay = log_decay(
        prepared("gate"),
        None if a_log is None else a_log.astype(dtype)[:, None, None, None],
        None if bias is None else bias.astype(dtype)[:, None, None, :],
        use_gate_in_kernel=options.use_gate_in_kernel,
        lower_bound=options.lower_bound,
    )
    decay = jnp.where(live[:, :, None], decay, 0)

    rows = jnp.arange(batch)

    def step(carry, token):
        state, final = carry
        q, k, v, decay, beta, slot, first, live = token
        q, k = jnp.repeat(q, group, axis=0), jnp.repeat(k, group, axis=0)
        entering = jnp.moveaxis(start[rows, slot], 1, 0)
        state = jnp.where(first[:, None, None], entering, state)
        state = jnp.exp(decay)[..., None] * state
        error = v - jnp.einsum("hbkv,hbk->hbv", state, k, precision="highest")
        state = state + beta[..., None, None] * k[..., :, None] * error[..., None, :]
        out = jnp.einsum("hbkv,hbk->hbv", state, q, precision="highest")
        kept = jnp.where(live[:, None, None, None], jnp.moveaxis(state, 0, 1), final[rows, slot])
        return (state, final.at[rows, slot].set(kept)), out

    # Blocks of tokens are rematerialised, so that the gradient holds one state a block and not one
    # a token.
    block = min(_TOKENS_PER_CHECKPOINT, tokens)
    whole, rest = divmod(tokens, block)
    xs = [jnp.moveaxis(x, 2, 0) for x in (q, k, v, decay, beta)] + [slot.T, first.T, live.T]
    blocks = [x[: whole * block].reshape(whole, block, *x.shape[1:]) for x in xs]

    @jax.checkpoint
    def run(carry, tokens):
        return jax.lax.scan(step, carry, tokens)

    state = as_varying(jnp.zeros((heads, batch, width_k, width_v), dtype), axes)
    carry, out = jax.lax.scan(run, (state, start), blocks)
    out = out.reshape(whole * block, *out.shape[2:])
    if rest:
        carry, tail = run(carry, [x[whole * block :] for x in xs])
        out = jnp.concatenate([out, tail])
    output = jnp.where(live[None, :, :, None], jnp.moveaxis(out, 0, 2), 0)
    narrow = query.dtype if dtype == jnp.float32 else dtype
    return in_layout(output.astype(narrow), options.layout), carry[1]
