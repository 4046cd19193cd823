"""Compile a function for a TPU on a machine that has none.

libtpu reads its flags once, when it is loaded, and two processes that load it abort unless told
that they may. So a compile runs in a process that was started with ``worker_environment``; one such
process compiles as many functions as it likes, for any of the chips, one after another.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kdagen.chips import Chip, get_chip
from kdagen.errors import KdagenError

# Only the listings the schedule reader wants: without the filter a kernel leaves about 1 GB.
_DUMPED_PASSES = "(final|pre-delay)_.*"
_DUMP_FLAG = "--xla_jf_dump_to="

# Memory space assignment, by the names of the generations whose compilers have it.
_KEEP_IN_HBM = {
    "xla_gf_vmem_memory_space_assignment": "false",
    "xla_vf_vmem_memory_space_assignment": "false",
}

FAILURE_KINDS = ("vmem", "unsupported", "other")


class CompileError(KdagenError):
    """A function that the TPU compiler, or the lowering before it, refused.

    Attributes:
      kind: "vmem" (more vector memory than the limit), "unsupported" (no lowering for an
        operation, a type or a layout) or "other".
      message: one short line of what was said.
      used_bytes, limit_bytes: of VMEM where kind is "vmem" and the message held them, else None.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        used_bytes: int | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.used_bytes = used_bytes
        self.limit_bytes = limit_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker sends it to its parent: exceptions pickle by their args alone otherwise.
        return CompileError, (self.kind, self.message, self.used_bytes, self.limit_bytes)


@dataclass(frozen=True)
class CompiledFor:
    """One compiled program.

    Attributes:
      chip: the chip's name.
      libtpu_version, jax_version: of the compiler and of JAX.
      argument_bytes, output_bytes, temporary_bytes: HBM of one device.
      code_bytes: size of the generated code.
      text: the compiled HLO.
      lower_seconds, compile_seconds: tracing and lowering, and the compiler's own part.
      dump_dir: where the listings of this program (and only of this one) lie; None where the
        process was started without a dump directory.
    """

    chip: str
    libtpu_version: str
    jax_version: str
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    code_bytes: int
    text: str
    lower_seconds: float
    compile_seconds: float
    dump_dir: Path | None


