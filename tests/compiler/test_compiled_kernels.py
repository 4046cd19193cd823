"""What is read from real compiles, for every chip, against what the kernels are known to do."""

import math

import pytest

from kdagen.compiler.decode import WalkError
from kdagen.compiler.model import MIN_STEPS, predict
from kdagen.compiler.schedule import ScheduleError, read_schedule, read_schedules

MIB = 1 << 20
SWEEPS, SHORT, LONG = 2, 10, 40
COUNTS = [3, 0, 5, 20]


def test_a_copy_moves_its_bytes(session):
    report = session.schedule("copy_long").report()
    moved = SWEEPS * LONG * MIB
    assert report.bytes_in == moved
    assert report.bytes_out == moved
    assert report.dmas == 2 * SWEEPS * LONG
    assert report.spill_stores == report.spill_loads == 0


def test_the_grid_is_the_main_loop(session):
    schedule = session.schedule("copy_long")
    report = schedule.report()
    # A megacore divides the parallel axis. The pipeline has two rounds more than steps; the first
    # begins before any back edge.
    rounds = SWEEPS * LONG // schedule.cores + 2
    assert report.main_loop.rounds == rounds - 2
    assert 0 < report.main_loop.bundles < report.static_bundles
    assert schedule.steps == LONG
    per_core = report.bundles / schedule.cores
    assert report.main_loop.bundles_per_round * rounds == pytest.approx(per_core, rel=0.05)


def test_vmem_is_two_buffers_a_window(session):
    report = session.schedule("copy_short").report()
    assert report.vmem_bytes == 4 * MIB
    assert report.vmem_limit_bytes == session.chip.default_vmem_limit_bytes
    assert session.schedule("copy_limit").vmem_limit_bytes == 12 * MIB


def test_slot_columns_come_from_the_header(session):
    schedule = session.schedule("chain_short")
    assert {"VALU", "VLOAD", "VSTORE", "SALU"} <= set(schedule.slots.units)
    use = schedule.report().slot_use
    assert set(use) == set(schedule.slots.units)
    assert all(0 <= share <= 1 for share in use.values())
    matrix = [use[unit] for unit in ("MXU", "MATMUL") if unit in use]
    assert len(matrix) == 1 and matrix[0] > 0
    with pytest.raises(KeyError, match="VALU"):
        schedule.slots.column("FPU")


def inner_trips(schedule, walked):
    heads = [
        index
        for index, bundle in enumerate(schedule.listing.bundles)
        if bundle.depth == 2 and "LB" in bundle.marks
    ]
    return sum(walked.visits[index] for index in heads)


def test_a_dynamic_loop_runs_as_often_as_its_data_say(session):
    schedule = session.schedule("loop")
    some = schedule.walk({0: COUNTS})
    none = schedule.walk({0: [0] * len(COUNTS)})
    assert inner_trips(schedule, some) == sum(COUNTS)
    assert inner_trips(schedule, none) == 0
    assert some.totals.bundles > none.totals.bundles


def test_unknown_data_is_an_error_and_not_zero(session):
    with pytest.raises(WalkError, match="depends on data not given"):
        session.schedule("loop").walk()


def test_a_predicated_region_runs_where_its_predicate_holds(session):
    schedule = session.schedule("chain_short")
    walks = [schedule.walk(core=core) for core in range(schedule.cores)]
    visits = [sum(counts) for counts in zip(*(walk.visits for walk in walks), strict=True)]
    # Zeroing and writing happen once a sweep, the chain once a step.
    assert SWEEPS in visits
    assert SWEEPS * SHORT in visits
    assert sum(walk.totals.bytes_out for walk in walks) == SWEEPS * 128 * 128 * 4


def test_dependent_matmuls_stall(session):
    short, deep = (session.schedule(name).report() for name in ("chain_short", "chain_deep"))
    cycles = (deep.main_loop.cycles_per_round - short.main_loop.cycles_per_round) / 4
    bundles = (deep.main_loop.bundles_per_round - short.main_loop.bundles_per_round) / 4
    # A 128^3 matmul on the result of another waits for it, which the final bundles do not show.
    assert cycles > 1.5 * bundles
    if session.chip.name in ("v6e", "v7x"):
        assert 150 < cycles < 300


