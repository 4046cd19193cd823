"""What importing the public function loads, in a process of its own."""

import subprocess
import sys

import pytest

KEPT_OUT = ("jax.experimental.pallas", "jinja2", "kdagen.kernels", "optuna", "sqlite_utils",
            "click", "sqlite3", "yaml", "kdagen.store", "kdagen.generate")  # fmt: skip


def modules_after(statements: str) -> set[str]:
    code = f"{statements}\nimport sys\nprint('\\n'.join(sys.modules))"
    run = [sys.executable, "-c", code]
    return set(subprocess.run(run, check=True, capture_output=True, text=True).stdout.split())


@pytest.fixture(scope="module")
def of_jax():
    return modules_after("import jax")


def test_the_import_loads_nothing_heavy(of_jax):
    added = modules_after("import jax, kdagen.runtime.kda") - of_jax
    heavy = {name for name in added for kept in KEPT_OUT if f"{name}.".startswith(f"{kept}.")}
    assert heavy == set()
    assert "kdagen.runtime.kda" in added


def test_a_call_off_tpu_loads_no_pallas_either(of_jax):
    call = """
import jax.numpy as jnp
from kdagen.runtime.kda import kimi_delta_attention
x = jnp.zeros((1, 1, 2, 2))
kimi_delta_attention(x, x, x, x, x[..., 0])
"""
    added = modules_after(call) - of_jax
    assert not {name for name in added if name.startswith(("jax.experimental.pallas", "jinja2"))}
