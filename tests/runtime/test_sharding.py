"""shard_map over batch and heads on four host devices, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from kdagen.compiler.aot import worker_environment

PROGRAM = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from tests.reference.cases import make_case, relative_error
from tests.runtime.run import call

implementation, packed = sys.argv[1], sys.argv[2] == "packed"
case = make_case(raw=True, tokens=9, width_k=8, width_v=8, batch=2,
                 boundaries=[[0, 3, 3, 8], [0, 4, 9, 9]] if packed else None)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("batch", "heads"))
rows = P("heads", "batch")
specs = dict(query=rows, key=rows, value=rows, gate=rows, beta=rows, a_log=P("heads"),
             delta_time_bias=P("heads"), initial_state=P("batch", None, "heads"))
edges = jnp.asarray(case.boundaries) if packed else None
state = specs["initial_state"]

def run(operands, edges):
    return call(operands, cu_seqlens=edges, output_final_state=True,
                implementation=implementation, **case.static)

report = {}
# JAX's interpreter of kernels takes no check_vma=True
for check in (True, False) if implementation != "pallas" else (False,):
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(specs, P("batch") if packed else None),
                            out_specs=(rows, state),
                            check_vma=check)

    def all_of_it(operands):
        out, pull = jax.vjp(lambda x: sharded(x, edges), operands)
        return out, pull((case.d_output, case.d_state))[0]

    quick = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(all_of_it).lower(case.operands).compile(compiler_options=quick)
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


COMPILED = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from kdagen.chips import get_chip
from kdagen.compiler import aot
from tests.runtime.run import call

chip = get_chip("v6e")
mesh = Mesh(np.array(aot.topology_devices(chip)[:4]).reshape(2, 2), ("batch", "heads"))
rows, whole, state = P("heads", "batch"), P("heads"), P("batch", None, "heads")
specs = dict.fromkeys(("query", "key", "value", "gate", "beta"), rows)
specs |= dict(a_log=whole, delta_time_bias=whole, initial_state=state)
shapes = {name: ((2, 2, 256, 128), jnp.bfloat16) for name in ("query", "key", "value", "gate")}
shapes |= dict(beta=((2, 2, 256), jnp.bfloat16), a_log=((2,), jnp.float32),
               delta_time_bias=((2, 128), jnp.float32),
               initial_state=((2, 1, 2, 128, 128), jnp.float32))

def run(operands):
    return call(operands, use_gate_in_kernel=True, output_final_state=True)

report = {}
for check in (True, False):
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=(rows, state),
                            check_vma=check)

    def loss(operands):
        output, final = sharded(operands)
        return output.astype(jnp.float32).sum() + final.sum()

    arguments = {n: jax.ShapeDtypeStruct(*x, sharding=NamedSharding(mesh, specs[n]))
                 for n, x in shapes.items()}
    text = aot.compile_for(chip, jax.grad(loss), [arguments], mesh=mesh).text
    report[str(check)] = {
        "kernels": sorted(set(re.findall(r"kda_(forward|backward)_\\w+", text))),
        "reductions": len(re.findall(r" all-reduce(?:-start)?\\(", text)),
        "others": len(re.findall(r" (?:all-gather|all-to-all|collective-permute|reduce-scatter)"
                                 r"(?:-start)?\\(", text)),
    }
print(json.dumps(report))
"""


def run(environment, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", *arguments],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reports():
    """By implementation, packing and check_vma, what four host devices compute."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    host = {**os.environ, "XLA_FLAGS": flags.strip()}
    return {
        (*of, check): found
        for of in (("xla_chunked", "packed"), ("pallas", "whole"), ("pallas", "packed"))
        for check, found in run(host, PROGRAM, *of).items()
    }


@pytest.fixture(scope="module")
def compiled():
    """By check_vma, what a program for four TPUs holds."""
    return run(worker_environment(), COMPILED)


EVERY = [
    ("xla_chunked", "packed", "True"),
    ("xla_chunked", "packed", "False"),
    ("pallas", "whole", "False"),
    ("pallas", "packed", "False"),
]


@pytest.mark.parametrize("of", EVERY)
def test_shards_compute_what_one_device_does(reports, of):
    errors = reports[of]["errors"]
    assert len(errors) == 10
    assert max(errors.values()) < 5e-5, errors


@pytest.mark.parametrize("of", EVERY)
def test_only_the_parameters_of_the_gate_are_summed(reports, of):
    assert 1 <= reports[of]["reductions"] <= 2
    assert reports[of]["others"] == 0


@pytest.mark.parametrize("check_vma", ["True", "False"])
def test_kernels_on_four_tpus_need_no_other_collective(compiled, check_vma):
    found = compiled[check_vma]
    assert found["kernels"] == ["backward", "forward"]
    assert 1 <= found["reductions"] <= 3 and found["others"] == 0
