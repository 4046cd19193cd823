"""Data that is hard for a kernel, by kind: gates, keys and write strengths at the edges.

Heads are independent of each other, so every head of one call may hold another kind: one compiled
kernel, one run and one reference then cover them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm
from sys import float_info
from typing import Any, NamedTuple

import numpy as np

from kdagen.measure import accuracy, operands
from kdagen.problem import Problem

Array = np.ndarray

# Constants are log decays a token in every channel.
LOG_DECAYS = (
    "0", "above 0", "-0.001", "-0.05", "-1", "-5", "-6", "-20", "mixed", "resets", "entry resets",
)  # fmt: skip
_RAW = ("moderate", "slow", "fast", "saturated", "fast and slow channels", "fast and slow tokens")
GATES = {
    "log_decay": LOG_DECAYS,
    "softplus": (*_RAW, "vanishing"),
    "bounded": _RAW,
}
"""Kinds of gates by the gate of a problem.

Log decays: "resets" forget everything (-1e4) in a tenth of the tokens, "entry resets" in a tenth of
the entries; "mixed" holds every strength from hardly any to -20 in neighbouring channels, and
resets; "above 0" holds values above 0, which count as 0. Raw gates: "saturated" has an a_log of 88
to 100; in "vanishing" softplus(x) is below the smallest normal f32, and exp(a_log) makes up for it.
"""

SLOW = {"log_decay": "-0.001", "softplus": "slow", "bounded": "slow"}
"""The kind of the slowest decays by the gate of a problem."""

KEYS = ("random", "parallel", "repeated")
_NOISE = 0.05
_DISTINCT = 3
LEAK = 1000.0
"""Factor of the values and the initial state before the reset of a "leak"."""


class Kind(NamedTuple):
    """What one head of a call holds.

    Attributes:
      gate: one of ``GATES`` of the problem's gate, or any log decay as text.
      key: "random"; "parallel", one direction and noise of 0.05 a unit-variance direction;
        "repeated", three distinct keys in random order; or "leak", random keys, values 1000 times
        larger before one reset, the error being that after it.
      beta_above_one: write strengths are drawn from (1, 2]; else from (0, 1), and near 1 for keys
        that are not random.
    """

    gate: str
    key: str = "random"
    beta_above_one: bool = False

    @property
    def ill_conditioned(self) -> bool:
        """Whether the inverse inside a chunk has a large norm."""
        return self.key in ("parallel", "repeated")

    @property
    def keys(self) -> str:
        """The kind of keys and write strengths, for people."""
        return self.key + (", beta to 2" if self.beta_above_one else "")

    def bound(self, tensor: str, problem: Problem) -> float:
        """``accuracy.bound`` of a tensor of a head of this kind.

        A state of one channel is overwritten by every token: the gradient of the initial one is the
        small rest of terms that cancel.
        """
        rest = 5.0 if tensor == "initial_state" and problem.key_dim == 1 else 1.0
        return rest * accuracy.bound(
            tensor,
            problem.dtype,
            tokens=problem.tokens,
            undecayed=self.gate in ("0", "above 0"),
            ill_conditioned=self.ill_conditioned,
            beta_above_one=self.beta_above_one,
        )


def asked(kind: Kind, problem: Problem) -> bool:
    """Whether a kernel for a problem has to hold ``Kind.bound``; if not, it must stay finite.

    A bfloat16 inverse cannot where keys are ill-conditioned.
    """
    wide = problem.dtype == "float32" or problem.precision != "default"
    return wide or not kind.ill_conditioned


def every(problem: Problem) -> tuple[Kind, ...]:
    """All kinds of data that a problem can be given.

    Every gate with random keys; hard keys where decay is slow, which is where they are hard; and
    write strengths beyond 1.
    """
    slow = SLOW[problem.gate]
    found = [Kind(gate) for gate in GATES[problem.gate]]
    found += [Kind(slow, key, above) for above in (False, True) for key in KEYS]
    found.remove(Kind(slow))  # the one that stands there twice
    if problem.gate == "log_decay":
        found += [Kind("0", "parallel"), Kind("0", "repeated"), Kind("0", "random", True)]
    if problem.gate != "bounded":
        found.append(Kind(slow, "leak"))
    return tuple(found)


def telling(problem: Problem) -> tuple[Kind, ...]:
    """The few of them that tell one variant of a kernel from another: no decay to speak of, both
    ends of the gate side by side, decays that leave nothing, writes that reflect, and hard keys
    where they are asked for."""
    slow = SLOW[problem.gate]
    if problem.gate == "log_decay":
        gates = (slow, "-6", "-20", "entry resets", "mixed")
    else:
        gates = (slow, "moderate", "saturated", "fast and slow channels", "fast and slow tokens")
    given = (*(Kind(gate) for gate in gates), Kind(slow, "random", True))
    hard = (Kind(slow, "parallel"), Kind(slow, "repeated"), Kind(slow, "parallel", True))
    return given + tuple(kind for kind in hard if asked(kind, problem))


def of_head(kinds: Sequence[Kind], problem: Problem) -> list[Kind]:
    """The kind of every value head: kinds in turn, value heads that share a key being alike."""
    group = problem.value_heads // problem.heads
    return [kinds[head // group % len(kinds)] for head in range(problem.value_heads)]


def draw(problem: Problem, kinds: Sequence[Kind], seed: int = 0) -> dict[str, Any]:
    """Values of ``operands.inputs(problem)`` as JAX arrays, head by head of the kind of
    ``of_head``; what a kind does not say is as in ``operands.draw``.

    Raises:
      KeyError: a kind of gate that the problem's gate does not have.
    """
    import jax.numpy as jnp

    wanted = operands.inputs(problem)
    values = {
        name: np.array(x).astype(np.float64) for name, x in operands.draw(problem, seed).items()
    }
    rng = np.random.default_rng(seed)
    group = problem.value_heads // problem.heads
    resets = reset_tokens(problem, kinds)
    if problem.initial_state:
        # of the size of what one token writes, so that neither hides the errors of the other
        values["initial_state"] *= problem.key_dim**-0.5
    for head, kind in enumerate(of_head(kinds, problem)):
        shape = values["gate"].shape[1:]
        gate, rate, bias = _gate(problem, kind.gate)(rng, shape)
        values["gate"][head] = gate
        if problem.gate != "log_decay":
            values["a_log"][head], values["delta_time_bias"][head] = rate, bias
        if kind.beta_above_one:
            values["beta"][head] = rng.uniform(1.0, 2.0, shape[:2])
        elif kind.ill_conditioned:
            values["beta"][head] = rng.uniform(0.9, 1.0, shape[:2])
        if kind.ill_conditioned and head % group == 0:
            values["key"][head // group] = _hard_keys(rng, kind.key, shape, problem.qk_l2norm)
        if kind.ill_conditioned and problem.initial_state:
            # what is read of a state in the directions of no key is exact
            values["initial_state"][:, :, head] = 0.0
        if kind.key == "leak":
            at = resets[head]
            values["gate"][head][:, at] = -1e4 if problem.gate == "log_decay" else 1e6
            values["value"][head][:, :at] *= LEAK
            if problem.initial_state:
                values["initial_state"][:, :, head] *= LEAK
    return {name: jnp.asarray(x, wanted[name][1]) for name, x in values.items()}  # type: ignore[index]


def with_heads(problem: Problem, kinds: Sequence[Kind], program: int = 1) -> Problem:
    """The problem with a key head for every kind, and as many more as fill the last program of
    ``program`` value heads."""
    group = problem.value_heads // problem.heads
    whole = lcm(program, group)
    value_heads = -(-len(kinds) * group // whole) * whole
    return replace(problem, heads=value_heads // group, value_heads=value_heads)


def reset_tokens(problem: Problem, kinds: Sequence[Kind]) -> list[int]:
    """For every value head the first token whose output counts: that of the reset of a "leak", in
    the last third, else 0."""
    at = 2 * problem.tokens // 3
    return [at if kind.key == "leak" else 0 for kind in of_head(kinds, problem)]


def errors(
    problem: Problem,
    kinds: Sequence[Kind],
    got: dict[str, Any],
    expected: dict[str, Array],
) -> dict[tuple[Kind, str], float]:
    """``accuracy.relative_error`` by kind and tensor, over the heads of a kind together.

    Tensors are named as for ``accuracy.bound``; of value heads that share a key, and so a gradient
    of it, all are of one kind.
    """
    group = problem.value_heads // problem.heads
    of, first = of_head(kinds, problem), reset_tokens(problem, kinds)
    found: dict[tuple[Kind, str], float] = {}
    for name, reference in expected.items():
        x = np.asarray(got[name])
        for kind in dict.fromkeys(of):
            heads = [head for head, its in enumerate(of) if its == kind]
            mine: tuple[Any, ...]
            if name in ("final_state", "initial_state"):
                mine = (slice(None), slice(None), heads)
            elif name in ("query", "key"):
                mine = ([head // group for head in heads[::group]],)
            elif name in accuracy.PARAMETERS:
                mine = (heads,)
            else:
                mine = (heads, slice(None), slice(first[heads[0]], None))
            found[kind, name] = accuracy.relative_error(x[mine], reference[mine])
    return found


def step_errors(
    problem: Problem,
    kinds: Sequence[Kind],
    got: dict[str, Any],
    expected: dict[str, Array],
) -> dict[tuple[Kind, str], float]:
    """``errors``, with that of a_log over the heads of several kinds together.

    Its gradient is one number a head, a sum over tokens and channels that may happen to be near 0.
    Left out are the kinds that are not ``asked`` and those whose writes reflect; it stands under
    the one with the widest bound.
    """
    found = errors(problem, kinds, got, expected)
    if "a_log" not in expected:
        return found
    found = {at: error for at, error in found.items() if at[1] != "a_log"}
    of = of_head(kinds, problem)
    heads = [i for i, kind in enumerate(of) if asked(kind, problem) and not kind.beta_above_one]
    if heads:
        widest = max((of[i] for i in heads), key=lambda kind: kind.bound("a_log", problem))
        x = np.asarray(got["a_log"])[heads]
        found[widest, "a_log"] = accuracy.relative_error(x, expected["a_log"][heads])
    return found


def outside(
    problem: Problem, found: dict[tuple[Kind, str], float]
) -> dict[tuple[Kind, str], tuple[float, float]]:
    """Of ``errors`` those that are above the bound that is ``asked``, with it."""
    limits = {
        (kind, name): kind.bound(name, problem) if asked(kind, problem) else float_info.max
        for kind, name in found
    }
    return {at: (found[at], limit) for at, limit in limits.items() if not found[at] <= limit}


def _hard_keys(
    rng: np.random.Generator, kind: str, shape: tuple[int, ...], normalised: bool
) -> Array:
    """[B, T, K], of unit length where the kernel does not see to that itself."""
    batch, tokens, width = shape
    if kind == "parallel":
        keys = rng.standard_normal((batch, 1, width)) + _NOISE * rng.standard_normal(shape)
    else:
        distinct = rng.standard_normal((_DISTINCT, width))
        keys = distinct[rng.integers(_DISTINCT, size=(batch, tokens))]
    return keys if normalised else keys / np.linalg.norm(keys, axis=-1, keepdims=True)


_Drawn = Callable[[np.random.Generator, tuple[int, ...]], tuple[Array, float, Array]]


def _gate(problem: Problem, kind: str) -> _Drawn:
    """Draws a gate [B, T, K] of one head, with a_log and bias [K] of a raw one."""
    if problem.gate == "log_decay" and (kind in LOG_DECAYS or _is_number(kind)):
        return lambda rng, shape: (_log_decay(rng, kind, shape), 0.0, np.zeros(shape[-1]))
    if problem.gate == "log_decay" or kind not in GATES[problem.gate]:
        raise KeyError(f"{kind!r}: not a kind of a {problem.gate} gate")
    bounded = problem.gate == "bounded"
    return lambda rng, shape: _raw(rng, kind, shape, bounded)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _log_decay(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    if kind == "resets":
        return np.where(rng.random((*shape[:-1], 1)) < 0.1, -1e4, -0.05 * rng.random(shape))
    if kind == "entry resets":
        return np.where(rng.random(shape) < 0.1, -1e4, -0.05 * rng.random(shape))
    if kind == "mixed":
        strength = rng.permutation(np.geomspace(1e-3, 20.0, shape[-1]))
        return np.where(rng.random(shape) < 0.02, -1e4, -strength * rng.random(shape))
    if kind == "above 0":
        return rng.choice([0.0, 0.5, 2.0], shape)
    return np.full(shape, float(kind))


def _raw(
    rng: np.random.Generator, kind: str, shape: tuple[int, ...], bounded: bool
) -> tuple[Array, float, Array]:
    raw, rate = rng.standard_normal(shape), 0.5 * rng.standard_normal()
    bias = rng.standard_normal(shape[-1])
    if kind == "slow":
        # the rate scales a softplus, and steepens a sigmoid
        rate, bias = (0.0 if bounded else rate - 3), bias - (8 if bounded else 6)
    elif kind == "fast":
        rate, bias = rate + 2, bias + 4
    elif kind == "saturated":
        rate, raw = rng.uniform(88.0, 100.0), 10 * raw
    elif kind == "vanishing":
        rate, raw, bias = 88.0, raw - 90, bias
    elif kind == "fast and slow channels":
        bias = np.where(rng.random(bias.shape) < 0.5, -9.0, 9.0)
    elif kind == "fast and slow tokens":
        raw = np.where(rng.random(shape) < 0.5, -9.0, 9.0)
    return raw, rate, bias