def libtpu_version() -> str | None:
    """The installed version of libtpu, or None."""
    for name in ("libtpu", "libtpu-nightly"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def worker_environment(
    dump_dir: Path | str | None = None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a process that compiles.

    Args:
      dump_dir: an existing directory, the process's own, for the listings of the schedule; None
        leaves none.
      base: what to start from, ``os.environ`` where None. Flags in its LIBTPU_INIT_ARGS are kept,
        but for a dump directory.

    Raises:
      ValueError: the path of dump_dir holds white space, which libtpu cannot take.
    """
    environment = dict(os.environ if base is None else base)
    environment.update(
        # The CPU is the default backend; TPU devices come from a topology description.
        JAX_PLATFORMS="cpu",
        # Outside a TPU machine the metadata server is asked for until a time-out.
        TPU_SKIP_MDS_QUERY="1",
        # Without it the second process to load libtpu aborts.
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    # Any values will do: they keep libtpu from complaining that it is on no TPU machine.
    environment.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    environment.setdefault("TPU_ACCELERATOR_TYPE", "v6e-1")
    flags = [
        flag
        for flag in shlex.split(environment.get("LIBTPU_INIT_ARGS", ""))
        if not flag.startswith("--xla_jf_dump_")
    ]
    if dump_dir is not None:
        directory = str(Path(dump_dir).resolve())
        if re.search(r"\s", directory):
            raise ValueError(f"dump_dir: got {directory!r}, expected a path without white space")
        flags += [
            f"{_DUMP_FLAG}{directory}",
            "--xla_jf_dump_llo_text=true",
            f"--xla_jf_dump_llo_pass_label_regex={_DUMPED_PASSES}",
        ]
    environment["LIBTPU_INIT_ARGS"] = " ".join(flags)
    return environment


def current_dump_dir() -> Path | None:
    """The dump directory this process was started with, or None."""
    for flag in shlex.split(os.environ.get("LIBTPU_INIT_ARGS", "")):
        if flag.startswith(_DUMP_FLAG):
            return Path(flag.removeprefix(_DUMP_FLAG))
    return None


def topology_devices(chip: Chip) -> list[Any]:
    """JAX's descriptions of the devices of ``chip``'s topology, to compile for.

    Raises:
      CompileError: libtpu is absent or does not know the chip.
    """
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=chip.topology, **dict(chip.topology_options)
        )
    except Exception as error:
        raise CompileError("other", _short(f"no topology {chip.topology}: {error}")) from error
    return list(topology.devices)


def compile_for(
    chip: Chip,
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: Any = None,
    keep_in_hbm: bool = False,
    static_kwargs: Mapping[str, Any] | None = None,
) -> CompiledFor:
    """Compile ``function(*args)`` for ``chip`` in this process.

    The process must have been started with ``worker_environment`` for the listings to be written;
    the dump directory is emptied first, so that afterwards it holds this program's alone.

    Args:
      chip: what to compile for.
      function: traced under ``jax.jit`` (or already jitted), with ``pltpu.get_tpu_info()``
        answering for the chip.
      args: pytrees of arrays, ``jax.ShapeDtypeStruct`` or (shape, dtype) pairs. Without a sharding
        they lie whole on the topology's first device.
      mesh: for a program of several devices, a ``jax.sharding.Mesh`` over devices of
        ``topology_devices(chip)`` that the shardings of ``args`` name; None is the first device.
      keep_in_hbm: XLA may not move operands into VMEM ahead of a kernel. It does so with small
        ones (on v7x all of a short test's), whose DMAs the kernel then does not issue: set this
        where a small program stands for a larger one.
      static_kwargs: further keyword arguments, not traced.

    Raises:
      CompileError: the compiler refused.
      TypeError: an argument is none of the above.
    """
    import jax
    from jax.sharding import Mesh

    if mesh is None:
        mesh = Mesh(topology_devices(chip)[:1], ("device",))
    if static_kwargs:
        function = functools.partial(function, **static_kwargs)
    structs = [_as_structs(argument, mesh) for argument in args]
    dump_dir = current_dump_dir()
    if dump_dir is not None:
        _empty(dump_dir)
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    try:
        with jax.set_mesh(mesh):
            start = time.perf_counter()
            lowered = jitted.lower(*structs)
            lowered_at = time.perf_counter()
            compiled = lowered.compile(compiler_options=_KEEP_IN_HBM if keep_in_hbm else None)
            end = time.perf_counter()
    except Exception as error:
        raise classify(error) from error
    memory = compiled.memory_analysis()
    return CompiledFor(
        chip=chip.name,
        libtpu_version=libtpu_version() or "unknown",
        jax_version=jax.__version__,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        text=compiled.as_text() or "",
        lower_seconds=lowered_at - start,
        compile_seconds=end - lowered_at,
        dump_dir=dump_dir,
    )


def classify(error: BaseException) -> CompileError:
    """The CompileError for what tracing, lowering or compiling raised."""
    text = str(error)
    if "vmem" in text.lower() and ("RESOURCE_EXHAUSTED" in text or "Ran out of memory" in text):
        used, limit = _vmem_sizes(text)
        return CompileError("vmem", _short(_vmem_message(used, limit) or text), used, limit)
    names = {cls.__name__ for cls in type(error).__mro__}
    unsupported = (
        isinstance(error, NotImplementedError)
        or names & {"LoweringException", "MLIRError", "MosaicError", "VerificationError"}
        or re.search(r"not implemented|unimplemented|unsupported|not supported", text, re.I)
        or "Mosaic failed to compile" in text
    )
    kind = "unsupported" if unsupported else "other"
    return CompileError(kind, _short(f"{type(error).__name__}: {text}"))


def can_compile(chip: Chip, timeout_seconds: float = 120.0) -> str | None:
    """Why this machine cannot compile for ``chip``, or None if it can.

    Asked in a child process, since a libtpu that does not like the machine may end it.
    """
    if libtpu_version() is None:
        return "libtpu is not installed (pip install 'kdagen[tpu]')"
    question = {"name": chip.name, "topology": chip.topology}
    command = [sys.executable, "-m", "kdagen.compiler.aot", json.dumps(question)]
    try:
        child = subprocess.run(
            command,
            env=worker_environment(),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the compiler did not answer within {timeout_seconds:g} s"
    for line in child.stdout.splitlines():
        if line.startswith("{"):
            return json.loads(line)["reason"]
    last = (child.stderr.strip().splitlines() or ["no message"])[-1]
    return f"the compiler's process ended with status {child.returncode}: {_short(last)}"


def _answer_can_compile(question: str) -> None:
    import jax

    asked = json.loads(question)
    chip = dataclasses.replace(get_chip(asked["name"]), topology=asked["topology"])
    reason = None
    try:
        compile_for(chip, lambda x: x + 1, [((8, 128), jax.numpy.float32)])
    except CompileError as error:
        reason = error.message
    print(json.dumps({"reason": reason}))


def _as_structs(argument: Any, mesh: Any) -> Any:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    def is_pair(leaf: Any) -> bool:
        return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[0], tuple | list)

    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        if is_pair(leaf):
            leaf = jax.ShapeDtypeStruct(*leaf)
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"args: got {leaf!r}, expected an array, a ShapeDtypeStruct or (shape, dtype)"
            )
        sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
        sharding = sharding or NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(struct, argument, is_leaf=is_pair)


def _empty(directory: Path) -> None:
    # Only what libtpu writes (names begin with a time stamp): the directory is the caller's.
    for path in directory.iterdir():
        if re.match(r"\d{10,}-", path.name) and path.is_file():
            path.unlink()


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[unit])


def _vmem_sizes(text: str) -> tuple[int | None, int | None]:
    size = r"([\d.]+)([KMG]?)"
    for pattern in (
        rf"with size {size} and limit {size}",
        rf"Used {size} of {size}",
        rf"\(size={size}\) would exceed memory \(size={size}\)",
    ):
        found = re.search(pattern, text)
        if found:
            used, used_unit, limit, limit_unit = found.groups()
            return _bytes(used, used_unit), _bytes(limit, limit_unit)
    return None, None


def _vmem_message(used: int | None, limit: int | None) -> str | None:
    if used is None or limit is None:
        return None
    return f"VMEM: {used / 2**20:.2f} MiB needed, {limit / 2**20:.2f} MiB allowed"


def _short(text: str, length: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


if __name__ == "__main__":
    _answer_can_compile(sys.argv[1])
