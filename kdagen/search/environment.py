"""What results depend on beside the problem and the variant."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

import kdagen
from kdagen.chips import Chip
from kdagen.compiler.aot import libtpu_version
from kdagen.generate import code_hash
from kdagen.gradient.source import step_hash
from kdagen.store.rows import Environment

_PACKAGE = Path(kdagen.__file__).parent
_MODEL = ("compiler", "measure/offline.py", "measure/operands.py")
_STEP_MODEL = (*_MODEL, "measure/steps.py")


def current(chip: Chip, trained: bool = False) -> Environment:
    """The environment of results that this installation makes for ``chip``, of forwards or of
    training steps: code that only the gradient has leaves the results of forwards as they are."""
    return Environment(
        chip=chip.name,
        jax=metadata.version("jax"),
        jaxlib=metadata.version("jaxlib"),
        libtpu=libtpu_version() or "none",
        kdagen=_version(),
        # Not the cached hash: a run asks again, to see whether the code has changed under it.
        generator=(step_hash if trained else code_hash).__wrapped__(),
        model=_model_hash(chip, _STEP_MODEL if trained else _MODEL),
    )


def _version() -> str:
    try:
        return metadata.version("kdagen")
    except metadata.PackageNotFoundError:
        return "source"  # run from a source tree that was not installed


def _model_hash(chip: Chip, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr(chip).encode())
    for name in names:
        path = _PACKAGE / name
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
