"""The walk of the scalar code, on small programs written by hand."""

import pytest

from kdagen.compiler.bundles import NO_SPACE, parse_listing
from kdagen.compiler.decode import WalkError, decode
from kdagen.compiler.walk import DmaTiming, walk

MIB = 1 << 20
OPERAND = (
    "%s90_s20 = inlined_call_operand.hbm [shape: s32[4], index: 0, kind: input, shape index: {}]"
)


def listing_of(*bundles):
    """A listing of bundles given as "marks | depth | operations | comment"."""
    lines = []
    for index, bundle in enumerate(bundles):
        marks, depth, operations, comment = (part.strip() for part in bundle.split("|"))
        address = hex(index) if index else "0"
        tail = f" /* {comment} */" if comment else ""
        lines.append(f"  {address} {marks}: {'>' * int(depth)} {{ {operations} }}{tail}")
    return parse_listing("\n".join(lines) + "\n")


def run(listing, delay_slots=0, **keywords):
    keywords.setdefault("granule_bytes", 32)
    return walk(listing, decode(listing), delay_slots=delay_slots, **keywords)


def counted_loop(trips, delay=""):
    """Adds one to a counter until it is ``trips``."""
    return listing_of(
        "| 0 | %s1_s1 = smov 0 |",
        "LB | 1 | %s2_s1 = sadd.s32 1, %s3_s1 ;; %s3_s1 = sphi %s1_s1, %s2_s1 | Start region 1",
        f"| 1 | %p1_p1 = scmp.ge.s32.totalorder %s2_s1, {trips} |",
        "| 1 | %9 = sbr.rel (!%p1_p1) target = $region1 |",
        f"| 1 | {delay} |",
        "| 0 | |",
    )


def test_a_loop_runs_its_trips():
    walked = run(counted_loop(5))
    assert walked.visits == (1, 5, 5, 5, 1, 1)
    assert walked.totals.bundles == sum(walked.visits)
    assert len(walked.rounds[1]) == 4


def test_delay_slots_issue_before_a_taken_branch():
    assert run(counted_loop(5), delay_slots=1).visits == (1, 5, 5, 5, 5, 1)


def test_delay_slots_are_cycles_of_folded_bundles():
    # One empty bundle that lasts two cycles fills two slots.
    walked = run(counted_loop(5), delay_slots=2, durations=[1, 1, 1, 1, 2, 1])
    assert walked.visits == (1, 5, 5, 5, 5, 1)
    assert walked.totals.issue_cycles == 1 + 5 * (1 + 1 + 1 + 2) + 1


def test_a_branch_in_a_taken_branchs_slots_does_nothing():
    listing = listing_of(
        "| 0 | %8 = sbr.rel target = $region2 |",
        "| 0 | %9 = sbr.rel target = $region1 |",
        "| 0 | | Start region 1",
        "| 0 | | Start region 2",
    )
    assert run(listing, delay_slots=1).visits == (1, 1, 0, 1)


def test_a_bundle_reads_before_it_writes():
    listing = listing_of(
        "| 0 | %s1_s1 = smov 3 ;; %s5_s5 = smov [#allocation7] |",
        "| 0 | %s2_s2 = sadd.s32 %s1_s1, 1 ;; %9 = sst [smem:[%s5_s5]] %s1_s1 |",
        "| 0 | %s3_s3 = sld [smem:[#allocation7]] |",
        "| 0 | %p1_p1 = scmp.eq.s32.totalorder %s3_s3, 3 |",
        "| 0 | %p2_p2 = scmp.eq.s32.totalorder %s2_s2, 4 |",
        "| 0 | %p3_p3 = pnand %p1_p1, %p2_p2 |",
        "| 0 | %8 = sbr.rel (%p3_p3) target = $region1 |",
        "| 0 | |",
        "| 0 | | Start region 1",
    )
    assert run(listing).visits[7] == 1


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("sadd.s32 4294967295, %s1_s1", 6),
        ("ssub.s32 %s1_s1, 9", 4294967294),
        ("sshll.u32 %s1_s1, 4", 112),
        ("sshra.s32 4294967280, 2", 4294967292),
        ("sshrl.u32 4294967280, 28", 15),
        ("sand.u32 %s1_s1, 5", 5),
        ("smul.u32 %s1_s1, 4294967295", 4294967289),
        ("scalar_select %p9_p9, %s1_s1, 2", 7),
        # what a number or a register points into may stand behind it
        ("sadd.s32 %s1_s1, 40 [#allocation0]", 47),
        ("sadd.s32 %s1_s1 [#allocation0], 40", 47),
    ],
)
def test_arithmetic_is_that_of_32_bits(operation, expected):
    listing = listing_of(
        "| 0 | %s1_s1 = smov 7 ;; %p9_p9 = scmp.lt.s32.totalorder 4294967295, 0 |",
        f"| 0 | %s2_s2 = {operation} |",
        f"| 0 | %p1_p1 = scmp.eq.u32.totalorder %s2_s2, {expected} |",
        "| 0 | %8 = sbr.rel (%p1_p1) target = $region1 |",
        "| 0 | |",
        "| 0 | | Start region 1",
    )
    assert run(listing).visits[4] == 0


def copies(count, granules=1 << 15):
    """Starts ``count`` DMAs of ``granules`` each and waits for all of them."""
    start = (
        f"%7 = dma.hbm_to_vmem /*hbm=*/%s90_s20, /*size_in_granules=*/{granules}, "
        "/*vmem=*/[#allocation2], /*dst_syncflagno=*/[#allocation1]"
    )
    return listing_of(
        f"| 0 | {OPERAND} |",
        *[f"| 0 | {start} |"] * count,
        f"| 0 | %8 = dma.done.wait [#allocation1], {count * granules} |",
    )


