"""Device time from the profiler's record. What needs a device is not run here."""

from __future__ import annotations

from pathlib import Path

import pytest
from jax.profiler import ProfileData

from kdagen.measure import hardware
from kdagen.measure.rejected import Rejected


def event(module: int, picoseconds: int) -> str:
    return f"events {{ metadata_id: {module} offset_ps: 0 duration_ps: {picoseconds} }}"


TRACE = f"""
planes {{
  name: "/host:CPU"
  lines {{ name: "XLA Modules" {event(1, 999)} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "jit_candidate_0(77)" }} }}
}}
planes {{
  name: "/device:TPU:0"
  lines {{ name: "XLA Ops" {event(1, 5)} }}
  lines {{
    name: "XLA Modules"
    {event(1, 100_000_000)} {event(2, 300_000_000)} {event(1, 120_000_000)}
  }}
  event_metadata {{ key: 1 value {{ id: 1 name: "jit_candidate_0(77)" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "jit_candidate_1(78)" }} }}
}}
planes {{
  name: "/device:TPU:1"
  lines {{ name: "XLA Modules" {event(1, 888)} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "jit_candidate_0(77)" }} }}
}}
"""


def test_modules_of_the_first_device_are_read() -> None:
    trace = ProfileData.text_proto_to_serialized_xspace(TRACE)
    assert hardware.module_seconds(trace) == {
        "jit_candidate_0": [pytest.approx(100e-6), pytest.approx(120e-6)],
        "jit_candidate_1": [pytest.approx(300e-6)],
    }


def test_statistics_are_the_median_and_its_spread() -> None:
    times = {"jit_f": [1.0, 1.1, 0.9, 1.0, 5.0, 1.2, 0.8]}
    found = hardware.statistics("f", times, 7)
    assert found["seconds"] == 1.0
    assert found["spread"] == pytest.approx((1.2 - 0.9) / 2)
    with pytest.raises(Rejected, match="0 of 7"):
        hardware.statistics("g", times, 7)


def test_no_device_is_looked_for_where_the_platform_excludes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert hardware.attached_device_kind() is None


def test_the_device_process_has_the_callers_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "0")
    environment = hardware.device_environment(tmp_path)
    assert "JAX_PLATFORMS" not in environment
    assert environment["TPU_SKIP_MDS_QUERY"] == "0"
    assert str(tmp_path) in environment["LIBTPU_INIT_ARGS"]
