"""Settings that must stand in the environment before any test module imports JAX."""

import functools
import gc
import os
import shutil
import sys
import tempfile

import pytest

# Tests run on the CPU unless the caller chose a platform.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Without these a compile for a TPU asks for the metadata server of a cloud machine, and a second
# process that loads libtpu aborts.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Give this run folders of its own for the user's data and for what is compiled.

    No test then sees the tables of whoever runs it. And the run's tests and processes share what
    JAX compiles for the CPU: a kernel in interpret mode compiles for seconds and runs for a
    moment, and many tests use the same one on other numbers.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # workers inherit the environment of the process that made the folders
    folder = tempfile.mkdtemp(prefix="kdagen-tests-")
    config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "cache")
    os.environ["XDG_DATA_HOME"] = os.path.join(folder, "data")
    os.environ.pop("KDAGEN_DB", None)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(folder, "jax")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"


@pytest.fixture(autouse=True, scope="module")
def _programs_are_dropped():
    """After a module, let go of what JAX compiled for it.

    Every program for the CPU maps memory, and a process may have 65530 mappings: with more of them
    the compiler crashes. The cache on disk keeps what another module compiles again.
    """
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
