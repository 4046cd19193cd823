"""Modelled times of a whole compiled program: its kernels, and what XLA runs around them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compiled_text import copied_bytes, offloaded_bytes, unlisted


@dataclass(frozen=True)
class Program:
    """Modelled times of one compiled program on one device, in seconds.

    Attributes:
      kernels: by name.
      around: of all that XLA runs before, between and after them.
      attributed: operations without a schedule of their own, by name the one that each equals and
        whose time it was given.
      uncounted: operations that no time is known of, as where their code cannot be followed.
      kernel_bytes, bytes: HBM traffic of the kernels, and of all.
      copied_bytes: of the latter, what XLA copies to or from VMEM at the same time as it runs other
        operations, which counts for no time.
      offloaded_bytes, offloaded_seconds: what SparseCores move, see
        ``compiled_text.offloaded_bytes``, and the least time that HBM takes for it.
      temporary_bytes: HBM beside operands and results, by the compiler's memory analysis.
    """

    kernels: dict[str, float]
    around: float
    attributed: dict[str, str]
    uncounted: tuple[str, ...]
    kernel_bytes: int
    bytes: int
    copied_bytes: int
    offloaded_bytes: int
    offloaded_seconds: float
    temporary_bytes: int

    @property
    def kernel_seconds(self) -> float:
        return sum(self.kernels.values())

    @property
    def seconds(self) -> float:
        """Of what runs on the TensorCore."""
        return self.kernel_seconds + self.around

    @property
    def all_seconds(self) -> float:
        """With what SparseCores move: it may run beside something else, but then shares HBM."""
        return self.seconds + self.offloaded_seconds

    def lines(self, who: str) -> list[str]:
        """What a comparison prints of it."""
        text = [
            f"  {who:8} kernels {self.kernel_seconds * 1e6:8.1f} us, {len(self.kernels)} "
            f"of them, {self.kernel_bytes / 1e6:7.1f} MB of HBM traffic; XLA around them "
            f"{self.around * 1e6:6.1f} us; together {self.seconds * 1e6:8.1f} us, "
            f"{self.bytes / 1e6:7.1f} MB, {self.copied_bytes / 1e6:.1f} of them copied to or from "
            f"VMEM meanwhile; {self.temporary_bytes / 1e6:.1f} MB of temporaries"
        ]
        text += [f"    {name}: {s * 1e6:.1f} us" for name, s in self.kernels.items()]
        if self.offloaded_bytes:
            text.append(
                f"    {self.offloaded_bytes / 1e6:.1f} MB more are moved by SparseCores, at the "
                f"speed of HBM in {self.offloaded_seconds * 1e6:.1f} us"
            )
        if self.attributed:
            pairs = ", ".join(f"{name} as {like}" for name, like in self.attributed.items())
            text.append(f"    {len(self.attributed)} counted as the equal ones listed: {pairs}")
        if self.uncounted:
            text.append(f"    not counted, so at least: {', '.join(self.uncounted)}")
        return text


def read_program(
    chip: Any,
    function: Any,
    args: Any,
    scalars: dict[str, dict],
    numbers: Sequence[Sequence[int]] = (),
) -> Program:
    """Compile and read a program.

    Args:
      scalars: by kernel name, as for ``predict``.
      numbers: vectors that all other kernels are told, by their lengths; as ``offline.told``.
    """
    from kdagen.compiler.aot import compile_for
    from kdagen.compiler.decode import WalkError
    from kdagen.compiler.model import hbm_floor_seconds, predict
    from kdagen.compiler.schedule import read_schedules
    from kdagen.measure.offline import told

    compiled = compile_for(chip, function, args)
    assert compiled.dump_dir is not None
    found, lost = {}, []
    for schedule in read_schedules(compiled.dump_dir, chip):
        given = scalars.get(re.sub(r"\.\d+$", "", schedule.name))
        if given is None and schedule.is_kernel and numbers:
            given = told(schedule, numbers)
        try:
            predicted = predict(schedule, scalars=given)
        except WalkError:
            if schedule.is_kernel:
                raise
            lost.append(schedule.name)
            continue
        found[schedule.name] = schedule.is_kernel, predicted.seconds, predicted.hbm_bytes
    copied, offloaded = copied_bytes(compiled.text), offloaded_bytes(compiled.text)
    missing = unlisted(compiled.text, {**found, **dict.fromkeys(lost)})
    attributed = {name: like for name, like in missing.items() if like is not None}
    found |= {name: found[like] for name, like in attributed.items()}
    return Program(
        kernels={name: seconds for name, (kernel, seconds, _) in found.items() if kernel},
        around=sum(seconds for kernel, seconds, _ in found.values() if not kernel),
        attributed=attributed,
        uncounted=(*lost, *(name for name, like in missing.items() if like is None)),
        kernel_bytes=sum(moved for kernel, _, moved in found.values() if kernel),
        bytes=sum(moved for _, _, moved in found.values()) + copied,
        copied_bytes=copied,
        offloaded_bytes=offloaded,
        offloaded_seconds=hbm_floor_seconds(chip, offloaded),
        temporary_bytes=compiled.temporary_bytes,
    )
