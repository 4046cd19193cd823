"""Slot tables, the stalls between two of them, and the VMEM report."""

import pytest

from kdagen.compiler.slots import SlotTable, occupancy, read_slots, read_vmem, stall_cycles

HEADER = "== CAPACTIY:\nMXU, VALU, SALU\n    2     4     2\n== UTILIZATION:\n"


def table(*rows):
    return SlotTable(("MXU", "VALU", "SALU"), (2, 4, 2), rows)


def test_columns_are_those_of_the_header(tmp_path):
    path = tmp_path / "slots.txt"
    path.write_text(HEADER + "1 0 2\n0 3 0\n")
    slots = read_slots(path)
    assert slots.units == ("MXU", "VALU", "SALU")
    assert slots.capacities == (2, 4, 2)
    assert slots.column("VALU") == (0, 3)


def test_rows_must_match_the_header(tmp_path):
    path = tmp_path / "slots.txt"
    path.write_text(HEADER + "1 0 2 5\n")
    with pytest.raises(ValueError, match="rows do not match the 3 units"):
        read_slots(path)
    path.write_text("something else\n")
    with pytest.raises(ValueError, match="header naming the units"):
        read_slots(path)


def test_stalls_go_to_the_bundle_before_them():
    final = table((0, 1, 0), (0, 0, 0), (0, 2, 1), (0, 0, 1))
    before = table((0, 1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0), (0, 2, 1), (0, 0, 0), (0, 0, 1))
    assert stall_cycles(final, before) == (1, 3, 2, 1)


def test_a_row_that_one_listing_lacks_does_not_shift_the_rest():
    final = table((0, 1, 0), (0, 2, 1), (0, 0, 1))
    before = table((0, 1, 0), (0, 4, 0), (0, 0, 0), (0, 2, 1), (0, 0, 1))
    assert stall_cycles(final, before) == (3, 1, 1)


def test_an_operation_that_moved_does_not_take_the_place_of_a_later_one():
    rows = [(0, 1 + i % 4, i // 4 % 3) for i in range(60)]
    # the operation of row 5 stands one row earlier in the final listing
    final = [*rows[:4], (0, 4, 2), (0, 1, 1), *rows[6:]]
    before = [row for row in rows for row in (row, (0, 0, 0))]
    durations = stall_cycles(table(*final), table(*before))
    assert sum(durations) == len(before)
    assert set(durations[6:]) == {2}


def test_long_runs_of_few_different_rows_are_told_apart_quickly():
    rows = [(0, 1, int(i % 7 == 0)) for i in range(100_000)]
    final = [*rows[:50_000], (0, 4, 2), *rows[50_000:]]
    before = [*rows[:50_000], (0, 0, 0), (0, 4, 2), *rows[50_000:]]
    durations = stall_cycles(table(*final), table(*before))
    assert sum(durations) == len(before)
    assert [i for i, cycles in enumerate(durations) if cycles == 2] == [49_999]


def test_occupancy_has_the_cycles_of_the_stalls():
    before = table((1, 1, 0), (1, 0, 0), (0, 2, 1))
    assert occupancy(before, (2, 1)).rows == ((2, 1, 0), (0, 2, 1))


def test_vmem_by_operation(tmp_path):
    path = tmp_path / "report.html"
    path.write_text(
        'text <script> const DATA ={"global_info": {"vmem_capacity": 64},'
        ' "hlo_breakdowns": {"k.1": {"blocks": [], "total_size": 4096}}};\n const X = {}</script>'
    )
    assert read_vmem(path) == {"k.1": 4096}
    path.write_text("<html></html>")
    with pytest.raises(ValueError, match="allocations as JSON"):
        read_vmem(path)
