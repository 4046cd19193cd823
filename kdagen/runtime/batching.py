"""`jax.vmap` of a function that works on batch rows: what is mapped becomes more rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

Arrays = dict[str, Any]


def over_rows(function: Callable[[Arrays], Arrays], axes: Mapping[str, int]) -> Any:
    """`function`, which under `jax.vmap` runs once, on all the rows of all that is mapped.

    A Pallas kernel whose operands stay in HBM has no batching rule for a TPU.

    Args:
      function: from arrays by name to arrays by name, None where there is none.
      axes: of each array with batch rows, argument or result, its axis of the rows. An array that
        is not named here has none: where such an argument is mapped, or such a result is made, the
        mapped calls run one after another.
    """

    @custom_vmap
    def run(arguments: Arrays) -> Arrays:
        return function(arguments)

    @run.def_vmap
    def _(size: int, mapped: Any, arguments: Arrays) -> tuple[Arrays, Any]:
        (of_name,) = mapped
        moving = {name for name, is_mapped in of_name.items() if is_mapped}
        results = jax.eval_shape(function, _one_of(arguments, moving))
        made = {name for name, x in results.items() if x is not None}
        everywhere = {name: name in made or None for name in results}
        if not (moving | made) <= axes.keys():
            fixed = {name: x for name, x in arguments.items() if name not in moving}
            found = jax.lax.map(
                lambda one: run({**fixed, **one}), {name: arguments[name] for name in moving}
            )
            return found, everywhere
        together = {}
        for name, x in arguments.items():
            if x is None or name not in axes:
                together[name] = x
                continue
            every = x if name in moving else jnp.broadcast_to(x[None], (size, *x.shape))
            together[name] = _merged(every, axes[name])
        found = run(together)
        return {n: _parted(x, size, axes[n]) for n, x in found.items()}, everywhere

    return run


def _one_of(arguments: Arrays, moving: set[str]) -> Arrays:
    return {
        name: jax.eval_shape(lambda x: x[0], x) if name in moving else x
        for name, x in arguments.items()
    }


def _merged(x: jax.Array, axis: int) -> jax.Array:
    """[n, ..., B, ...] to [..., n * B, ...], B being axis `axis` of the result."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _parted(x: jax.Array | None, size: int, axis: int) -> jax.Array | None:
    """The inverse of `_merged`."""
    if x is None:
        return None
    return jnp.moveaxis(x.reshape(*x.shape[:axis], size, -1, *x.shape[axis + 1 :]), axis, 0)
