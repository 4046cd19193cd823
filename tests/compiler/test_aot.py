"""The environment of a compiling process, and what a machine is asked before one is started."""

import dataclasses
import pickle

import pytest

from kdagen.chips import get_chip
from kdagen.compiler.aot import CompileError, can_compile, classify, compile_for, worker_environment


def test_the_environment_names_the_dump_directory_once(tmp_path):
    base = {"LIBTPU_INIT_ARGS": "--xla_tpu_keep=1 --xla_jf_dump_to=/elsewhere", "HOME": "/home/me"}
    environment = worker_environment(tmp_path, base)
    flags = environment["LIBTPU_INIT_ARGS"].split()
    assert [flag for flag in flags if "dump_to" in flag] == [f"--xla_jf_dump_to={tmp_path}"]
    assert "--xla_tpu_keep=1" in flags
    assert environment["HOME"] == "/home/me"
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert "dump" not in worker_environment(None, base)["LIBTPU_INIT_ARGS"]


def test_a_dump_directory_with_white_space_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"dump_dir: got .*white space"):
        worker_environment(tmp_path / "two words")


def test_this_machine_can_compile():
    assert can_compile(get_chip("v6e")) is None


def test_an_unknown_topology_is_told():
    reason = can_compile(dataclasses.replace(get_chip("v6e"), topology="v99:1x1"))
    assert reason is not None and "v99" in reason


@pytest.mark.parametrize(
    ("text", "used", "limit"),
    [
        (
            "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out of memory in memory space"
            " vmem. Scoped allocation with size 36.00M and limit 32.00M exceeded",
            36 << 20,
            32 << 20,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 160.50M of 127.94M",
            round(160.5 * 2**20),
            round(127.94 * 2**20),
        ),
        (
            "RESOURCE_EXHAUSTED: Allocation (size=62914560) would exceed memory (size=16777216) :: "
            "#allocation2 [space=vmem]",
            62914560,
            16777216,
        ),
        ("RESOURCE_EXHAUSTED: vmem, in words nobody has seen", None, None),
    ],
)
def test_vmem_messages(text, used, limit):
    error = classify(RuntimeError(text))
    assert (error.kind, error.used_bytes, error.limit_bytes) == ("vmem", used, limit)


def test_running_out_of_hbm_is_not_vmem():
    error = classify(RuntimeError("RESOURCE_EXHAUSTED: Used 40.00G of 31.25G hbm."))
    assert error.kind == "other"


def test_a_compile_error_survives_pickling():
    error = CompileError("vmem", "too much", 3, 2)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.kind, copy.message, copy.used_bytes, copy.limit_bytes) == (
        "vmem",
        "too much",
        3,
        2,
    )
    assert str(copy) == "too much"


def test_arguments_must_have_shapes():
    import jax
    from jax.sharding import Mesh

    mesh = Mesh(jax.devices()[:1], ("device",))
    with pytest.raises(TypeError, match="args: got 7"):
        compile_for(get_chip("v6e"), lambda x: x, [7], mesh=mesh)
