"""One chunk-head of the leaving block, and the pack that it is of, as the backward sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike

from kdagen.kernels.backward_step import Step
from kdagen.kernels.lanes import rows


class Item:
    """What the stages of one chunk-head read, where they use it, and hand to one another.

    ``query``, ``key`` [C, KP] f32 are normalised where the call asks for it, by ``query_norm`` and
    ``key_norm``; ``by_gate`` and ``by_log_rate`` are the derivatives of ``gate_gradients.Gate``;
    ``from_start``, ``to_end``, ``left`` and ``right`` the factors of ``decay_tree.Decays``;
    ``whole`` [1, KP] is 2^total, ``keys_to_end`` [C, KP] k e, ``reads`` [KP, 2C] (scale q d; k d)
    transposed, ``related`` [C, 2C] scale Q^T beside N^T.

    Attributes:
      chunk: rows of the chunk.
      d_written: [C, VP] f32, dP.
      d_state: [KP, VP], dS'.
      both: [2C, VP], dout above -dR.
      corrected: reads E, [C, VP] f32.
      d_strength: [C, VP] f32, Z.
    """

    d_written: Any = None
    d_state: Any = None
    both: Any = None
    corrected: Callable[[], jax.Array]
    d_strength: Any = None

    def __init__(self, step: Step, pack: Pack, at: int, x: int):
        """``x`` is the place of item ``at`` in its pack."""
        self._step, self._pack, self._at, self._x = step, pack, at, x
        self.chunk = step.kernel.geometry.chunk

    def _handed(self, name: str) -> jax.Array:
        return self._step.handed(name, self._at)

    query = property(functools.partial(_handed, name="query"))
    key = property(functools.partial(_handed, name="key"))
    query_norm = property(functools.partial(_handed, name="query_norm"))
    key_norm = property(functools.partial(_handed, name="key_norm"))
    by_gate = property(functools.partial(_handed, name="by_gate"))
    by_log_rate = property(functools.partial(_handed, name="by_log_rate"))
    from_start = property(functools.partial(_handed, name="from_start"))
    to_end = property(functools.partial(_handed, name="to_end"))
    right = property(functools.partial(_handed, name="right"))
    whole = property(functools.partial(_handed, name="whole"))
    keys_to_end = property(functools.partial(_handed, name="keys_to_end"))
    reads = property(functools.partial(_handed, name="reads"))
    related = property(functools.partial(_handed, name="related"))

    @property
    def of_one_segment(self) -> jax.Array | None:
        """[C, C] f32, 1 where row and column are of one segment, 0 where they are not, for rows not
        above columns; None without segments."""
        return self._step.of_chunk("of_one_segment", self._at)

    @property
    def reached(self) -> jax.Array | None:
        """``decay_tree.reaching`` of a packed chunk with a base."""
        return self._step.of_chunk("reached", self._at)

    @property
    def written_within(self) -> jax.Array | None:
        """[C, VP] f32 to be added to dP, if states of segments may add anything."""
        states = self._step.states
        return None if states is None else states.written_within(self._at)

    @property
    def left_within(self) -> jax.Array | None:
        """[KP, VP] f32 to be added to the cotangent of the state before the chunk, likewise."""
        states = self._step.states
        return None if states is None else states.left_within(self._at)

    def keep(self, name: str, x: jax.Array) -> None:
        """Keeps ``both`` or ``written`` for the states of segments."""
        if self._step.states is not None:
            self._step.states.keep(name, self._at, x)

    def left(self, level: int) -> jax.Array:
        """[C, KP] f32, factors of the rows t of a level, and of its rows j but in the base."""
        return self._step.handed("left", self._at, level)

    def rows(self, level: int) -> jax.Array:
        """[2 height, KP], the left operand of the product of a level."""
        return self._step.handed(f"rows_{level}", self._at)

    def columns(self, level: int) -> jax.Array:
        """[C, KP], the right operand of the product of a level."""
        made = self._step.handed(f"columns_{level}", self._pack.number)
        return rows(made, self._x * self.chunk, self.chunk)

    @property
    def own(self) -> jax.Array | None:
        """[C, VP] f32, the diagonal of scale Q in every lane where the tree has none."""
        if self._step.kernel.handover.base > 1:
            return None
        return rows(self._step.handed("own", self._pack.number), self._x * self.chunk, self.chunk)

    @property
    def write(self) -> jax.Array:
        """[C, VP] f32, b in every lane."""
        return rows(self._step.handed("write", self._pack.number), self._x * self.chunk, self.chunk)

    def d_output(self, dtype: DTypeLike) -> jax.Array:
        """[C, VP] in ``dtype``."""
        return self._step.d_output(self._at, dtype)

    def state(self) -> jax.Array:
        """[KP, VP], at the start of the chunk."""
        return self._step.state(self._at)

    def inverse(self) -> jax.Array:
        """X - I, [C, C]: what it leaves as it is is spared the rounding of an operand."""
        return self._pack.inverse()[:, self._x * self.chunk : (self._x + 1) * self.chunk]

    @property
    def transposed(self) -> jax.Array:
        """X^T - I, [C, C]."""
        return rows(
            self._step.handed("transposed", self._pack.number), self._x * self.chunk, self.chunk
        )


class Pack:
    """A pack of chunk-heads of the leaving block.

    Attributes:
      number: of the pack.
      items: its chunk-heads.
    """

    def __init__(self, step: Step, number: int):
        self._step, self.number = step, number
        self.items = [Item(step, self, at, x) for x, at in enumerate(step.items(number))]

    def inverse(self) -> jax.Array:
        """X - I of every chunk-head, [C, 128]."""
        return self._step.handed("inverse", self.number)
