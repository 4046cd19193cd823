"""Readers of the listings that lie beside the final bundles: slot use, stalls, VMEM.

libtpu writes a row of slot counts for every bundle, twice: for the final bundles, and for the
schedule before it drops the empty bundles in which it waits for a result ("pre-delay"; the hardware
interlocks instead). The second is the compiler's own cycle count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

# Columns that count an operation once, in the bundle that issues it. A matrix or cross-lane
# operation is counted in later bundles too while it occupies its unit.
_OCCUPYING = frozenset({"MXU", "MATMUL", "MATPUSH", "XLU"})

Row = tuple[int, ...]


@dataclass(frozen=True)
class SlotTable:
    """Slot use of a schedule: ``rows[i][j]`` slots of unit ``units[j]`` in bundle i.

    ``capacities[j]`` is how many slots of that unit a bundle has.
    """

    units: tuple[str, ...]
    capacities: tuple[int, ...]
    rows: tuple[Row, ...]

    def column(self, unit: str) -> tuple[int, ...]:
        """Counts of one unit by bundle.

        Raises:
          KeyError: this compiler's listing has no such unit.
        """
        if unit not in self.units:
            raise KeyError(f"unit: got {unit!r}, expected one of {', '.join(self.units)}")
        position = self.units.index(unit)
        return tuple(row[position] for row in self.rows)


def read_slots(path: Path) -> SlotTable:
    """Parse a ``*static-per-bundle-utilization.txt``; the units are those of its own header.

    Raises:
      ValueError: the file is not such a listing.
    """
    lines = path.read_text().splitlines()
    if len(lines) < 4 or "," not in lines[1]:
        raise ValueError(f"{path.name}: got {lines[:2]!r}, expected a header naming the units")
    units = tuple(name.strip() for name in lines[1].split(","))
    capacities = tuple(int(word) for word in lines[2].split())
    rows = tuple(tuple(int(word) for word in line.split()) for line in lines[4:] if line.strip())
    if len(capacities) != len(units) or any(len(row) != len(units) for row in rows):
        raise ValueError(f"{path.name}: rows do not match the {len(units)} units of the header")
    return SlotTable(units, capacities, rows)


def stall_cycles(final: SlotTable, before: SlotTable) -> tuple[int, ...]:
    """Cycles of every final bundle, the stall behind it included.

    Both listings hold the same bundles in the same order, ``before`` with empty ones between. Rows
    are matched on the units that count an operation once, as the longest runs that agree: an
    operation that has moved between the listings must not shift all that comes after it.
    """
    kept = [index for index, unit in enumerate(final.units) if unit not in _OCCUPYING]

    def busy(table: SlotTable) -> list[tuple[int, Row]]:
        projected = (tuple(row[index] for index in kept) for row in table.rows)
        return [(index, row) for index, row in enumerate(projected) if any(row)]

    finals, befores = busy(final), busy(before)
    positions = {
        finals[index][0]: befores[other][0]
        for index, other in _aligned([row for _, row in finals], [row for _, row in befores])
    }
    anchors = sorted(positions.items())
    anchors.append((len(final.rows), len(before.rows)))
    durations = [1] * len(final.rows)
    for (index, cycle), (next_index, next_cycle) in pairwise(anchors):
        extra = (next_cycle - cycle) - (next_index - index)
        durations[next_index - 1] += max(0, extra)
    return tuple(durations)


def _aligned(ones: list[Row], others: list[Row]) -> Iterator[tuple[int, int]]:
    """Positions in two lists that hold the same, in order."""
    shorter = min(len(ones), len(others))
    # Equal ends need no search, which takes quadratic time where a few rows repeat without end, as
    # in an unrolled copy.
    head = next((i for i in range(shorter) if ones[i] != others[i]), shorter)
    left = shorter - head
    tail = next((i for i in range(left) if ones[-1 - i] != others[-1 - i]), left)
    yield from ((i, i) for i in range(head))
    one, other = (rows[head : len(rows) - tail] for rows in (ones, others))
    for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks():
        yield from ((head + block.a + i, head + block.b + i) for i in range(block.size))
    yield from ((len(ones) - i, len(others) - i) for i in range(tail, 0, -1))


def occupancy(before: SlotTable, durations: tuple[int, ...]) -> SlotTable:
    """Slot use summed over the cycles of every final bundle.

    Unlike the final listing it has the cycles in which a matrix or cross-lane unit is still busy
    with an operation while nothing is issued.
    """
    rows = []
    start = 0
    for duration in durations:
        span = before.rows[start : start + duration]
        rows.append(tuple(map(sum, zip(*span, strict=True))) or (0,) * len(before.units))
        start += duration
    return SlotTable(before.units, before.capacities, tuple(rows))


def read_vmem(path: Path) -> dict[str, int]:
    """VMEM bytes by operation name, from a ``*-vmem_report.html``.

    A kernel's are its windows, scratch and spills, everything that counts against its limit.

    Raises:
      ValueError: the report does not hold the data.
    """
    found = re.search(r"DATA\s*=\s*(?=\{)", text := path.read_text(errors="replace"))
    if not found:
        raise ValueError(f"{path.name}: expected a report with the allocations as JSON")
    data, _ = json.JSONDecoder().raw_decode(text, found.end())
    return {name: entry["total_size"] for name, entry in data["hlo_breakdowns"].items()}
