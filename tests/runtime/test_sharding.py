"""shard_map over batch and heads on four host devices, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import functools, json, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from tests.reference.cases import make_case, relative_error
from tests.runtime.run import call

case = make_case(raw=True, tokens=9, width_k=8, width_v=8, batch=2,
                 boundaries=[[0, 3, 3, 8], [0, 4, 9, 9]])
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("batch", "heads"))
rows = P("heads", "batch")
specs = dict(query=rows, key=rows, value=rows, gate=rows, beta=rows, a_log=P("heads"),
             delta_time_bias=P("heads"), initial_state=P("batch", None, "heads"))
edges = jnp.asarray(case.boundaries)
state = specs["initial_state"]

def run(operands, edges):
    return call(operands, cu_seqlens=edges, output_final_state=True, **case.static)

report = {}
for check in (True, False):
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(specs, P("batch")), out_specs=(rows, state),
                            check_vma=check)

    def all_of_it(operands):
        out, pull = jax.vjp(lambda x: sharded(x, edges), operands)
        return out, pull((case.d_output, case.d_state))[0]

    compiled = jax.jit(all_of_it).lower(case.operands).compile()
    (output, final), grads = compiled(case.operands)
    found = {"output": output, "final_state": final, **grads}
    text = compiled.as_text()
    report[str(check)] = {
        "errors": {n: relative_error(x, case.reference()[n]) for n, x in found.items()},
        "reductions": len(re.findall(r" all-reduce(?:-start)?\\(", text)),
        "others": len(re.findall(r" (?:all-gather|all-to-all|collective-permute|reduce-scatter)"
                                 r"(?:-start)?\\(", text)),
    }
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "XLA_FLAGS": flags.strip(), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("check_vma", ["True", "False"])
def test_shards_compute_what_one_device_does(report, check_vma):
    errors = report[check_vma]["errors"]
    assert len(errors) == 10
    assert max(errors.values()) < 2e-5, errors


@pytest.mark.parametrize("check_vma", ["True", "False"])
def test_only_the_parameters_of_the_gate_are_summed(report, check_vma):
    assert 1 <= report[check_vma]["reductions"] <= 2
    assert report[check_vma]["others"] == 0
