"""The ways to compute a call and its gradient, behind one interface.

Each is frozen and hashable: it is the static part of a jitted function, so that a call that runs in
another way is another program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from kdagen.reference import chunked
from kdagen.reference.options import Options
from kdagen.reference.packing import Packing
from kdagen.reference.recurrent import recurrent
from kdagen.reference.varying import as_varying, varying_axes

Operands = dict[str, jax.Array | None]
Kept = dict[str, jax.Array]


def _boundaries(packing: Packing | None) -> jax.Array | None:
    return None if packing is None else packing.boundaries


class Computed(NamedTuple):
    """What a forward comes to.

    Attributes:
      output: in value's shape and dtype.
      final_state: [B, N, HV, K, V] float32, None unless `Options.output_final_state`.
      kept: by name, what the backward is given beside the operands.
    """

    output: jax.Array
    final_state: jax.Array | None
    kept: Kept


class Cotangents(NamedTuple):
    """Of the output and of the final state, each None where it is 0."""

    output: jax.Array | None
    final_state: jax.Array | None


class Implementation(Protocol):
    """How a call is computed; operands are those of `kdagen.reference.chunked.forward`."""

    def settled(self, differentiated: bool) -> Implementation:
        """With what depends on whether the call is differentiated chosen; it may warn."""
        ...

    def forward(self, operands: Operands, packing: Packing | None, keep: bool) -> Computed:
        """`keep`: the call is differentiated, and may keep what its backward can use."""
        ...

    def backward(
        self,
        operands: Operands,
        packing: Packing | None,
        kept: Kept,
        cotangents: Cotangents,
        wanted: tuple[str, ...],
    ) -> dict[str, jax.Array]:
        """Gradients of the operands of these names; cotangents are not both None."""
        ...


@dataclass(frozen=True)
class Chunked:
    """The chunk form in plain JAX."""

    options: Options

    def settled(self, differentiated: bool) -> Chunked:
        return self

    def forward(self, operands: Operands, packing: Packing | None, keep: bool) -> Computed:
        keep = keep and self.options.residuals != "rematerialize"
        output, final, states = chunked.forward(
            operands, _boundaries(packing), self.options, keep_states=keep
        )
        assert output is not None
        return Computed(output, final, {} if states is None else {"chunk_states": states})

    def backward(
        self,
        operands: Operands,
        packing: Packing | None,
        kept: Kept,
        cotangents: Cotangents,
        wanted: tuple[str, ...],
    ) -> dict[str, jax.Array]:
        states = kept.get("chunk_states")
        edges = _boundaries(packing)
        return chunked.backward(operands, edges, states, *cotangents, wanted, self.options)


@dataclass(frozen=True)
class Recurrent:
    """Token by token, and differentiated by JAX."""

    options: Options

    def settled(self, differentiated: bool) -> Recurrent:
        return self

    def forward(self, operands: Operands, packing: Packing | None, keep: bool) -> Computed:
        output, state = recurrent(operands, _boundaries(packing), self.options)
        return Computed(output, state if self.options.output_final_state else None, {})

    def backward(
        self,
        operands: Operands,
        packing: Packing | None,
        kept: Kept,
        cotangents: Cotangents,
        wanted: tuple[str, ...],
    ) -> dict[str, jax.Array]:
        boundaries = _boundaries(packing)

        def run(moving: Operands) -> tuple[jax.Array, jax.Array]:
            return recurrent({**operands, **moving}, boundaries, self.options)

        # All vary alike, so that JAX adds no sum over mesh axes inside the loops.
        axes = varying_axes(operands, boundaries, cotangents)
        computed, pull = jax.vjp(run, as_varying({name: operands[name] for name in wanted}, axes))
        given = tuple(
            jnp.zeros_like(like) if x is None else x
            for x, like in zip(cotangents, computed, strict=True)
        )
        return pull(as_varying(given, axes))[0]


@dataclass(frozen=True)
class ByPlatform:
    """One implementation where the program is lowered for a TPU, another where it is not.

    Two that differ keep nothing for the backward: what they would keep differs as well.

    Attributes:
      on_tpu, elsewhere: the two; they may be the same.
      notes: what is to be told once should the program be lowered for a TPU.
    """

    on_tpu: Implementation
    elsewhere: Implementation
    notes: tuple[str, ...] = ()

    def settled(self, differentiated: bool) -> ByPlatform:
        return dataclasses.replace(
            self,
            on_tpu=self.on_tpu.settled(differentiated),
            elsewhere=self.elsewhere.settled(differentiated),
        )

    def forward(self, operands: Operands, packing: Packing | None, keep: bool) -> Computed:
        keep = keep and self.on_tpu == self.elsewhere

        def run(one: Implementation, operands: Operands, packing: Any) -> Computed:
            return one.forward(operands, packing, keep)

        return self._where_it_runs(run, _told(operands, self.notes), packing)

    def backward(
        self,
        operands: Operands,
        packing: Packing | None,
        kept: Kept,
        cotangents: Cotangents,
        wanted: tuple[str, ...],
    ) -> dict[str, jax.Array]:
        def run(
            one: Implementation, operands: Operands, packing: Any, kept: Kept, given: Cotangents
        ) -> dict[str, jax.Array]:
            return one.backward(operands, packing, kept, given, wanted)

        told = _told(operands, self.notes)
        return self._where_it_runs(run, told, packing, kept, cotangents)

    def _where_it_runs(self, run: Callable[..., Any], *arrays: Any) -> Any:
        if self.on_tpu == self.elsewhere:
            return run(self.elsewhere, *arrays)
        return jax.lax.platform_dependent(
            *arrays,
            tpu=functools.partial(run, self.on_tpu),
            default=functools.partial(run, self.elsewhere),
        )


def _told(operands: Operands, notes: tuple[str, ...]) -> Operands:
    """The operands; a program with them tells `notes` when it is lowered for a TPU."""
    if not notes:
        return operands
    from kdagen.runtime.lowering import told_on_tpu

    beta = operands["beta"]
    assert beta is not None
    return {**operands, "beta": told_on_tpu(beta, notes)}
