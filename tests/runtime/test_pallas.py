"""The generated kernels behind the public function: interpreted here, compiled for a TPU."""

import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from kdagen.chips import get_chip
from kdagen.generate import code_hash, variant_id
from kdagen.problem import Problem
from kdagen.runtime import pallas
from kdagen.runtime.arguments import check_call
from kdagen.runtime.kda import kimi_delta_attention
from kdagen.runtime.target import KdagenWarning, find_target, forget_warnings
from kdagen.store.tuned import Environment, Store
from kdagen.variant import check, default_variant
from tests.reference.cases import assert_close, make_case
from tests.runtime.run import PER_TOKEN, results
from tests.store.rows import result

EXAMPLE = Path(__file__).parents[2] / "examples" / "aot_step.py"


OPTIONAL = (
    "a_log", "delta_time_bias", "lower_bound", "scale", "initial_state", "segment_ids",
    "cu_seqlens", "max_num_segments", "context_parallel", "residuals", "implementation",
)  # fmt: skip
STATIC = dict(use_gate_in_kernel=False, use_qk_l2norm=True, output_final_state=False, layout="HBTD")


def test_interpreted_with_the_gradient_of_the_chunk_form():
    case = make_case(raw=True, dtype="bfloat16", tokens=70, width_k=128, width_v=128)
    assert_close(results(case, implementation="pallas"), case)


@pytest.mark.parametrize("precision", ["highest", "float32"])
def test_the_matmul_precision_of_the_call_is_that_of_the_inverse(precision):
    operands = {name: jnp.zeros((1, 1, 8, 128), jnp.bfloat16) for name in PER_TOKEN}
    operands["beta"] = operands["beta"][..., 0]

    def found(dtype=jnp.bfloat16):
        given = {name: x.astype(dtype) for name, x in operands.items()}
        call = check_call(**given, **dict.fromkeys(OPTIONAL), **STATIC)
        return pallas.kernel_for(call, find_target())

    assert found().problem.precision == "default"
    with jax.default_matmul_precision(precision):
        assert found().problem.precision == "highest"
        assert found().variant.inverse_dtype == "float32"
        assert found(jnp.float32).problem.precision == "default"
    with jax.default_matmul_precision("high"):
        assert found().problem.precision == "default"


def test_parallel_keys_hold_their_accuracy_at_the_highest_precision():
    sizes = dict(heads=1, tokens=128, width_k=128, width_v=128)
    case = make_case(key="parallel", beta=0.98, gate="-0.001", dtype="bfloat16", **sizes)
    with jax.default_matmul_precision("highest"):
        found = results(case, implementation="pallas", gradients=False)
    assert_close(found, case, ill_conditioned=True)


def run_program(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )


def test_a_step_compiled_ahead_of_time_holds_the_tuned_kernel(tmp_path):
    chip = get_chip("v7x")
    # the call of the example
    problem = Problem(tokens=8192, heads=32, gate="bounded", lower_bound=-5.0, qk_l2norm=True)
    variant = dataclasses.replace(default_variant(problem, chip), sub_block=16)
    assert check(variant, problem, chip) is None
    libtpu = importlib.metadata.version("libtpu")
    made_with = Environment("v7x", jax.__version__, "", libtpu, "", code_hash(), "m")
    path = tmp_path / "tuned.sqlite"
    with Store(path) as store:
        where = store.put_environment(made_with), store.put_problem(problem, "example")
        row = result(variant)
        store.put_result(*where, row)
        store.choose(*where, "compiler", row.variant_id)
    done = run_program(str(EXAMPLE), "--db", str(path), "--strict")
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"kernel kda_forward_([0-9a-f]{12})", done.stdout)
    assert variant_id(problem, variant, chip).startswith(found)
    assert not variant_id(problem, default_variant(problem, chip), chip).startswith(found)


def test_the_step_is_refused_where_nothing_is_tuned_and_that_is_asked_for(tmp_path):
    path = tmp_path / "empty.sqlite"
    Store(path).close()
    done = run_program(str(EXAMPLE), "--chip", "v5p", "--db", str(path), "--strict")
    assert done.returncode != 0
    assert "kdagen tune --chip v5p" in done.stderr


WITHOUT_A_MESH = """
import sys, warnings
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kdagen.runtime.kda import kimi_delta_attention

topology = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2")
everywhere = NamedSharding(Mesh(np.array(topology.devices[:1]), ("x",)), PartitionSpec())
wide = jax.ShapeDtypeStruct((2, 1, 128, 128), jnp.bfloat16, sharding=everywhere)
beta = jax.ShapeDtypeStruct((2, 1, 128), jnp.bfloat16, sharding=everywhere)
f = jax.jit(lambda *x: kimi_delta_attention(*x)[0])
g = jax.jit(jax.grad(lambda v: f(v, v, v, v, v[..., 0]).astype(jnp.float32).sum()))
x = jnp.zeros((2, 1, 128, 128), jnp.bfloat16)
long = x.astype(jnp.float32)

def noted(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run()
    print([str(w.message) for w in caught], file=sys.stderr)
    return found, len(caught), sum("jax.set_mesh" in str(w.message) for w in caught)

def here():
    jax.grad(lambda v: f(x, x, v, x, x[..., 0]).astype(jnp.float32).sum())(x)
    return float(jnp.sum(f(x, x, x, x, x[..., 0]) + f(long, long, long, long, long[..., 0])))

print(noted(here))
compiled = noted(lambda: f.lower(wide, wide, wide, wide, beta).compile().as_text())
print("kernel" if "kda_forward_" in compiled[0] else "no kernel", *compiled[1:])
print(noted(lambda: g.lower(wide).compile() and None))
"""


def test_a_trace_that_does_not_know_its_chip_lowers_for_either():
    done = run_program("-c", WITHOUT_A_MESH)
    assert done.returncode == 0, done.stderr
    here, forward, gradient = done.stdout.splitlines()
    assert here == "(0.0, 0, 0)", "nothing is said where no TPU is"
    assert forward == "kernel 1 1"
    assert gradient == "(None, 1, 0)"


WITH_X64 = """
import jax, jax.numpy as jnp, numpy as np
from kdagen.runtime.kda import kimi_delta_attention
jax.config.update("jax_enable_x64", True)
keys = jax.random.split(jax.random.key(0), 4)
q, k, v = (jax.random.normal(key, (1, 1, 40, 128), jnp.bfloat16) for key in keys[:3])
gate = -jnp.abs(jax.random.normal(keys[3], (1, 1, 40, 128), jnp.bfloat16))
beta = jnp.full((1, 1, 40), 0.5, jnp.bfloat16)
def run(name):
    out = kimi_delta_attention(
        q, k, v, gate, beta, use_qk_l2norm=True, output_final_state=True, implementation=name
    )
    return [np.asarray(x, np.float64) for x in out]
for x, y in zip(run("pallas"), run("recurrent")):
    print(np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2)) < 5e-3)
"""


def test_kernels_are_right_with_64_bit_types_enabled():
    done = run_program("-c", WITH_X64)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


def test_a_gradient_through_a_kernel_says_where_it_runs():
    forget_warnings()
    arrays = [jnp.zeros((1, 1, 8, 128), jnp.bfloat16)] * 4 + [jnp.zeros((1, 1, 8), jnp.bfloat16)]

    def loss(value):
        output, _ = kimi_delta_attention(*arrays[:2], value, *arrays[3:], implementation="pallas")
        return output.sum()

    with pytest.warns(KdagenWarning, match="no backward kernel"):
        jax.eval_shape(jax.grad(loss), arrays[2])