@pytest.mark.parametrize("kernel", ["copy", "chain"])
def test_a_short_grid_predicts_the_long_one(session, kernel):
    short, long = session.schedule(f"{kernel}_short"), session.schedule(f"{kernel}_long")
    extended, walked = predict(short, steps=LONG), predict(long)
    assert extended.steps == walked.steps == LONG
    assert extended.hbm_bytes == walked.hbm_bytes
    assert extended.bundles == pytest.approx(walked.bundles, rel=0.005)
    assert extended.cycles == pytest.approx(walked.cycles, rel=0.005)
    assert extended.seconds == pytest.approx(walked.seconds, rel=0.01)
    # And it is the steps that make the difference.
    assert extended.seconds > 2 * predict(short).seconds


def test_operands_moved_to_vmem_are_not_extended(session):
    schedule = session.schedule("copy_moved")
    if session.chip.name == "v7x":
        assert schedule.report().bytes_in < SWEEPS * SHORT * MIB
        with pytest.raises(ScheduleError, match="keep_in_hbm=True"):
            predict(schedule, steps=LONG)
    else:
        assert predict(schedule, steps=LONG) == predict(session.schedule("copy_short"), steps=LONG)


def test_too_few_steps_are_refused(session):
    with pytest.raises(ScheduleError, match=rf"steps: got {MIN_STEPS - 1} .*{MIN_STEPS} or more"):
        predict(session.schedule("copy_short"), steps=MIN_STEPS - 1)


def test_a_prediction_says_what_it_is(session):
    chip = session.chip
    copied = predict(session.schedule("copy_long"))
    assert copied.source == "compiler"
    assert copied.chip == chip.name
    assert copied.libtpu_version == session.results["copy_long"]["libtpu"]
    assert (copied.known_error is None) == (chip.calibration is None)
    # A copy is bound by HBM: the time is that of its bytes and little more.
    assert copied.bound == "hbm"
    per_core = 2 * SWEEPS * LONG * MIB / chip.cores_per_device
    floor = per_core / chip.parameters.hbm_bytes_per_second
    assert copied.hbm_seconds == pytest.approx(floor)
    assert floor < copied.seconds < 1.1 * floor
    assert 0.9 < copied.hbm_share < 1
    chained = predict(session.schedule("chain_deep"))
    assert chained.bound == "schedule"
    assert chained.seconds >= chained.schedule_seconds


def test_too_much_vmem_is_told_with_its_numbers(session):
    chip = session.chip
    over = session.results["over_default"]
    assert over["kind"] == "vmem"
    # Messages round to 10 KiB.
    assert math.isclose(over["used"], chip.default_vmem_limit_bytes + MIB, abs_tol=MIB / 8)
    assert over["limit"] == chip.default_vmem_limit_bytes
    assert "MiB needed" in over["message"]


def test_usable_vmem_is_what_every_compiler_allows(session):
    assert session.results["under_usable"]["kind"] is None
    over = session.results["over_capacity"]
    assert over["kind"] == "vmem"
    # The compiler keeps 64 KiB on the newer chips, on v7x since libtpu 0.0.50.
    assert session.chip.usable_vmem_bytes - 6 * 1024 <= over["limit"] <= session.chip.vmem_bytes


def test_other_failures_are_told_apart(session):
    assert session.results["unsupported"]["kind"] == "unsupported"
    assert "sort" in session.results["unsupported"]["message"]
    assert session.results["wrong"]["kind"] == "other"
    assert "seven is not a shape" in session.results["wrong"]["message"]


def test_a_compile_reports_its_memory(session):
    result = session.results["copy_short"]
    assert result["argument_bytes"] == result["output_bytes"] == SWEEPS * SHORT * MIB
    assert "copy_kernel" in result["text"]


def test_asking_for_another_kernel_names_those_there_are(session):
    directory = session.directory / "loop"
    assert read_schedule(directory, session.chip, "loop_kernel").is_kernel
    with pytest.raises(ScheduleError, match="loop_kernel"):
        read_schedule(directory, session.chip, "copy_kernel")
    with pytest.raises(ScheduleError, match="no listings"):
        read_schedules(session.directory, session.chip)
