"""The token recurrence and its gradient in NumPy float64: what all else is held against.

For every batch row and value head, with a state S of shape [K, V] (arXiv:2510.26692, section 3.1):

    S   <- exp(gate_t)[:, None] * S
    e   <- value_t - S^T key_t
    S   <- S + beta_t * key_t e^T
    out <- S^T (scale * query_t)

Neither JAX nor its x64 flag is involved. Every sequence (segment) is run on its own, token after
token, vectorised over heads only.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

_LARGEST_A_LOG = 88.0
_SMALLEST_LOG_DECAY = -1e4
_TOKENS_PER_CHECKPOINT = 32

Array = np.ndarray


@dataclass(frozen=True)
class Options:
    """What the recurrence is told beside its tensors (see `recurrent_float64`)."""

    lower_bound: float | None = None
    use_gate_in_kernel: bool = False
    scale: float | None = None
    use_qk_l2norm: bool = False


def _double(x: Any) -> Array | None:
    return None if x is None else np.asarray(x).astype(np.float64)


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


class _Gate:
    """ln(alpha) [HV, T, K] of a slice of tokens, and the derivatives that its vjp needs."""

    def __init__(self, gate: Array, a_log: Array | None, bias: Array | None, options: Options):
        self.raw = options.use_gate_in_kernel
        if not self.raw:
            value = gate
            self.by_gate = np.where((value > 0) | (value < _SMALLEST_LOG_DECAY), 0.0, 1.0)
            self.value = np.clip(value, _SMALLEST_LOG_DECAY, 0.0)
            return
        heads, _, width = gate.shape
        x = gate if bias is None else gate + bias.reshape(heads, 1, width)
        exponent = np.zeros(heads) if a_log is None else a_log
        a_free = (exponent <= _LARGEST_A_LOG)[:, None, None]
        a = np.exp(np.minimum(exponent, _LARGEST_A_LOG))[:, None, None]
        if options.lower_bound is None:
            value = -a * _softplus(x)
            by_x = -a * _sigmoid(x)
            by_a_log = value
        else:
            opened = _sigmoid(a * x)
            slope = options.lower_bound * opened * _sigmoid(-a * x)
            value = options.lower_bound * opened
            by_x = slope * a
            by_a_log = slope * (a * x)
        free = value >= _SMALLEST_LOG_DECAY
        self.value = np.where(free, value, _SMALLEST_LOG_DECAY)
        self.by_gate = np.where(free, by_x, 0.0)
        self.by_a_log = np.where(free & a_free, by_a_log, 0.0)


def _normalize(x: Array) -> tuple[Array, Array]:
    """x * rsqrt(sum(x*x) + 1e-6) over the last axis, and that factor."""
    factor = 1.0 / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)
    return x * factor, factor


def _normalize_vjp(x: Array, factor: Array, cotangent: Array) -> Array:
    return factor * cotangent - factor**3 * x * np.sum(x * cotangent, axis=-1, keepdims=True)


def _step(state: Array, key: Array, value: Array, alpha: Array) -> tuple[Array, Array]:
    """One token for all heads: the decayed state [HV, K, V] (new array) and the error e [HV, V]."""
    decayed = alpha[:, :, None] * state
    error = value - np.matmul(key[:, None, :], decayed)[:, 0]
    return decayed, error


def _advance(decayed: Array, key: Array, error: Array, beta: Array) -> Array:
    """The state after the token's rank-one write."""
    return decayed + (beta[:, None] * key)[:, :, None] * error[:, None, :]


