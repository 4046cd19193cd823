"""A model's projections give [B, T, H * D]: no program copies them into another layout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kdagen.compiler.aot import worker_environment
from tests.runtime.compile_projected import moves

PROGRAM = Path(__file__).parent / "compile_projected.py"


@pytest.mark.parametrize("implementation", ["xla_chunked", "pallas"])
def test_no_operation_around_the_attention_moves_a_whole_tensor(implementation):
    environment = worker_environment()
    roots = [str(PROGRAM.parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = ":".join(filter(None, roots))
    child = subprocess.run(
        [sys.executable, str(PROGRAM), "v6e", implementation],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    assert json.loads(child.stdout.splitlines()[-1]) == {"forward": [], "gradient": []}


def test_moves_are_seen_in_a_compiled_program():
    text = """
      %a = bf16[2,512,4,128]{3,1,2,0:T(8,128)(2,1)} copy(%b), metadata={op_name="x"}
      ROOT %c = bf16[2,512,512]{2,1,0} reshape(%a)
      %small = bf16[2,4,128]{2,1,0} copy(%d)
      %view = bf16[2,512,512]{2,1,0} bitcast(%a)
    """
    assert moves(text) == [("copy", "bf16[2,512,4,128]"), ("reshape", "bf16[2,512,512]")]
