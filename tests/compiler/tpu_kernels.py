"""Small kernels with known trip counts and bytes, compiled for one chip in a process of its own.

    python tpu_kernels.py CHIP OUT_DIR

leaves the listings of each in OUT_DIR/NAME and what came of the compiles in OUT_DIR/results.json.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdagen.chips import get_chip
from kdagen.compiler.aot import CompileError, compile_for

SWEEPS = 2
SHORT, LONG = 10, 40
BLOCK = (1, 256, 1024)  # 1 MiB of f32
PREFETCH_STEPS = 4
SEMANTICS = ("parallel", "arbitrary")


def copy(steps, vmem_limit_bytes=None):
    """Copies SWEEPS * steps MiB, block by block."""

    def kernel(x, out):
        out[...] = x[...]

    shape = (SWEEPS * steps, *BLOCK[1:])
    spec = pl.BlockSpec(BLOCK, lambda b, i: (b * steps + i, 0, 0))

    def function(x):
        return pl.pallas_call(
            kernel,
            grid=(SWEEPS, steps),
            in_specs=[spec],
            out_specs=spec,
            out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
            name="copy_kernel",
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=SEMANTICS, vmem_limit_bytes=vmem_limit_bytes
            ),
        )(x)

    return function, [(shape, jnp.float32)]


def loop():
    """A loop whose trip count, per grid step, is scalar-prefetch data."""

    def kernel(counts, x, out):
        def body(_, total):
            return total * 1.0001 + x[...]

        count = counts[pl.program_id(0)]
        out[...] = lax.fori_loop(0, count, body, jnp.zeros((8, 128), jnp.float32))

    spec = pl.BlockSpec((8, 128), lambda i, counts: (i, 0))

    def function(counts, x):
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1, grid=(PREFETCH_STEPS,), in_specs=[spec], out_specs=spec
            ),
            out_shape=jax.ShapeDtypeStruct((8 * PREFETCH_STEPS, 128), jnp.float32),
            name="loop_kernel",
        )(counts, x)

    return function, [
        ((PREFETCH_STEPS,), jnp.int32),
        ((8 * PREFETCH_STEPS, 128), jnp.float32),
    ]


def chain(steps, length):
    """A chain of dependent matmuls a step, summed over a sweep: zeroed first, written last."""

    def kernel(x, out, total):
        @pl.when(pl.program_id(1) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        a = x[0]
        for _ in range(length):
            a = jnp.dot(a, x[0], preferred_element_type=jnp.float32).astype(jnp.bfloat16)
        total[...] += a.astype(jnp.float32)

        @pl.when(pl.program_id(1) == steps - 1)
        def _():
            out[0] = total[...]

    def function(x):
        return pl.pallas_call(
            kernel,
            grid=(SWEEPS, steps),
            in_specs=[pl.BlockSpec((1, 128, 128), lambda b, i: (b * steps + i, 0, 0))],
            out_specs=pl.BlockSpec((1, 128, 128), lambda b, i: (b, 0, 0)),
            out_shape=jax.ShapeDtypeStruct((SWEEPS, 128, 128), jnp.float32),
            scratch_shapes=[pltpu.VMEM((128, 128), jnp.float32)],
            name="chain_kernel",
            compiler_params=pltpu.CompilerParams(dimension_semantics=SEMANTICS),
        )(x)

    return function, [((SWEEPS * steps, 128, 128), jnp.bfloat16)]


def scratch(size_bytes, vmem_limit_bytes=None):
    """Asks for that much VMEM."""

    def kernel(x, out, space):
        space[0:8, :] = x[...]
        out[...] = space[pl.ds(pl.program_id(0), 8), :]

    def function(x):
        return pl.pallas_call(
            kernel,
            grid=(2,),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            scratch_shapes=[pltpu.VMEM((size_bytes // 512, 128), jnp.float32)],
            name="scratch_kernel",
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit_bytes),
        )(x)

    return function, [((8, 128), jnp.float32)]


def unsupported():
    """Uses an operation that no TPU kernel can."""

    def kernel(x, out):
        out[...] = lax.sort(x[...])

    def function(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32))(x)

    return function, [((8, 128), jnp.float32)]


def wrong():
    """Raises while it is traced."""

    def function(x):
        raise ValueError("seven is not a shape")

    return function, [((8, 128), jnp.float32)]


def programs(chip):
    mib = 1 << 20
    return {
        "copy_short": copy(SHORT),
        "copy_long": copy(LONG),
        "copy_limit": copy(SHORT, 12 * mib),
        "copy_moved": copy(SHORT),
        "loop": loop(),
        "chain_short": chain(SHORT, 2),
        "chain_long": chain(LONG, 2),
        "chain_deep": chain(SHORT, 6),
        "over_default": scratch(chip.default_vmem_limit_bytes + mib),
        "over_capacity": scratch(chip.vmem_bytes, chip.vmem_bytes),
        "under_usable": scratch(chip.usable_vmem_bytes - 64 * 1024, chip.usable_vmem_bytes),
        "unsupported": unsupported(),
        "wrong": wrong(),
    }


def main(chip_name, out_dir):
    chip = get_chip(chip_name)
    results = {}
    for name, (function, args) in programs(chip).items():
        try:
            compiled = compile_for(chip, function, args, keep_in_hbm=name != "copy_moved")
        except CompileError as error:
            results[name] = {
                "kind": error.kind,
                "message": error.message,
                "used": error.used_bytes,
                "limit": error.limit_bytes,
            }
            continue
        results[name] = {
            "kind": None,
            "argument_bytes": compiled.argument_bytes,
            "output_bytes": compiled.output_bytes,
            "seconds": compiled.compile_seconds,
            "libtpu": compiled.libtpu_version,
            "text": compiled.text,
        }
        (out_dir / name).mkdir()
        for path in compiled.dump_dir.iterdir():
            path.rename(out_dir / name / path.name)
    (out_dir / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