class _Sequence:
    """One segment of one batch row: tensors [HV, T, ...] in float64, prepared."""

    def __init__(self, tensors: dict[str, Array], options: Options):
        self.tensors, self.options = tensors, options
        query, key, value = tensors["query"], tensors["key"], tensors["value"]
        self.group = value.shape[0] // query.shape[0]
        self.gate = _Gate(
            tensors["gate"], tensors.get("a_log"), tensors.get("delta_time_bias"), options
        )
        self.query_factor = self.key_factor = None
        if options.use_qk_l2norm:
            query, self.query_factor = _normalize(query)
            key, self.key_factor = _normalize(key)
        self.scale = options.scale if options.scale is not None else query.shape[-1] ** -0.5
        self.query = np.repeat(query, self.group, axis=0) * self.scale
        self.key = np.repeat(key, self.group, axis=0)
        self.value, self.beta = value, tensors["beta"]
        self.alpha = np.exp(self.gate.value)
        self.length = value.shape[1]

    def _token(self, t: int) -> tuple[Array, Array, Array, Array]:
        return self.key[:, t], self.value[:, t], self.alpha[:, t], self.beta[:, t]

    def run(self, state: Array) -> tuple[Array, Array, list[Array]]:
        """Output [HV, T, V], final state [HV, K, V] and the states before every 32nd token."""
        output = np.empty_like(self.value)
        checkpoints = []
        for t in range(self.length):
            if t % _TOKENS_PER_CHECKPOINT == 0:
                checkpoints.append(state)
            key, value, alpha, beta = self._token(t)
            decayed, error = _step(state, key, value, alpha)
            state = _advance(decayed, key, error, beta)
            output[:, t] = np.matmul(self.query[:, t][:, None, :], state)[:, 0]
        return output, state, checkpoints

    def pull_back(
        self, checkpoints: list[Array], output_cotangent: Array, state_cotangent: Array
    ) -> tuple[dict[str, Array], Array]:
        """Gradients of the tensors, and of the state that the sequence started from."""
        d_query, d_key = np.empty_like(self.query), np.empty_like(self.key)
        d_value, d_beta = np.empty_like(self.value), np.empty_like(self.beta)
        d_log_decay = np.empty_like(self.alpha)
        d_state = state_cotangent
        for block in reversed(range(len(checkpoints))):
            first = block * _TOKENS_PER_CHECKPOINT
            tokens = range(first, min(first + _TOKENS_PER_CHECKPOINT, self.length))
            state, steps = checkpoints[block], []
            for t in tokens:
                key, value, alpha, beta = self._token(t)
                decayed, error = _step(state, key, value, alpha)
                state = _advance(decayed, key, error, beta)
                steps.append((decayed, error, state))
            for t, (decayed, error, state) in zip(reversed(tokens), reversed(steps), strict=True):
                key, _, alpha, beta = self._token(t)
                d_out = output_cotangent[:, t]
                d_query[:, t] = np.matmul(state, d_out[:, :, None])[:, :, 0]
                d_state = d_state + self.query[:, t][:, :, None] * d_out[:, None, :]
                key_read = np.matmul(key[:, None, :], d_state)[:, 0]
                error_read = np.matmul(d_state, error[:, :, None])[:, :, 0]
                d_error = beta[:, None] * key_read
                d_beta[:, t] = np.sum(key * error_read, axis=-1)
                d_key[:, t] = beta[:, None] * error_read
                d_key[:, t] -= np.matmul(decayed, d_error[:, :, None])[:, :, 0]
                d_value[:, t] = d_error
                d_state = d_state - key[:, :, None] * d_error[:, None, :]
                d_log_decay[:, t] = np.sum(d_state * decayed, axis=-1)
                d_state = alpha[:, :, None] * d_state
        grads = {"value": d_value, "beta": d_beta}
        grads["query"] = self._input_gradient("query", d_query * self.scale, self.query_factor)
        grads["key"] = self._input_gradient("key", d_key, self.key_factor)
        grads["gate"] = d_log_decay * self.gate.by_gate
        if self.gate.raw:
            grads["a_log"] = np.sum(d_log_decay * self.gate.by_a_log, axis=(1, 2))
            grads["delta_time_bias"] = np.sum(grads["gate"], axis=1)
        return grads, d_state

    def _input_gradient(self, name: str, cotangent: Array, factor: Array | None) -> Array:
        original = self.tensors[name]
        summed = cotangent.reshape(original.shape[0], self.group, *original.shape[1:]).sum(axis=1)
        return summed if factor is None else _normalize_vjp(original, factor, summed)


_PER_TOKEN = ("query", "key", "value", "gate", "beta")


