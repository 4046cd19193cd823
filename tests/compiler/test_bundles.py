"""The parser of final bundles, on text of the shapes that libtpu writes."""

import pytest

from kdagen.compiler.bundles import NO_SPACE, parse_listing, parse_operation

LISTING = """= control target key start
LB: loop body
= control target key end

     0   :  { %s9_s0 = inlined_call_operand.hbm [shape: f32[8,128], index: 0, kind: input, shape \
index: {}] /* window */  ;;  %s1_s1 = smov 0 } \
/* entry bundle: %my_kernel.1 = f32[8,128]{1,0} custom-call(%x.1) */
   0x1 LB: > { %s2_s2 = sadd.s32 1, %s3_s1  ;;  %s3_s1 = sphi %s1_s1, %s2_s2 /* phi copy */ } \
/* Start region 7 :: Start region 8 */
   0x2   : >> { %5 = dma.hbm_to_vmem [thread:$0]  (!%p1_p1), /*hbm=*/%s9_s0, \
/*size_in_granules=*/128, /*vmem=*/[#allocation2], /*dst_syncflagno=*/[#allocation3 + $0x1] /*
iteration_bounds: (2, 5)
{ not a bundle } */ }
   0x3   : > { %6 = sbr.rel (!%p2_p2) target = $region7 }
   0x4   :  {} /* End region 8 */
"""


def test_a_listing():
    listing = parse_listing(LISTING)
    assert (listing.name, listing.opcode) == ("my_kernel.1", "custom-call")
    assert [bundle.address for bundle in listing.bundles] == [0, 1, 2, 3, 4]
    assert [bundle.depth for bundle in listing.bundles] == [0, 1, 2, 1, 0]
    assert listing.bundles[1].marks == "LB"
    assert listing.regions == {7: 1, 8: 1}
    assert listing.grids == ((2, 5),)
    assert listing.core_id_allocation is None
    assert listing.bundles[4].operations() == []
    (operand,) = listing.operands
    assert (operand.index, operand.space, operand.shape) == (0, "hbm", "f32[8,128]")


def test_an_operand_passed_by_value_lies_nowhere():
    text = (
        "     0   :  { %s3_s0 = inlined_call_operand.<no memory space> [shape: s32[1], index: 7, "
        "kind: input, shape index: {}]  ;;  %s4_s1 = inlined_call_operand.vmem [shape: s32[2], "
        "index: 8, kind: input, shape index: {}] }\n"
    )
    value, vector = parse_listing(text).operands
    assert (value.register, value.index, value.space) == ("%s3_s0", 7, NO_SPACE)
    assert (value.shape, value.kind) == ("s32[1]", "input")
    assert (vector.index, vector.space) == (8, "vmem")


def test_a_dma_keeps_its_labels():
    (dma,) = parse_listing(LISTING).bundles[2].operations()
    assert dma.name == "dma.hbm_to_vmem"
    assert (dma.predicate, dma.negated) == ("%p1_p1", True)
    assert dma.labelled("size_in_granules") == "128"
    assert dma.labelled("dst_syncflagno") == "[#allocation3 + $0x1]"
    assert dma.labelled("src_stride") is None


def test_a_megacore_says_where_its_number_is():
    text = "     0   :  { %s3_s9 = sld [smem:[#allocation4]] /* megacore core id :: core id */ }\n"
    assert parse_listing(text).core_id_allocation == 4


@pytest.mark.parametrize(
    ("text", "predicate", "negated", "otherwise", "arguments"),
    [
        ("%s4_s2 = smov (%p1_p0, %s3_s2), 0", "%p1_p0", False, "%s3_s2", ("0",)),
        ("%s4_s2 = smov (!%p1_p0), %s3_s2", "%p1_p0", True, None, ("%s3_s2",)),
        (
            "%7 = sst [smem:[#allocation4]] (%p1_p0), %s3_s2",
            "%p1_p0",
            False,
            None,
            ("[smem:[#allocation4]]", "%s3_s2"),
        ),
        (
            "%s4_s2 = sld [smem:[#allocation3 + %s3_s2]]",
            None,
            False,
            None,
            ("[smem:[#allocation3 + %s3_s2]]",),
        ),
        ("%7 = dma.done.wait [#allocation1], 16", None, False, None, ("[#allocation1]", "16")),
        (
            "%7 = vsyncadd (%p1_p0), %s3_s2, 4294967288",
            "%p1_p0",
            False,
            None,
            ("%s3_s2", "4294967288"),
        ),
    ],
)
def test_where_predicates_stand(text, predicate, negated, otherwise, arguments):
    operation = parse_operation(text)
    assert operation.predicate == predicate
    assert operation.negated == negated
    assert operation.otherwise == otherwise
    assert operation.arguments == arguments


def test_a_branch_knows_its_region():
    branch = parse_operation("%6 = sbr.rel (!%p2_p2) target = $region70")
    assert (branch.target, branch.predicate, branch.negated) == (70, "%p2_p2", True)


def test_text_without_bundles_is_refused():
    with pytest.raises(ValueError, match="nothing: no bundle found"):
        parse_listing("= control target key start", "nothing")
