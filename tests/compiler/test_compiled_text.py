"""Which operations of a compiled program equal a listed one, and what it copies meanwhile."""

import pytest

METADATA = ', metadata={op_name="jit(f)/add" stack_frame_id=3 payload="a\\"}{b"}'


@pytest.fixture
def unlisted(benchmark_module):
    return benchmark_module("compiled_text").unlisted


@pytest.fixture
def copied_bytes(benchmark_module):
    return benchmark_module("compiled_text").copied_bytes


def fusion(number, **change):
    """Text of an operation and of what it calls, under names that only this one has."""
    what = {
        "operation": "add",
        "window": "8",
        "kind": "kLoop",
        "layout": "{1,0:T(8,128)}",
        "operand": f"%p{number}",
        "metadata": "",
        **change,
    }
    inner = f"f32[8,128]{what['layout']}"
    computation = (
        f"%sum.{number} (a.{number}: f32[], b.{number}: f32[]) -> f32[] {{\n"
        f"  %a.{number} = f32[] parameter(0)\n"
        f"  %b.{number} = f32[] parameter(1)\n"
        f"  ROOT %c.{number} = f32[] {what['operation']}(%a.{number}, %b.{number})\n"
        "}\n\n"
        f"%fused.{number} (x.{number}: f32[8,128]) -> f32[8] {{\n"
        f"  %x.{number} = {inner} parameter(0)\n"
        f"  %zero.{number} = f32[] constant(0)\n"
        f"  ROOT %r.{number} = f32[8]{{0}} reduce(%x.{number}, /*index=1*/%zero.{number}), "
        f"dimensions={{1}}, to_apply=%sum.{number}\n"
        "}\n"
    )
    line = (
        f"  %fusion.{number} = f32[8]{{0}} fusion({what['operand']}), kind={what['kind']}, "
        f"calls=%fused.{number}{what['metadata']}, "
        f'backend_config={{"window":["{what["window"]}"]}}\n'
    )
    return computation, line


def program(*fusions, more=""):
    operands = "".join(f"  %p{n} = f32[8,128]{{1,0:T(8,128)}} parameter({n})\n" for n in range(4))
    called = "\n".join(computation for computation, _ in fusions)
    lines = "".join(line for _, line in fusions)
    return (
        f"HloModule jit_f, is_scheduled=true\n\n{called}\n"
        "ENTRY %main (p0: f32[8,128]) -> f32[8] {\n"
        f"{operands}"
        "  %vmem = f32[8,128]{1,0:T(8,128)S(1)} bitcast(%p0)\n"
        f"{lines}{more}}}\n"
    )


def test_an_equal_operation_under_other_names_is_found(unlisted):
    text = program(fusion(0), fusion(1), fusion(2, metadata=METADATA))
    assert unlisted(text, {"fusion.1"}) == {"fusion.0": "fusion.1", "fusion.2": "fusion.1"}


@pytest.mark.parametrize(
    "change",
    [
        {"operation": "multiply"},
        {"window": "16"},
        {"kind": "kInput"},
        {"layout": "{0,1:T(8,128)}"},
        {"operand": "%vmem"},
        {"operand": "%p1, %p1"},
    ],
    ids=str,
)
def test_one_that_differs_anywhere_is_not(unlisted, change):
    text = program(fusion(0), fusion(1, **change))
    assert unlisted(text, {"fusion.0"}) == {"fusion.1": None}


def test_two_results_in_other_places_differ(unlisted):
    text = program(
        more="  %copy.0 = f32[8,128]{1,0} copy(%p0)\n"
        "  %copy.1 = f32[8,128]{1,0:S(1)} copy(%p0)\n"
        "  %copy.2 = f32[8,128]{1,0} copy(%p1)\n"
    )
    assert unlisted(text, {"copy.0"}) == {"copy.1": None, "copy.2": "copy.0"}


def test_an_operand_is_told_from_another_inside_what_is_called(unlisted):
    first, second = fusion(0, operation="subtract"), fusion(1, operation="subtract")
    swapped = second[0].replace("(%a.1, %b.1)", "(%b.1, %a.1)")
    assert unlisted(program(first, second), {"fusion.0"}) == {"fusion.1": "fusion.0"}
    assert unlisted(program(first, (swapped, second[1])), {"fusion.0"}) == {"fusion.1": None}


COPIES = (
    "  %copy-start = (f32[8,128]{1,0}, f32[8,128]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%p0)\n"
    "  %copy-done = f32[8,128]{1,0:S(1)} copy-done(%copy-start)\n"
    "  %slice-start = ((s8[4096]{0}), s8[1024]{0:S(1)}, s32[]{:S(2)}) slice-start(%bytes), "
    "slice={[0:1024]}\n"
    "  %slice-done = s8[1024]{0:S(1)} slice-done(%slice-start)\n"
    "  %custom-call = bf16[4,128]{1,0:S(1)} custom-call(%slice-done), "
    'custom_call_target="ConcatBitcast"\n'
)


def test_names_of_buffers_and_copies_beside_the_rest_are_no_operations(unlisted):
    more = COPIES + "  ROOT %tuple.1 = (f32[8]{0}) tuple(%fusion.0)\n"
    assert unlisted(program(fusion(0), more=more), {"fusion.0"}) == {}


def test_a_kernel_is_an_operation(unlisted):
    more = '  %k.1 = f32[8]{0} custom-call(%p0), custom_call_target="tpu_custom_call"\n'
    assert unlisted(program(fusion(0), more=more), {"fusion.0"}) == {"k.1": None}


def test_operations_inside_what_is_called_stand_for_none(unlisted):
    assert unlisted(program(fusion(0)), {"r.0"}) == {"fusion.0": None}


def test_copies_are_counted_once(copied_bytes):
    assert copied_bytes(program(fusion(0))) == 0
    assert copied_bytes(program(fusion(0), more=COPIES)) == 8 * 128 * 4 + 1024