def test_dmas_queue_for_bandwidth_and_share_their_latency():
    timing = DmaTiming(bytes_per_cycle=1024, latency_cycles=100)
    one = run(copies(1), timing=timing).totals
    two = run(copies(2), timing=timing).totals
    assert one.bytes_in == MIB
    # The DMA starts in cycle 1; the wait itself takes a cycle.
    assert one.cycles == 1 + MIB / 1024 + 100 + 1
    assert two.cycles == 1 + 2 * MIB / 1024 + 100 + 1
    assert two.issue_cycles == 4
    assert two.dmas == 2


def test_without_timing_nothing_is_waited_for():
    totals = run(copies(2)).totals
    assert totals.cycles == totals.issue_cycles == 4
    assert run(copies(2), granule_bytes=512).totals.bytes_in == 32 * MIB


def test_a_wait_without_a_dma_is_an_error():
    listing = listing_of("| 0 | %8 = dma.done.wait [#allocation1], 4 |", "| 0 | |")
    with pytest.raises(WalkError, match="bundle 0x0 waits for a DMA that nothing starts"):
        run(listing)


def prefetched():
    """Branches on the second word of an operand that a DMA brings to scalar memory."""
    return listing_of(
        f"| 0 | {OPERAND} |",
        "| 0 | %7 = dma.hbm_to_smem /*hbm=*/%s90_s20, /*size_in_granules=*/1, "
        "/*smem=*/[#allocation3], /*dst_syncflagno=*/[#allocation1] |",
        "| 0 | %8 = dma.done.wait [#allocation1], 1 |",
        "| 0 | %s1_s1 = smov 1 |",
        "| 0 | %s2_s2 = sld [smem:[#allocation3 + %s1_s1]] |",
        "| 0 | %p1_p1 = scmp.gt.s32.totalorder %s2_s2, 10 |",
        "| 0 | %9 = sbr.rel (%p1_p1) target = $region1 |",
        "| 0 | |",
        "| 0 | | Start region 1",
    )


def test_prefetched_scalars_steer():
    assert run(prefetched(), scalars={0: [0, 11]}).visits[7] == 0
    assert run(prefetched(), scalars={0: [11, 10]}).visits[7] == 1
    # Negative numbers are numbers of 32 bits like the others.
    assert run(prefetched(), scalars={0: [11, -1]}).visits[7] == 1


def test_scalars_not_given_are_an_error():
    with pytest.raises(WalkError, match="bundle 0x6 a branch depends on data not given"):
        run(prefetched())


def by_value():
    """Branches on an operand of one number, which comes in the register itself."""
    passed = OPERAND.replace(".hbm [shape: s32[4]", f".{NO_SPACE} [shape: s32[1]")
    return listing_of(
        f"| 0 | {passed} |",
        "| 0 | %p1_p1 = scmp.gt.s32.totalorder %s90_s20, 10 |",
        "| 0 | %9 = sbr.rel (%p1_p1) target = $region1 |",
        "| 0 | |",
        "| 0 | | Start region 1",
    )


def test_a_number_passed_by_value_steers():
    assert run(by_value(), scalars={0: [11]}).visits[3] == 0
    assert run(by_value(), scalars={0: [10]}).visits[3] == 1
    assert run(by_value(), scalars={0: [-1]}).visits[3] == 1


def test_a_number_passed_by_value_and_not_given_is_an_error():
    with pytest.raises(WalkError, match="bundle 0x2 a branch depends on data not given"):
        run(by_value(), scalars={1: [11]})


def test_division_goes_through_its_queue():
    listing = listing_of(
        "| 0 | %5 = sdivrem.u32 17, 5 /* kRem */ |",
        "| 0 | %s1_s1 = spop.drf %5 |",
        "| 0 | %p1_p1 = scmp.eq.s32.totalorder %s1_s1, 2 |",
        "| 0 | %9 = sbr.rel (%p1_p1) target = $region1 |",
        "| 0 | |",
        "| 0 | | Start region 1",
    )
    assert run(listing).visits[4] == 0


def test_a_division_with_remainder_gives_the_quotient_first():
    listing = listing_of(
        "| 0 | %5 = sdivrem.u32 17, 5 /* kDivAndRem */ |",
        "| 0 | %s1_s1 = spop.drf %5 |",
        "| 0 | %s2_s2 = spop.drf %5 |",
        "| 0 | %p1_p1 = scmp.eq.s32.totalorder %s1_s1, 3 |",
        "| 0 | %p2_p2 = scmp.eq.s32.totalorder %s2_s2, 2 |",
        "| 0 | %p3_p3 = pand %p1_p1, %p2_p2 |",
        "| 0 | %9 = sbr.rel (%p3_p3) target = $region1 |",
        "| 0 | |",
        "| 0 | | Start region 1",
    )
    assert run(listing).visits[7] == 0


def test_what_vector_units_push_is_unknown():
    listing = listing_of(
        "| 0 | %s1_s1 = spop %5 |",
        "| 0 | %p1_p1 = scmp.eq.s32.totalorder %s1_s1, 2 |",
        "| 0 | %9 = sbr.rel (%p1_p1) target = $region1 |",
        "| 0 | | Start region 1",
    )
    with pytest.raises(WalkError, match="depends on data not given"):
        run(listing)
