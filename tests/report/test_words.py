"""How numbers are said."""

from __future__ import annotations

import dataclasses

from kdagen.chips import CALIBRATED_WITH, get_chip
from kdagen.problem import Problem
from kdagen.report import words
from kdagen.store.rows import TensorError
from tests.store.rows import CHECKED, DEFAULT, ENVIRONMENT, FASTER, PROBLEM, result


def test_times() -> None:
    assert words.seconds(12.34e-6) == "12.3 us"
    assert words.seconds(1.5e-3) == "1.500 ms"
    assert words.seconds(None) == "-"
    assert words.duration(59.6) == "1 min 00 s"
    assert words.duration(7.2) == "7 s"


def test_a_time_is_never_without_its_source() -> None:
    chip = get_chip("v6e")
    assert chip.calibration is not None
    modelled = words.origin("compiler", ENVIRONMENT, chip)
    assert "not measured" in modelled and "0.0.42" in modelled
    assert f"{chip.calibration.mean_error:.0%} on average" in modelled
    assert f"{chip.calibration.max_error:.0%} at most" in modelled
    assert f"calibrated with libtpu {CALIBRATED_WITH}" in modelled
    assert "libtpu 0.0.42 is not known" in modelled
    same = dataclasses.replace(ENVIRONMENT, libtpu=CALIBRATED_WITH)
    assert "calibrated with" not in words.origin("compiler", same, chip)
    uncalibrated = dataclasses.replace(chip, calibration=None)
    assert "not calibrated" in words.origin("compiler", ENVIRONMENT, uncalibrated)
    measured = words.origin("hardware", ENVIRONMENT, chip)
    assert "measured on v6e" in measured and "model" not in measured


def test_shares_and_ratios() -> None:
    fast, default = result(FASTER, seconds=5e-5), result()
    assert words.ratio(fast, default) == "2.00x"
    assert words.ratio(fast, None) == words.ratio(None, default) == "-"
    assert words.hbm_share(fast) == "40%"
    assert words.vmem(fast) == "12.0 / 32"
    assert words.vmem(dataclasses.replace(fast, vmem_limit_bytes=None)) == "-"


def test_errors() -> None:
    assert words.error(result()) == "not checked"
    assert words.error(result(errors=CHECKED)) == "3.0e-03"
    assert words.error(result(errors={"output": TensorError(None, 5e-3)})) == "NaN"


def test_problems_and_variants() -> None:
    assert words.problem(PROBLEM) == "B 1 T 2048 H 8 K 128 V 128 bfloat16 bounded -5"
    grouped = Problem(tokens=9, heads=2, value_heads=8)
    assert words.problem(grouped) == "B 1 T 9 H 2 HV 8 K 128 V 128 bfloat16 log_decay"
    said = words.variant(DEFAULT)
    assert said.startswith("chunk 64, heads 8, chunks 4, bounded ")
    assert "VMEM" not in said
    assert words.variant(dataclasses.replace(DEFAULT, ends=1)).endswith(", ends 1")
    assert "ends" not in words.variant(dataclasses.replace(DEFAULT, ends=0))
    assert words.variant(dataclasses.replace(DEFAULT, vmem_limit_mib=48)).endswith("VMEM 48 MiB")
    assert words.variant('{"old":1}') == '{"old":1}'
