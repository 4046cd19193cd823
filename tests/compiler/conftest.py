"""One compile session a chip, in a child process: this one never loads libtpu."""

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from kdagen.chips import CHIPS, Chip
from kdagen.compiler.aot import worker_environment
from kdagen.compiler.schedule import Schedule, read_schedule

HERE = Path(__file__).parent


@pytest.fixture
def benchmark_module(monkeypatch):
    """Imports a module of ``benchmarks`` by its name, as its neighbours there do."""
    monkeypatch.syspath_prepend(str(HERE.parents[1] / "benchmarks"))
    return importlib.import_module


@dataclass(frozen=True)
class Session:
    """What one chip's compiles left behind."""

    chip: Chip
    directory: Path
    results: dict

    def schedule(self, name) -> Schedule:
        return read_schedule(self.directory / name, self.chip)


@pytest.fixture(scope="session")
def session_of(tmp_path_factory):
    """Compiles the test kernels for a chip, once."""

    @cache
    def compile_all(name):
        directory = tmp_path_factory.mktemp(f"compiled-{name}")
        dump = tmp_path_factory.mktemp(f"dump-{name}")
        environment = worker_environment(dump)
        roots = [str(HERE.parents[1]), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = ":".join(filter(None, roots))
        command = [sys.executable, str(HERE / "tpu_kernels.py"), name, str(directory)]
        child = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert child.returncode == 0, child.stderr[-2000:]
        results = json.loads((directory / "results.json").read_text())
        return Session(CHIPS[name], directory, results)

    return compile_all


@pytest.fixture(scope="session", params=list(CHIPS))
def session(request, session_of):
    """The session of every chip in turn."""
    return session_of(request.param)
