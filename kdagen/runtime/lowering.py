"""A warning that comes when a program is lowered, and not when it is traced.

A trace does not know the device that it is for where neither a mesh nor a default device tells.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from kdagen.runtime.target import warn_once

_notice = Primitive("kdagen_notice")


def told_on_tpu(x: jax.Array, messages: tuple[str, ...]) -> jax.Array:
    """`x`, with `warn_once` of every message when the program is lowered for a TPU."""
    tell = lambda x: _notice.bind(x, messages=messages)  # noqa: E731
    return jax.lax.platform_dependent(x, tpu=tell, default=lambda x: x)


@_notice.def_abstract_eval
def _type(x: Any, *, messages: tuple[str, ...]) -> Any:
    return x


def _lower(context: Any, x: Any, *, messages: tuple[str, ...]) -> list[Any]:
    for message in messages:
        warn_once(message)
    return [x]


def _batch(arguments: Any, axes: Any, *, messages: tuple[str, ...]) -> tuple[Any, Any]:
    return _notice.bind(*arguments, messages=messages), axes[0]


mlir.register_lowering(_notice, _lower)
batching.primitive_batchers[_notice] = _batch
