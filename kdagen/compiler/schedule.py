"""What the compiler made of a kernel: read from the listings a compile leaves.

compiled = compile_for(chip, function, args)
schedule = read_schedule(compiled.dump_dir, chip, "kernel_name")
schedule.report()
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kdagen.chips import Chip
from kdagen.compiler.bundles import Listing, read_listing
from kdagen.compiler.decode import Program, decode
from kdagen.compiler.slots import SlotTable, occupancy, read_slots, read_vmem, stall_cycles
from kdagen.compiler.walk import DmaTiming, Totals, Walk, walk
from kdagen.errors import KdagenError

Scalars = Mapping[int, Sequence[int]]

_FILE = re.compile(
    r"\d+-(?P<name>.+)-\d+-"
    r"(?P<kind>final_bundles\.txt|vmem_report\.html"
    r"|(?:final|pre-delay)_hlo-static-per-bundle-utilization\.txt)"
)
_SCOPED_LIMIT = re.compile(
    r'"scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
)


class ScheduleError(KdagenError):
    """Listings that are not there or not understood; the message says which."""


@dataclass(frozen=True)
class MainLoop:
    """The loop that a kernel spends its time in: the one over its grid.

    Attributes:
      head: index of its first bundle.
      bundles: in its body, nested loops included: the code size that instruction fetch sees.
      rounds: iterations begun after the first.
      bundles_per_round, cycles_per_round: executed, mean over those rounds.
    """

    head: int
    bundles: int
    rounds: int
    bundles_per_round: float
    cycles_per_round: float


@dataclass(frozen=True)
class Report:
    """Counts of one execution of a kernel, all cores of the device together.

    Attributes:
      bundles: executed.
      cycles: by the compiler's own count, stalls included, waits for DMA not, of the slowest core.
      bytes_in, bytes_out, bytes_local, dmas: moved from HBM, to HBM, inside the core; DMAs started.
      spill_stores, spill_loads: vector spills and fills executed.
      slot_use: by unit, the share of its slots used per cycle of the schedule.
      main_loop: None for a kernel without a loop.
      static_bundles: size of the whole program.
      vmem_bytes: VMEM the kernel was given.
      vmem_limit_bytes: what it could have had.
    """

    bundles: int
    cycles: float
    bytes_in: int
    bytes_out: int
    bytes_local: int
    dmas: int
    spill_stores: int
    spill_loads: int
    slot_use: dict[str, float]
    main_loop: MainLoop | None
    static_bundles: int
    vmem_bytes: int
    vmem_limit_bytes: int


@dataclass(frozen=True)
class Schedule:
    """The schedule of one compiled operation.

    Attributes:
      chip: it was compiled for.
      listing: the final bundles.
      slots: operations issued in each, by unit.
      occupancy: slots kept busy in each and in the stall behind it, by unit.
      durations: cycles of each, the stall behind it included, by the compiler's count.
      vmem_bytes, vmem_limit_bytes: VMEM allocated to it, and its limit.
    """

    chip: Chip
    listing: Listing
    slots: SlotTable
    occupancy: SlotTable
    durations: tuple[int, ...]
    vmem_bytes: int
    vmem_limit_bytes: int

    @property
    def name(self) -> str:
        return self.listing.name

    @property
    def is_kernel(self) -> bool:
        """Whether it is a Pallas kernel, rather than something XLA made."""
        # what takes nothing is a buffer that XLA sets aside
        takes = any(operand.kind == "input" for operand in self.listing.operands)
        return self.listing.opcode == "custom-call" and takes

    @property
    def cores(self) -> int:
        """Cores of the device that run it."""
        return self.chip.cores_per_device

    @cached_property
    def program(self) -> Program:
        return decode(self.listing)

    @property
    def steps(self) -> int | None:
        """Length of the last grid axis (of the compiled kernel), None without a single grid."""
        return self.listing.grids[0][-1] if len(self.listing.grids) == 1 else None

    def walk(
        self, scalars: Scalars | None = None, timing: DmaTiming | None = None, core: int = 0
    ) -> Walk:
        """Follow the scalar code on one core.

        Args:
          scalars: by operand index, the values of scalar-prefetch operands, flattened.
          timing: of DMAs, None to count without waiting.
          core: which core of a megacore.

        Raises:
          WalkError: it depends on data not given.
        """
        return walk(
            self.listing,
            self.program,
            granule_bytes=self.chip.dma_granule_bytes,
            delay_slots=self.chip.branch_delay_slots,
            durations=self.durations,
            timing=timing,
            scalars=scalars,
            core=core,
        )

    def main_loop(self, walked: Walk) -> MainLoop | None:
        """The outermost loop with the most cycles in ``walked``."""
        spans = {
            head: totals[-1] - totals[0]
            for head, totals in walked.rounds.items()
            if len(totals) > 1
        }
        if not spans:
            return None
        head = max(spans, key=lambda key: spans[key].issue_cycles)
        rounds = len(walked.rounds[head]) - 1
        tail = max(
            index
            for index, operations in self.program.steps.items()
            for step in operations
            if step.kind == "branch" and step.detail == head and index >= head
        )
        cycles = 0
        end = tail + 1
        while end < len(self.durations) and cycles < self.chip.branch_delay_slots:
            cycles += self.durations[end]
            end += 1
        return MainLoop(
            head=head,
            bundles=end - head,
            rounds=rounds,
            bundles_per_round=spans[head].bundles / rounds,
            cycles_per_round=spans[head].issue_cycles / rounds,
        )

    def report(self, scalars: Scalars | None = None) -> Report:
        """Counts of one execution, ``scalars`` as for ``walk``."""
        walks = [self.walk(scalars, core=core) for core in range(self.cores)]
        totals = sum((one.totals for one in walks), Totals())
        visits = [sum(counts) for counts in zip(*(one.visits for one in walks), strict=True)]

        def executed(table: SlotTable, unit: str) -> int:
            return sum(map(int.__mul__, visits, table.column(unit)))

        cycles = totals.issue_cycles
        return Report(
            bundles=int(totals.bundles),
            cycles=max(one.totals.issue_cycles for one in walks),
            bytes_in=int(totals.bytes_in),
            bytes_out=int(totals.bytes_out),
            bytes_local=int(totals.bytes_local),
            dmas=int(totals.dmas),
            spill_stores=executed(self.slots, "VSTORE:SPILL"),
            spill_loads=executed(self.slots, "VLOAD:FILL"),
            slot_use={
                unit: executed(self.occupancy, unit) / (capacity * cycles)
                for unit, capacity in zip(self.slots.units, self.slots.capacities, strict=True)
            },
            main_loop=self.main_loop(walks[0]),
            static_bundles=len(self.listing.bundles),
            vmem_bytes=self.vmem_bytes,
            vmem_limit_bytes=self.vmem_limit_bytes,
        )


def read_schedules(dump_dir: Path | str, chip: Chip) -> list[Schedule]:
    """Every operation of the program whose listings lie in ``dump_dir``, in the order compiled.

    Raises:
      ScheduleError: the directory holds no listings.
    """
    directory = Path(dump_dir)
    files: dict[str, dict[str, Path]] = {}
    vmem: dict[str, int] = {}
    limits: dict[str, int] = {}
    for path in sorted(directory.iterdir()):
        if path.name.endswith("TLP-hlo.txt"):
            limits |= _scoped_limits(path)
        found = _FILE.fullmatch(path.name)
        if not found:
            continue
        if found["kind"] == "vmem_report.html":
            vmem |= read_vmem(path)
        elif "schedule-analysis" not in path.name:
            files.setdefault(found["name"], {})[found["kind"]] = path
    if not files:
        raise ScheduleError(
            f"{directory}: no listings; was the process started with worker_environment(dump_dir)?"
        )
    schedules = []
    for name, paths in files.items():
        # The whole program's entry and the runtime's own code around it.
        if name == "TLP" or name.startswith("<"):
            continue
        if len(paths) != 3:
            raise ScheduleError(f"{name}: found only {', '.join(paths)} of its listings")
        final = read_slots(paths["final_hlo-static-per-bundle-utilization.txt"])
        before = read_slots(paths["pre-delay_hlo-static-per-bundle-utilization.txt"])
        listing = read_listing(paths["final_bundles.txt"])
        if len(listing.bundles) != len(final.rows):
            raise ScheduleError(
                f"{name}: {len(listing.bundles)} bundles but {len(final.rows)} rows of slot use"
            )
        durations = stall_cycles(final, before)
        schedules.append(
            Schedule(
                chip=chip,
                listing=listing,
                slots=final,
                occupancy=occupancy(before, durations),
                durations=durations,
                vmem_bytes=vmem.get(listing.name, 0),
                vmem_limit_bytes=limits.get(listing.name, chip.default_vmem_limit_bytes),
            )
        )
    return schedules


def read_schedule(dump_dir: Path | str, chip: Chip, kernel: str | None = None) -> Schedule:
    """The schedule of one Pallas kernel.

    Args:
      dump_dir: ``CompiledFor.dump_dir``.
      chip: the program was compiled for.
      kernel: name given to ``pallas_call``; None where the program holds a single kernel.

    Raises:
      ScheduleError: there is no such kernel, or more than one.
    """
    found = [schedule for schedule in read_schedules(dump_dir, chip) if schedule.is_kernel]
    names = ", ".join(schedule.name for schedule in found) or "none"
    if kernel is not None:
        pattern = re.compile(rf"{re.escape(kernel)}(\.\d+)?")
        found = [schedule for schedule in found if pattern.fullmatch(schedule.name)]
    if len(found) != 1:
        wanted = "a single kernel" if kernel is None else f"one kernel named {kernel!r}"
        raise ScheduleError(f"kernel: expected {wanted}, found {names}")
    return found[0]


def _scoped_limits(path: Path) -> dict[str, int]:
    """The VMEM limit of each operation that has its own, from the compiled HLO."""
    limits = {}
    for line in path.read_text(errors="replace").splitlines():
        named = re.match(r"\s*(?:ROOT )?%(\S+) = ", line)
        limit = _SCOPED_LIMIT.search(line)
        if named and limit:
            limits[named.group(1)] = int(limit.group(1))
    return limits
