"""Compiles a training step for a TPU on a machine that has none, and looks for the tuned kernels.

    python examples/aot_step.py                       # for v7x, with whatever the tables hold
    python examples/aot_step.py --chip v6e --strict   # an error unless this shape was tuned

The step is an ordinary jitted function: a layer with projections round `kimi_delta_attention`, its
gradient, and an update. Nothing in it says what it is compiled for: that is the mesh's affair.
Prints the names and variant ids of its kernels, forward and backward, as found in the compiled
program; exits with 1 if no kernel is in there.
"""

import argparse
import os
import re
import sys

# Before JAX is imported: this process computes on the CPU, needs the TPU compiler only, and
# neither asks for a cloud machine's metadata nor for the library to itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdagen.chips import CHIPS, get_chip
from kdagen.runtime import dispatch
from kdagen.runtime.kda import kimi_delta_attention

# heads and tokens of train-fixed-step in shapes.yaml, which the packaged tables have tuned
BATCH, TOKENS, MODEL, HEADS, WIDTH = 1, 8192, 256, 32, 128


def layer(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """x [B, T, M] bf16 to [B, T, M]: one Kimi Delta Attention layer with a residual connection."""
    project = lambda name: jnp.einsum("btm,mhd->hbtd", x, parameters[name])  # noqa: E731
    output, _ = kimi_delta_attention(
        project("query"),
        project("key"),
        project("value"),
        project("gate"),
        jax.nn.sigmoid(project("beta"))[..., 0],
        a_log=parameters["a_log"],
        delta_time_bias=parameters["delta_time_bias"],
        use_gate_in_kernel=True,
        lower_bound=-5.0,
        use_qk_l2norm=True,
    )
    return x + jnp.einsum("hbtd,hdm->btm", output, parameters["out"])


@jax.jit
def step(
    parameters: dict[str, jax.Array], x: jax.Array, target: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """One step of gradient descent; the new parameters and the loss."""

    def loss(parameters: dict[str, jax.Array]) -> jax.Array:
        error = layer(parameters, x) - target
        return jnp.mean(error.astype(jnp.float32) ** 2)

    value, gradient = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), parameters, gradient), value


def compile_for(chip_name: str) -> str:
    """Text of the step, compiled for one core of a chip."""
    chip = get_chip(chip_name)
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=chip.topology, **dict(chip.topology_options)
    )
    mesh = Mesh(np.array(topology.devices[:1]), ("data",))

    def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    wide = array(MODEL, HEADS, WIDTH)
    parameters = {
        "query": wide,
        "key": wide,
        "value": wide,
        "gate": wide,
        "beta": array(MODEL, HEADS, 1),
        "out": array(HEADS, WIDTH, MODEL),
        "a_log": array(HEADS, dtype="float32"),
        "delta_time_bias": array(HEADS, WIDTH, dtype="float32"),
    }
    x = array(BATCH, TOKENS, MODEL)
    # The mesh tells the trace which chip it is for, and so which kernel to take.
    with jax.set_mesh(mesh):
        return step.lower(parameters, x, x).compile().as_text() or ""


def main() -> int:
    """Runs the script; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=sorted(CHIPS), default="v7x")
    parser.add_argument("--db", help="tuned table, in place of the default one")
    parser.add_argument("--strict", action="store_true", help="fail unless this shape was tuned")
    options = parser.parse_args()
    dispatch.configure(db=options.db, strict=options.strict)
    text = compile_for(options.chip)
    found = sorted(set(re.findall(r"kda_(forward|backward)_([0-9a-f]{12})", text)), reverse=True)
    if not found:
        print(f"no kernel in the program compiled for {options.chip}", file=sys.stderr)
        return 1
    for pass_name, variant_id in found:
        print(f"compiled for {options.chip}: kernel kda_{pass_name}_{variant_id}, "
              f"variant id {variant_id}...")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
