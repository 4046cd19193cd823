"""The environment that a comparison with tokamax runs in.

Tokamax needs Python 3.12 and a newer JAX than kdagen does, so it gets a virtual environment of its
own under the user's cache directory, made on first use. Standard library only: any Python runs it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import newest_python

ROOT = Path(__file__).resolve().parents[1]
# The kernels are called by their internal names, which a later release may change. The model is
# calibrated with the compiler of libtpu 0.0.52, which schedules both sides better than the one that
# JAX's own extra pins.
REQUIREMENTS = ("tokamax==0.0.17", "jax>=0.12", "libtpu>=0.0.52")


def parser(description: str) -> argparse.ArgumentParser:
    """The options that both comparisons take."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument(
        "--python",
        metavar="PATH",
        help="an interpreter that has tokamax, JAX and libtpu already; none is installed then",
    )
    options.add_argument("--dump", metavar="DIR", help=argparse.SUPPRESS)
    return options


def run(script: str, options: argparse.Namespace, arguments: list[str]) -> int:
    """Run ``script`` again inside the environment, and give back its exit status.

    The child gets ``--dump DIR``, by which it knows that it is inside, and the environment
    variables of a process that compiles for a TPU.
    """
    python = options.python or _environment_python()
    if python is None:
        versions = ".".join(map(str, newest_python.OLDEST))
        print(
            f"tokamax needs Python {versions} or newer and none was found: put python{versions} "
            "(or a newer one) on the PATH, or name one that has tokamax with --python",
            file=sys.stderr,
        )
        return 2
    sys.path.insert(0, str(ROOT))
    from kdagen.compiler.aot import worker_environment

    with tempfile.TemporaryDirectory(prefix="kdagen-") as dump:
        environment = worker_environment(dump)
        roots = [str(ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, roots))
        command = [python, script, *arguments, "--dump", dump]
        return subprocess.run(command, env=environment, check=False).returncode


def quiet() -> None:
    """Inside the environment: silence tokamax's warnings that it has no tuned configuration."""
    from absl import logging

    logging.set_verbosity(logging.ERROR)


def find_python() -> str | None:
    """This interpreter if it is new enough, else the newest on the PATH or among pyenv's."""
    own = newest_python.version_of(sys.executable)
    if own is not None and own >= newest_python.OLDEST:
        return sys.executable
    return newest_python.newest(newest_python.versions())


def _environment_python() -> str | None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "kdagen" / "peer"
    python = directory / "bin" / "python"
    stamp = directory / "requirements.txt"
    wanted = "\n".join((*REQUIREMENTS, *_own_requirements()))
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    base = find_python()
    if base is None:
        return None
    print(f"making an environment with tokamax in {directory}", file=sys.stderr)
    subprocess.run([base, "-m", "venv", "--clear", str(directory)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *wanted.split("\n")], check=True)
    stamp.write_text(wanted)
    return str(python)


def _own_requirements() -> list[str]:
    """kdagen's dependencies, from its pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'"([^"]+)"', listed.group(1)) if listed else []
