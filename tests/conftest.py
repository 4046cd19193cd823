"""Settings that must stand in the environment before any test module imports JAX."""

import functools
import os
import shutil
import tempfile

import pytest

# Tests run on the CPU unless the caller chose a platform.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Without these a compile for a TPU asks for the metadata server of a cloud machine, and a second
# process that loads libtpu aborts.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Share what JAX compiles for the CPU between this run's tests and their processes.

    A kernel in interpret mode compiles for seconds and runs for a moment, and many tests use the
    same one on other numbers. Workers inherit the environment, so only the first process makes a
    folder; it is removed at the end of the run.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="kdagen-tests-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
        config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
