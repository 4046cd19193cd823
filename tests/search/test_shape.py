"""What is counted together in the histogram of reasons."""

from __future__ import annotations

import pytest

from kdagen.search.shape import _kind
from tests.store.rows import result


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        ("illegal", "code_size: heads=3, chunks=8: too many", "code_size"),
        ("vmem", "VMEM: 17.32 MiB needed, 16.00 MiB allowed", "VMEM: # MiB needed, # MiB allowed"),
        (
            "compile_failed",
            "WalkError: kda_forward_4a1be7d51d65.1: at bundle 0xbd waits",
            "WalkError: at bundle # waits",
        ),
        ("wrong", "output is off by 3.6e-02, allowed 5.0e-03", "output is off by #, allowed #"),
        ("died", "its process ended by signal SIGKILL", "its process ended by signal SIGKILL"),
    ],
)
def test_failures_count_alike_whatever_their_numbers(status: str, reason: str, kind: str) -> None:
    assert _kind(result(status=status, reason=reason, seconds=None)) == kind
