"""Programs of the tests that compile for a TPU, which a process of the tests itself cannot."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kdagen.compiler.aot import worker_environment

ROOT = Path(__file__).resolve().parents[1]


def written_by(program: Path, tmp_path_factory: Any, seconds: int) -> Any:
    """The JSON that a program writes to the path it is given, in a process of its own that ends
    within so many seconds."""
    out = tmp_path_factory.mktemp("compiles") / "outcomes.json"
    environment = worker_environment(tmp_path_factory.mktemp("dump"))
    roots = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = ":".join(filter(None, roots))
    child = subprocess.run(
        [sys.executable, str(program), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(out.read_text())