def _run(
    tensors: dict[str, Array],
    initial_state: Array | None,
    boundaries: Any,
    options: Options,
    cotangents: tuple[Array | None, Array | None] | None,
) -> tuple[Array, Array, dict[str, Array]]:
    heads, batch, tokens, width_v = tensors["value"].shape
    width_k = tensors["key"].shape[-1]
    if boundaries is None:
        boundaries = np.broadcast_to(np.array([0, tokens]), (batch, 2))
    boundaries = np.asarray(boundaries)
    slots = boundaries.shape[1] - 1
    if initial_state is None:
        initial_state = np.zeros((batch, slots, heads, width_k, width_v))
    output = np.zeros((heads, batch, tokens, width_v))
    final_state = initial_state.copy()
    grads: dict[str, Array] = {}
    if cotangents is not None:
        d_output = np.zeros_like(output) if cotangents[0] is None else cotangents[0]
        d_final = np.zeros_like(final_state) if cotangents[1] is None else cotangents[1]
        grads = {name: np.zeros_like(x) for name, x in tensors.items()}
        grads["initial_state"] = d_final.copy()
    for b in range(batch):
        for slot in range(slots):
            window = slice(int(boundaries[b, slot]), int(boundaries[b, slot + 1]))
            if window.start == window.stop:
                continue
            part = {n: x[:, b, window] if n in _PER_TOKEN else x for n, x in tensors.items()}
            sequence = _Sequence(part, options)
            out, state, checkpoints = sequence.run(initial_state[b, slot])
            output[:, b, window], final_state[b, slot] = out, state
            if cotangents is None:
                continue
            found, d_start = sequence.pull_back(
                checkpoints, d_output[:, b, window], d_final[b, slot]
            )
            grads["initial_state"][b, slot] = d_start
            for name in tensors:
                if name in _PER_TOKEN:
                    grads[name][:, b, window] = found[name]
                elif name in found:
                    grads[name] += found[name].reshape(grads[name].shape)
    return output, final_state, grads


def recurrent_float64(
    query: Any, key: Any, value: Any, gate: Any, beta: Any, **arguments: Any
) -> tuple[Array, Array]:
    """Kimi Delta Attention, token by token, in float64.

    Args:
      query, key: [H, B, T, K], any float dtype (JAX or NumPy arrays).
      value: [HV, B, T, V], HV a multiple of H; value head j reads query head j // (HV / H).
      gate: [HV, B, T, K], ln(alpha), or the raw gate with `use_gate_in_kernel`.
      beta: [HV, B, T].
      a_log: [HV] or None (exp(a_log) = 1); saturates at 88.
      delta_time_bias: [HV * K] or [HV, K] or None.
      lower_bound: None for -exp(a_log) * softplus(x), else lower_bound * sigmoid(exp(a_log) * x).
      use_gate_in_kernel: False by default.
      scale: of the query; K ** -0.5 by default.
      use_qk_l2norm: query and key are divided by sqrt(sum of squares + 1e-6) first; not by default.
      initial_state: [B, N, HV, K, V] or None for zeros.
      boundaries: [B, N + 1] integers, the token at which each segment starts and the last one
        ends; tokens past the last are padding. None means one segment of T tokens.

    Returns:
      output [HV, B, T, V] (0 on padding) and final state [B, N, HV, K, V], both float64.
    """
    prepared = _prepare(query, key, value, gate, beta, **arguments)
    output, final_state, _ = _run(*prepared, cotangents=None)
    return output, final_state


def recurrent_float64_vjp(
    query: Any,
    key: Any,
    value: Any,
    gate: Any,
    beta: Any,
    *,
    output_cotangent: Any = None,
    state_cotangent: Any = None,
    **arguments: Any,
) -> tuple[Array, Array, dict[str, Array]]:
    """`recurrent_float64` and its gradients, by the recurrence run backwards in float64.

    Args:
      output_cotangent: [HV, B, T, V] or None for zeros.
      state_cotangent: [B, N, HV, K, V] or None for zeros.
      (the others as in `recurrent_float64`)

    Returns:
      output, final state, and a dict from argument name to gradient in that argument's shape:
      query, key, value, gate, beta, initial_state, and a_log and delta_time_bias where given.
      Where ln(alpha) saturates at -1e4, or a given log decay is above 0, the gate's gradient is 0.
    """
    prepared = _prepare(query, key, value, gate, beta, **arguments)
    return _run(*prepared, cotangents=(_double(output_cotangent), _double(state_cotangent)))


def _prepare(
    query: Any,
    key: Any,
    value: Any,
    gate: Any,
    beta: Any,
    *,
    a_log: Any = None,
    delta_time_bias: Any = None,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    initial_state: Any = None,
    boundaries: Any = None,
) -> tuple[dict[str, Array], Array | None, Any, Options]:
    """What `_run` takes: tensors by name in float64, initial state, boundaries and options."""
    named = dict(
        query=query, key=key, value=value, gate=gate, beta=beta,
        a_log=a_log, delta_time_bias=delta_time_bias,
    )  # fmt: skip
    tensors = {name: np.asarray(x).astype(np.float64) for name, x in named.items() if x is not None}
    options = Options(lower_bound, use_gate_in_kernel, scale, use_qk_l2norm)
    return tensors, _double(initial_state), boundaries, options
