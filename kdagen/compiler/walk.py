"""Follow a kernel's scalar code: what it executes, how often, and what it moves.

The walk runs loops and predicated branches as the core would, feeds scalar-prefetch operands with
their values, and keeps time: each bundle takes its cycles, DMAs share one queue to HBM, and a wait
lasts until the data are there. A branch or a DMA that depends on data the walk does not have is an
error, never a guess.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kdagen.compiler.bundles import NO_SPACE, Listing
from kdagen.compiler.decode import (
    MASK,
    OPERAND_BASE,
    UNKNOWN,
    Program,
    Step,
    WalkError,
    allocation_address,
)

_MAX_BRANCHES = 20_000_000


@dataclass(frozen=True)
class DmaTiming:
    """HBM as the walk times it: bytes per cycle of one shared queue, and latency in cycles."""

    bytes_per_cycle: float
    latency_cycles: float


@dataclass(frozen=True)
class Totals:
    """Running totals of a walk.

    Attributes:
      cycles: time, waits for DMA included (equal to ``issue_cycles`` in a walk without timing).
      issue_cycles: time of the bundles alone.
      bundles: executed.
      bytes_in, bytes_out: HBM to core and core to HBM.
      bytes_local: between memories of the core.
      dmas: started.
    """

    cycles: float = 0.0
    issue_cycles: float = 0.0
    bundles: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    bytes_local: float = 0.0
    dmas: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def __sub__(self, other: Totals) -> Totals:
        return self + other * -1

    def __mul__(self, factor: float) -> Totals:
        return Totals(*(value * factor for value in self.values()))

    def values(self) -> tuple[float, ...]:
        return (
            self.cycles,
            self.issue_cycles,
            self.bundles,
            self.bytes_in,
            self.bytes_out,
            self.bytes_local,
            self.dmas,
        )


@dataclass(frozen=True)
class Walk:
    """What one core did.

    Attributes:
      totals: at the end, the last DMA included.
      visits: how often each bundle was executed.
      rounds: for each outermost loop, by the bundle index of its head, the totals each time its
        back edge was taken.
    """

    totals: Totals
    visits: tuple[int, ...]
    rounds: dict[int, tuple[Totals, ...]]


def walk(
    listing: Listing,
    program: Program,
    *,
    granule_bytes: int,
    delay_slots: int,
    durations: Sequence[float] | None = None,
    timing: DmaTiming | None = None,
    scalars: Mapping[int, Sequence[int]] | None = None,
    core: int = 0,
) -> Walk:
    """Run ``program``, the decoded ``listing``, from its first bundle to its last.

    Args:
      granule_bytes: unit of DMA sizes.
      delay_slots: cycles that still issue after a taken branch. Empty bundles in them may be folded
        into one that lasts longer, so it is the durations that say where they end.
      durations: cycles of each bundle, 1 each where None.
      timing: of DMAs; None completes them at once.
      scalars: values of scalar-prefetch operands by operand index, flattened.
      core: number of this core in a megacore.

    Raises:
      WalkError: control or a DMA depends on data not given, or a wait can never end.
    """
    return _Walker(listing, program, granule_bytes, durations, timing, scalars or {}, core).run(
        delay_slots
    )


class _Walker:
    def __init__(
        self,
        listing: Listing,
        program: Program,
        granule_bytes: int,
        durations: Sequence[float] | None,
        timing: DmaTiming | None,
        scalars: Mapping[int, Sequence[int]],
        core: int,
    ) -> None:
        self.listing = listing
        self.program = program
        self.granule_bytes = granule_bytes
        self.elapsed = [0.0, *accumulate(durations or [1.0] * len(listing.bundles))]
        self.timing = timing
        self.scalars = scalars
        self.slots = list(program.initial)
        self.memory: dict[int, Any] = {}
        for operand in listing.operands:
            address = OPERAND_BASE * (operand.index + 1)
            if operand.space == "smem":
                self.fill(address, operand.index)
            elif operand.space == NO_SPACE:
                # one number: the register holds it, and not where it lies
                given = self.scalars.get(operand.index)
                value = UNKNOWN if given is None else int(given[0]) & MASK
                self.slots = [value if x == address else x for x in self.slots]
        if listing.core_id_allocation is not None:
            self.memory[allocation_address(listing.core_id_allocation)] = core
        self.time = 0.0
        self.issued = 0.0
        self.bundles = 0
        self.moved = Counter({"in": 0, "out": 0, "local": 0})
        self.dmas = 0
        self.queue_free = 0.0
        self.last_dma = 0.0
        self.levels: Counter[int] = Counter()
        self.arrivals: dict[int, list[tuple[float, int]]] = {}

    def totals(self) -> Totals:
        return Totals(
            self.time,
            self.issued,
            self.bundles,
            self.moved["in"],
            self.moved["out"],
            self.moved["local"],
            self.dmas,
        )

    def run(self, delay_slots: int) -> Walk:
        count = len(self.listing.bundles)
        active = sorted(self.program.steps)
        following = [count] * (count + 1)
        position = len(active)
        for index in range(count, -1, -1):
            if position and active[position - 1] >= index:
                position -= 1
            following[index] = active[position] if position < len(active) else count
        runs: Counter[tuple[int, int]] = Counter()
        rounds: dict[int, list[Totals]] = {}
        branches = 0
        start = here = 0
        stop, target = count, count
        while start < count:
            index = following[here]
            if index < stop:
                self.advance(here, index)
                taken = self.execute(index)
                self.advance(index, index + 1)
                here = index + 1
                # A branch in the delay slots of a taken one has no effect.
                if taken is not None and stop == count:
                    end = self.elapsed[index] + 1 + delay_slots
                    stop, target = min(bisect_left(self.elapsed, end), count), taken
                continue
            self.advance(here, stop)
            runs[start, stop] += 1
            backward = target <= start or target < stop
            start = here = target
            if backward and start < count and self.listing.bundles[start].depth == 1:
                rounds.setdefault(start, []).append(self.totals())
            stop, target = count, count
            branches += 1
            if branches > _MAX_BRANCHES:
                raise WalkError(f"{self.listing.name}: no end after {branches} branches")
        self.time = max(self.time, self.last_dma)
        visits = [0] * (count + 1)
        for (first, last), times in runs.items():
            visits[first] += times
            visits[last] -= times
        return Walk(
            totals=self.totals(),
            visits=tuple(accumulate(visits[:count])),
            rounds={head: tuple(totals) for head, totals in rounds.items()},
        )

    def advance(self, first: int, last: int) -> None:
        cycles = self.elapsed[last] - self.elapsed[first]
        self.time += cycles
        self.issued += cycles
        self.bundles += last - first

    def execute(self, index: int) -> int | None:
        """Run one bundle, every read before any write; the target of a taken branch, or None."""
        slots = self.slots
        for result, constant, registers in self.program.addresses[index]:
            parts = [slots[register] for register in registers]
            slots[result] = UNKNOWN if UNKNOWN in parts else _address(constant + sum(parts))
        writes = []
        taken = None
        for step in self.program.steps[index]:
            runs = True
            if step.predicate >= 0:
                condition = slots[step.predicate]
                if condition is UNKNOWN:
                    if step.kind in ("branch", "dma", "wait", "add", "clear"):
                        raise self.error(index, f"a {step.kind} depends on data not given")
                    if step.kind == "store":
                        self.memory[slots[step.sources[0]]] = UNKNOWN
                    else:
                        writes.append((step.result, UNKNOWN))
                    continue
                runs = bool(condition) != step.negated
            if not runs:
                if step.otherwise >= 0:
                    writes.append((step.result, slots[step.otherwise]))
                continue
            if step.kind == "set":
                values = [slots[source] for source in step.sources]
                writes.append((step.result, step.function(*values) if step.function else UNKNOWN))
            elif step.kind == "load":
                writes.append((step.result, self.memory.get(slots[step.sources[0]], UNKNOWN)))
            elif step.kind == "branch":
                taken = step.detail if taken is None else taken
            else:
                self.effect(step, index)
        for slot, value in writes:
            slots[slot] = value
        return taken

    def effect(self, step: Step, index: int) -> None:
        values = [self.slots[source] for source in step.sources]
        if step.kind == "store":
            self.memory[values[0]] = values[1] if len(values) > 1 else UNKNOWN
        elif step.kind == "dma":
            self.start_dma(step, values, index)
        elif step.kind == "wait":
            self.wait(values[0], values[1], index)
        elif step.kind == "add":
            amount = values[1]
            self.levels[values[0]] += amount - (1 << 32) if amount >= 1 << 31 else amount
        elif step.kind == "clear":
            self.levels[values[0]] = 0

    def start_dma(self, step: Step, values: list[Any], index: int) -> None:
        source, granules, destination, flag = values
        if granules is UNKNOWN or flag is UNKNOWN:
            raise self.error(index, "the size of a DMA depends on data not given")
        spaces = step.detail or (self.space(source), self.space(destination))
        size = granules * self.granule_bytes
        if spaces[0] == "hbm":
            direction = "in"
        elif spaces[1] == "hbm":
            direction = "out"
        else:
            direction = "local"
        self.moved[direction] += size
        if spaces == ("hbm", "hbm"):
            self.moved["out"] += size
            size *= 2
        self.dmas += 1
        if spaces[1] == "smem" and source is not UNKNOWN and source % OPERAND_BASE == 0:
            self.fill(destination, source // OPERAND_BASE - 1)
        done = self.time
        if self.timing:
            if direction != "local":
                begin = max(self.time, self.queue_free)
                done = self.queue_free = begin + size / self.timing.bytes_per_cycle
            done += self.timing.latency_cycles
        self.last_dma = max(self.last_dma, done)
        self.arrivals.setdefault(flag, []).append((done, granules))

    def wait(self, flag: int, granules: int, index: int) -> None:
        arrivals = self.arrivals.get(flag, [])
        arrivals.sort()
        while self.levels[flag] < granules:
            if not arrivals:
                raise self.error(index, "waits for a DMA that nothing starts")
            done, amount = arrivals.pop(0)
            self.levels[flag] += amount
            self.time = max(self.time, done)

    def space(self, address: Any) -> str:
        if address is not UNKNOWN and address >= OPERAND_BASE:
            operand = address // OPERAND_BASE - 1
            for declared in self.listing.operands:
                if declared.index == operand:
                    return declared.space
        return "vmem"

    def fill(self, address: int, operand: int) -> None:
        for offset, value in enumerate(self.scalars.get(operand, ())):
            self.memory[address + offset] = int(value) & MASK

    def error(self, index: int, what: str) -> WalkError:
        address = self.listing.bundles[index].address
        return WalkError(f"{self.listing.name}: at bundle {address:#x} {what}")


def _address(value: int) -> int:
    return value if value >= OPERAND_BASE else value & MASK
