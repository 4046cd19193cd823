"""The random points of ``make compiles``, and what makes it fail; nothing is compiled here."""

import importlib.util
import sys
from pathlib import Path

import pytest

from kdagen.chips import CHIPS, get_chip
from kdagen.measure.pool import Outcome
from kdagen.problem import LAYOUTS, PRECISIONS
from kdagen.variant import SUB_BLOCKS, check, loop_bundles, vmem_bytes

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "compile_sample.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("compile_sample", PATH)
    module = sys.modules["compile_sample"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["compile_sample"]


@pytest.fixture(scope="module")
def points(program):
    return program.sample(40, 0)


def test_a_seed_gives_the_same_points(program, points):
    assert program.sample(40, 0) == points
    assert program.sample(40, 1) != points


def test_every_point_is_legal_somewhere_and_most_in_several_places(points):
    legal = [sum(check(p.variant, p.problem, c) is None for c in CHIPS.values()) for p in points]
    assert min(legal) >= 1
    assert sum(legal) > 2 * len(points)


def test_the_sample_spans_the_space(points):
    problems, variants = [p.problem for p in points], [p.variant for p in points]
    assert {p.dtype for p in problems} == {"bfloat16", "float32"}
    assert {p.layout for p in problems} == set(LAYOUTS)
    assert {p.precision for p in problems} == set(PRECISIONS)
    assert {p.gate for p in problems} == {"log_decay", "softplus", "bounded"}
    assert {p.residuals for p in problems} == {None, "save"}
    assert {p.value_heads // p.heads for p in problems} == {1, 2, 4}
    for width in ("key_dim", "value_dim"):
        assert {48, 128, 129, 256} <= {getattr(p, width) for p in problems}
    assert {v.chunk for v in variants} == {32, 64, 128}
    assert {v.decay for v in variants} == set(SUB_BLOCKS)
    assert {v.states for v in variants} == {"none", "bfloat16", "float32"}
    for kept in ("keep_inverse", "keep_corrected", "keep_gate"):
        assert {getattr(v, kept) for v in variants} == {False, True}
    assert max(v.rows for v in variants) > 1
    assert max(v.packs for v in variants) > 4


def test_a_refusal_and_too_much_vmem_refute_check(program, points):
    chip = get_chip("v6e")
    point = next(p for p in points if check(p.variant, p.problem, chip) is None)
    job = program.Job(point, chip, point.variant)
    estimated = vmem_bytes(point.variant, point.problem, chip)

    def line(used):
        value = {
            "vmem_used_bytes": used,
            "vmem_limit_bytes": 32 << 20,
            "loop_bundles": 1234,
            "dma_in_bytes": 600,
            "dma_out_bytes": 300,
            "floor_bytes": 800,
        }
        return program.line(Outcome(job, value, "ok", "", 7.0))

    fits, over = line(estimated), line(estimated + 1)
    assert not fits.refuted and "OVER" not in fits.text
    expected = loop_bundles(point.variant, point.problem, chip)
    assert f"1234 / {expected:5} bundles, HBM x1.12" in fits.text
    assert over.refuted and "OVER" in over.text
    refused = program.line(Outcome(job, None, "compile_failed", "no such layout", 7.0))
    assert refused.refuted and "no such layout" in refused.text
