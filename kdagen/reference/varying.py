"""Which mesh axes a value varies over inside `shard_map`, for loops and cotangents."""

from collections.abc import Iterable
from typing import TypeVar

import jax

Tree = TypeVar("Tree")


def varying_axes(*trees: object) -> frozenset[str]:
    """Manual mesh axes over which any of the arrays varies; empty outside `shard_map`."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(trees):
        axes |= frozenset(jax.typeof(leaf).manual_axis_type.varying)
    return axes


def as_varying(tree: Tree, axes: Iterable[str]) -> Tree:
    """The same values, typed as varying over `axes`: a loop's carry must not change its type."""

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(frozenset(axes) - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def varying_alike(tree: Tree) -> Tree:
    """Every array typed as varying over all the axes over which any of them does."""
    return as_varying(tree, varying_axes(tree))


def summed_like(cotangent: jax.Array, primal: jax.Array) -> jax.Array:
    """The cotangent, summed over the axes that it varies over and its primal does not."""
    axes = tuple(sorted(varying_axes(cotangent) - varying_axes(primal)))
    return jax.lax.psum(cotangent, axes) if axes else cotangent
