"""What a trace will run on, and the words in which a fallback is told."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass

import jax
from jaxlib import xla_client

from kdagen.errors import KdagenError


class NoKernelError(KdagenError, NotImplementedError):
    """No Pallas kernel serves the call; the message says why."""


class KdagenWarning(UserWarning):
    """A call runs otherwise than it could; each reason is told once a process."""


_told: set[str] = set()


def warn_once(message: str) -> None:
    """A `KdagenWarning`, unless the same message was given before in this process.

    Of the line that called kdagen, however much of JAX lies between.
    """
    if message not in _told:
        _told.add(message)
        warnings.warn(message, KdagenWarning, stacklevel=_level_of_caller())


# Packages whose code stands between a call and what is told of it.
_BETWEEN = ("kdagen", "jax", "contextlib", "functools")


def _level_of_caller() -> int:
    """What ``stacklevel`` is for the function that asks, to tell the first frame of other code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    return level


def forget_warnings() -> None:
    """Lets every reason be told again."""
    _told.clear()


@dataclass(frozen=True)
class Target:
    """The device that a trace is for.

    Attributes:
      is_tpu: whether it is a TPU.
      may_be_tpu: it is not, but this process has the TPU compiler loaded, so that the trace may be
        lowered for a TPU all the same: shardings alone do not tell a trace what it is for.
      device_kind: as JAX names it.
      description: where that is known from, in words.
    """

    is_tpu: bool
    may_be_tpu: bool
    device_kind: str
    description: str


def find_target() -> Target:
    """The mesh of `jax.set_mesh` if there is one, which may be that of another machine; else the
    default device or JAX's first."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        origin = "the mesh in use"
    else:
        chosen = jax.config.values["jax_default_device"]
        device = chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0]
        origin = "the default device"
    is_tpu = device.platform == "tpu"
    return Target(
        is_tpu,
        not is_tpu and origin == "the default device" and xla_client.pjrt_plugin_loaded("tpu"),
        device.device_kind,
        f"{origin} is {device.device_kind}",
    )
