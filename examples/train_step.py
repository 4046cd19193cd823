"""Trains a small language model of Kimi Delta Attention layers, or compiles its step for a TPU.

    export JAX_PLATFORMS=cpu                         # on a machine with libtpu and no TPU
    python examples/train_step.py                    # about a minute on two cores of a CPU
    python examples/train_step.py --implementation pallas --steps 4 --batch 2   # interpreted
    python examples/train_step.py --compile-for v7x  # ahead of time, for one chip
    python examples/train_step.py --compile-for v7x --topology 2x2x1 --dtype bfloat16 \\
        --heads 8 --width 128 --tokens 1024 --checkpoint

The model is that of the Kimi Linear report (arXiv:2510.26692, section 4), of KDA layers only, on
bytes: of the language reference that comes with Python, or of any file. Losses are in nats a byte.
Batch and heads are divided between the devices there are, by `jax.shard_map` round the call of
`kimi_delta_attention` and by the shardings of `jax.jit` for everything else.
"""

import argparse
import dataclasses
import functools
import math
import os
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kdagen.chips import CHIPS, get_chip
from kdagen.compiler import aot
from kdagen.runtime.kda import kimi_delta_attention

BYTES = 256
SCOPE = "kda"  # what the call of the kernel is named in a compiled program
TAPS = 4  # of the short convolution

Parameters = dict[str, Any]


def _option(default: Any, text: str, **how: Any) -> Any:
    return field(default=default, metadata={"help": text, **how})


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 or more")
    return int(text)


@dataclass(frozen=True)
class Config:
    """What is trained, and how: the options of the command line."""

    layers: int = _option(2, "layers, each KDA and MLP")
    heads: int = _option(2, "heads of a layer")
    model: int = _option(128, "size of the residual stream")
    width: int = _option(64, "size of a head's keys and values")
    batch: int = _option(8, "sequences of a step, over all devices")
    tokens: int = _option(128, "bytes of a sequence")
    steps: int = _option(300, "steps of Adam")
    rate: float = _option(4e-3, "its highest rate", type=float)
    lower_bound: float | None = _option(
        None, "of the log decay, from -5 up to 0; none is the softplus gate", type=float
    )
    dtype: str = _option(
        "float32", "of activations; master weights are float32", choices=("float32", "bfloat16")
    )
    implementation: str | None = _option(
        None,
        "as kimi_delta_attention takes it; none is pallas on a TPU and xla_chunked elsewhere",
        choices=("pallas", "xla_chunked", "recurrent"),
    )
    checkpoint: bool = _option(
        False, "keep only each layer's input for the gradient", action="store_true"
    )
    seed: int = _option(0, "of the weights and of the pieces of text", type=int)


def init(config: Config, key: jax.Array) -> Parameters:
    """Weights in float32; those of "layers" have the layers as their first axis."""
    heads, model, width = config.heads, config.model, config.width
    hidden = heads * math.ceil(3 * model / heads)  # devices that divide heads divide it

    def weight(key: jax.Array, fan_in: int, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / math.sqrt(fan_in)

    def layer(key: jax.Array) -> Parameters:
        keys = iter(jax.random.split(key, 20))
        # The decay at the start, as in Mamba: a step of 1e-3 to 0.1 times a rate of 1 to 16.
        start = jnp.exp(jax.random.uniform(next(keys), (heads, width)) * math.log(100.0)) * 1e-3
        projections = {
            name: weight(next(keys), model, model, heads, width)
            for name in ("query", "key", "value")
        }
        taps = {
            f"{name}_taps": weight(next(keys), TAPS, TAPS, heads, width) for name in projections
        }
        return {
            **projections,
            **taps,
            "gate_down": weight(next(keys), model, model, width),
            "gate_up": weight(next(keys), width, width, heads, width),
            "a_log": jnp.log(jax.random.uniform(next(keys), (heads,), minval=1.0, maxval=16.0)),
            "delta_time_bias": jnp.log(jnp.expm1(start)),  # the inverse of softplus
            "beta": weight(next(keys), model, model, heads),
            "output_norm": jnp.ones(width),
            "output_gate_down": weight(next(keys), model, model, width),
            "output_gate_up": weight(next(keys), width, width, heads, width),
            "output": weight(next(keys), heads * width, heads, width, model),
            "mixer_norm": jnp.ones(model),
            "mlp_norm": jnp.ones(model),
            "mlp_up": weight(next(keys), model, model, 2, hidden),
            "mlp_down": weight(next(keys), hidden, hidden, model),
        }

    embedding, head, *layers = jax.random.split(key, 2 + config.layers)
    return {
        "embedding": weight(embedding, 1, BYTES, model),
        "layers": jax.vmap(layer)(jnp.stack(layers)),
        "norm": jnp.ones(model),
        "head": weight(head, model, model, BYTES),
    }


def partition(parameters: Parameters) -> Parameters:
    """How each weight is divided: whatever has heads by them, the MLP by its hidden axis."""
    per_head = P(None, None, "heads")
    of_layer = {
        **dict.fromkeys(("query", "key", "value"), per_head),
        **dict.fromkeys(("query_taps", "key_taps", "value_taps"), per_head),
        **dict.fromkeys(("gate_up", "output_gate_up", "beta"), per_head),
        **dict.fromkeys(("a_log", "delta_time_bias", "output", "mlp_down"), P(None, "heads")),
        "mlp_up": P(None, None, None, "heads"),
    }
    layers = {name: of_layer.get(name, P()) for name in parameters["layers"]}
    return {**dict.fromkeys(parameters, P()), "layers": layers}


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    norm = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * norm * weight).astype(x.dtype)


def short_convolution(x: jax.Array, taps: jax.Array) -> jax.Array:
    """Each channel of x [H, B, T, D] over its own last TAPS tokens, by taps [TAPS, H, D]."""
    tokens = x.shape[2]
    padded = jnp.pad(x, ((0, 0), (0, 0), (TAPS - 1, 0), (0, 0)))
    terms = (padded[:, :, i : i + tokens] * taps[i][:, None, None, :] for i in range(TAPS))
    return functools.reduce(jnp.add, terms)


def delta_attention(config: Config, *operands: jax.Array) -> jax.Array:
    """query, key, value, raw gate [H, B, T, D], beta [H, B, T], a_log [H], bias [H, D] to output.

    Every device has its own rows and heads and needs nothing of the others'.
    """

    def call(
        query: jax.Array, key: jax.Array, value: jax.Array, gate: jax.Array, beta: jax.Array,
        a_log: jax.Array, delta_time_bias: jax.Array,
    ) -> jax.Array:  # fmt: skip
        output, _ = kimi_delta_attention(
            query, key, value, gate, beta,
            a_log=a_log,
            delta_time_bias=delta_time_bias,
            use_gate_in_kernel=True,
            lower_bound=config.lower_bound,
            use_qk_l2norm=True,
            implementation=config.implementation,
        )  # fmt: skip
        return output

    rows = P("heads", "batch")
    # JAX's interpreter of kernels takes no check_vma=True; on a TPU both are the same.
    sharded = jax.shard_map(
        call, in_specs=(rows,) * 5 + (P("heads"),) * 2, out_specs=rows, check_vma=False
    )
    with jax.named_scope(SCOPE):
        return sharded(*operands)


def mixer(config: Config, weights: Parameters, x: jax.Array) -> jax.Array:
    """The KDA layer of the report, x [B, T, M] to [B, T, M]."""

    def mixed(name: str) -> jax.Array:
        projected = jnp.einsum("btm,mhd->hbtd", x, weights[name])
        return jax.nn.silu(short_convolution(projected, weights[f"{name}_taps"]))

    def low_rank(name: str) -> jax.Array:
        return jnp.einsum("btr,rhd->hbtd", x @ weights[f"{name}_down"], weights[f"{name}_up"])

    output = delta_attention(
        config, mixed("query"), mixed("key"), mixed("value"), low_rank("gate"),
        jax.nn.sigmoid(jnp.einsum("btm,mh->hbt", x, weights["beta"])),
        weights["a_log"], weights["delta_time_bias"],
    )  # fmt: skip
    gated = rms_norm(output, weights["output_norm"]) * jax.nn.sigmoid(low_rank("output_gate"))
    return jnp.einsum("hbtd,hdm->btm", gated, weights["output"])


def mlp(weights: Parameters, x: jax.Array) -> jax.Array:
    """SwiGLU, x [B, T, M] to [B, T, M]."""
    gate, up = jnp.einsum("btm,mgf->gbtf", x, weights["mlp_up"])
    return (jax.nn.silu(gate) * up) @ weights["mlp_down"]


def predict(config: Config, parameters: Parameters, text: jax.Array) -> jax.Array:
    """Logarithms of the probabilities [B, T, 256] of the byte after each of text [B, T]."""
    dtype = jnp.dtype(config.dtype)
    in_float32 = {"a_log", "delta_time_bias", "output_norm", "mixer_norm", "mlp_norm"}

    def layer(x: jax.Array, weights: Parameters) -> tuple[jax.Array, None]:
        weights = {n: w if n in in_float32 else w.astype(dtype) for n, w in weights.items()}
        x = x + mixer(config, weights, rms_norm(x, weights["mixer_norm"]))
        return x + mlp(weights, rms_norm(x, weights["mlp_norm"])), None

    if config.checkpoint:
        layer = jax.checkpoint(layer, prevent_cse=False)  # a scan needs no guard against CSE
    x = parameters["embedding"].astype(dtype)[text]
    x, _ = jax.lax.scan(layer, x, parameters["layers"])
    logits = rms_norm(x, parameters["norm"]) @ parameters["head"].astype(dtype)
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def loss_of(config: Config, parameters: Parameters, text: jax.Array) -> jax.Array:
    """Mean cross entropy, in nats, of each byte of text [B, T + 1] but the first."""
    scores = predict(config, parameters, text[:, :-1])
    return -jnp.mean(jnp.take_along_axis(scores, text[:, 1:, None].astype(jnp.int32), axis=-1))


class State(NamedTuple):
    """Weights, Adam's two moments of each, and the number of steps taken; or what is said of each,
    as its sharding."""

    parameters: Parameters
    first: Parameters
    second: Parameters
    taken: Any


def start(config: Config) -> State:
    """The state before the first step."""
    parameters = init(config, jax.random.key(config.seed))
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    return State(parameters, zeros, jax.tree.map(jnp.zeros_like, parameters), jnp.int32(0))


def step(config: Config, state: State, text: jax.Array) -> tuple[State, jax.Array]:
    """One step of Adam on text [B, T + 1]; the new state and the loss before it."""
    loss, gradient = jax.value_and_grad(partial(loss_of, config))(state.parameters, text)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradient)
    done = (state.taken + 1).astype(jnp.float32)
    warm_up = jnp.minimum(1.0, done / max(1, config.steps // 10))
    rate = config.rate * warm_up * (0.55 + 0.45 * jnp.cos(jnp.pi * done / config.steps))
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.first, gradient)
    second = jax.tree.map(lambda v, g: 0.98 * v + 0.02 * g * g, state.second, gradient)

    def update(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return w - rate * (m / (1 - 0.9**done)) / (jnp.sqrt(v / (1 - 0.98**done)) + 1e-8)

    parameters = jax.tree.map(update, state.parameters, first, second)
    return State(parameters, first, second, state.taken + 1), loss


def make_mesh(config: Config, devices: list[Any]) -> Mesh:
    """Devices by ("batch", "heads"), as near to a square as batch and heads divide.

    Raises:
      SystemExit: they divide in no way.
    """
    total = len(devices)
    shapes = [
        (rows, total // rows)
        for rows in range(1, total + 1)
        if total % rows == config.batch % rows == config.heads % (total // rows) == 0
    ]
    if not shapes:
        raise SystemExit(
            f"--batch {config.batch} and --heads {config.heads}: got numbers that {total} devices "
            f"do not divide, expected a divisor of each whose product is {total}"
        )
    shape = min(shapes, key=lambda sizes: abs(sizes[0] - sizes[1]))
    return Mesh(np.array(devices).reshape(shape), ("batch", "heads"))


def shardings(config: Config, mesh: Mesh) -> tuple[State, NamedSharding]:
    """Of the state and of the text."""
    specs = partition(jax.eval_shape(partial(start, config)).parameters)
    put = partial(NamedSharding, mesh)
    state = jax.tree.map(put, State(specs, specs, specs, P()))
    return state, put(P("batch"))


def jitted_step(config: Config, mesh: Mesh) -> Any:
    """`step`, whose state is donated and keeps its shardings."""
    state, _ = shardings(config, mesh)
    return jax.jit(
        partial(step, config), donate_argnums=0, out_shardings=(state, NamedSharding(mesh, P()))
    )


def load_text(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and the tenth at the end that is held out."""
    if path is None:
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        text = path.read_bytes()
    data = np.frombuffer(text, np.uint8)
    return data[: -len(data) // 10], data[-len(data) // 10 :]


def unigram_loss(train: np.ndarray, held_out: np.ndarray) -> float:
    """Nats a byte of held-out text for one who knows how often each byte comes, and no more."""
    counts = np.bincount(train, minlength=BYTES) + 1
    return float(-np.mean(np.log(counts / counts.sum())[held_out]))


def windows(config: Config, data: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A batch [B, T + 1] of pieces of the text."""
    starts = random.integers(0, len(data) - config.tokens, config.batch)
    return data[starts[:, None] + np.arange(config.tokens + 1)]


def fit(
    config: Config, mesh: Mesh, data: np.ndarray, every: int = 25
) -> tuple[Parameters, list[float]]:
    """Trains; prints the mean loss of every so many steps. The weights, and the loss of each."""
    random = np.random.default_rng(config.seed)
    losses: list[jax.Array] = []
    with jax.set_mesh(mesh):
        of_state, of_text = shardings(config, mesh)
        state = jax.jit(partial(start, config), out_shardings=of_state)()
        advance = jitted_step(config, mesh)
        began = time.perf_counter()
        for done in range(1, config.steps + 1):
            batch = jax.device_put(windows(config, data, random), of_text)
            state, loss = advance(state, batch)
            losses.append(loss)
            if done == 1 or done % every == 0 or done == config.steps:
                recent = float(np.mean(losses[-every:]))
                seconds = time.perf_counter() - began
                print(f"step {done}/{config.steps}  loss {recent:.4f}  {seconds:.1f} s", flush=True)
    return state.parameters, [float(loss) for loss in losses]


def measure(config: Config, mesh: Mesh, parameters: Parameters, data: np.ndarray) -> float:
    """The mean loss of 8 batches of the text."""
    random = np.random.default_rng(config.seed)
    with jax.set_mesh(mesh):
        _, of_text = shardings(config, mesh)
        loss = jax.jit(partial(loss_of, config))
        pieces = [jax.device_put(windows(config, data, random), of_text) for _ in range(8)]
        return float(np.mean([loss(parameters, piece) for piece in pieces]))


def train(config: Config, text: Path | None, every: int) -> None:
    """Trains on the devices there are, and says how well."""
    data, held_out = load_text(text)
    if len(held_out) <= config.tokens:
        raise SystemExit(
            f"--text: got {len(data) + len(held_out)} bytes, of which {len(held_out)} are held "
            f"out, expected more than --tokens {config.tokens} of these"
        )
    mesh = make_mesh(config, jax.devices())
    baseline = unigram_loss(data, held_out)
    print(
        f"on {mesh.size} {jax.devices()[0].device_kind}, batch x heads {mesh.devices.shape}; "
        f"{len(data)} bytes of text; from how often each byte comes, the loss is {baseline:.4f}",
        flush=True,
    )
    parameters, _ = fit(config, mesh, data, every)
    print(f"loss of held-out text {measure(config, mesh, parameters, held_out):.4f}")


def compile_step(config: Config, chip_name: str, topology: str | None) -> aot.CompiledFor:
    """The step as it runs on a TPU, made on a machine that need not have one.

    Args:
      topology: chips in x, y and z; None is one chip.

    Raises:
      kdagen.compiler.aot.CompileError: there is no such topology, or the compiler refused.
    """
    chip = get_chip(chip_name)
    if topology is not None:
        family = chip.topology.partition(":")[0]
        chip = dataclasses.replace(chip, topology=f"{family}:{topology}")
    devices = aot.topology_devices(chip)
    if topology is None:
        # Not every libtpu has a topology of one chip, and any has the first chip of a larger one.
        devices = [device for device in devices if device.coords == devices[0].coords]
    mesh = make_mesh(config, devices)
    of_state, of_text = shardings(config, mesh)
    shapes = jax.eval_shape(partial(start, config))
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        of_state,
    )
    text = jax.ShapeDtypeStruct((config.batch, config.tokens + 1), jnp.uint8, sharding=of_text)
    print(f"compiling for {mesh.size} devices, batch x heads {mesh.devices.shape}", flush=True)
    return aot.compile_for(chip, jitted_step(config, mesh), [state, text], mesh=mesh)


def kernels_in(text: str) -> list[str]:
    """Names of kdagen's kernels in a compiled program."""
    return sorted(set(re.findall(r"kda_(?:forward|backward)_[0-9a-f]{12}", text)))


def collectives_in(text: str) -> list[tuple[str, str, str]]:
    """Of every array that a compiled program exchanges: the collective, its type, who asked."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    call = re.compile(rf"(%[\w.-]+) = (\S+|\(.*?\)) ({kinds})(?:-start)?\(")
    part = re.compile(r" = (\S+) get-tuple-element\((%[\w.-]+)\)")
    lines = text.splitlines()
    calls = {m[1]: (m[3], m[2], line) for line in lines if (m := call.search(line))}
    parts = [(m[2], m[1], line) for line in lines if (m := part.search(line)) and m[2] in calls]
    # XLA makes one collective of several, and each of its parts keeps the name of its origin.
    whole = [calls[name] for name in calls.keys() - {name for name, _, _ in parts}]
    arrays = whole + [(calls[name][0], kind, line) for name, kind, line in parts]
    origin = re.compile(r'op_name="([^"]*)"')
    return sorted(
        (name, re.sub(r"{[^}]*}", "", kind), found[1] if (found := origin.search(line)) else "")
        for name, kind, line in arrays
    )


def report(compiled: aot.CompiledFor) -> bool:
    """Prints what a compiled step holds; whether kernels run its forward and its backward."""
    kernels = kernels_in(compiled.text)
    print(f"compiled in {compiled.compile_seconds:.0f} s; kernels: {', '.join(kernels) or 'none'}")
    print(
        f"HBM of a device: {compiled.argument_bytes / 2**20:.1f} MiB of arguments, "
        f"{compiled.temporary_bytes / 2**20:.1f} MiB of temporaries"
    )
    exchanged = collectives_in(compiled.text)
    of_call = [x for x in exchanged if f"/{SCOPE}/" in x[2]]
    for name, kind, origin in of_call:
        print(f"exchanged for the KDA call: {name} of {kind} ({origin})")
    if not of_call:
        print("exchanged for the KDA call: nothing")
    others = Counter(name for name, _, _ in exchanged) - Counter(name for name, _, _ in of_call)
    print("exchanged for the rest:", ", ".join(f"{n} {k}" for k, n in others.items()) or "nothing")
    return {name.split("_")[1] for name in kernels} == {"forward", "backward"}


def parse(arguments: list[str] | None = None) -> tuple[Config, argparse.Namespace]:
    """The model, and what to do with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for one in dataclasses.fields(Config):
        how = dict(one.metadata)
        if not how.keys() & {"type", "choices", "action"}:
            how["type"] = _positive
        if one.default not in (None, False):
            how["help"] += f" ({one.default})"
        parser.add_argument(f"--{one.name.replace('_', '-')}", default=one.default, **how)
    add = parser.add_argument
    add("--every", type=_positive, default=25, help="steps between lines of progress (25)")
    add("--text", type=Path, help="file to train on, in place of Python's language reference")
    add("--compile-for", choices=sorted(CHIPS), help="compile a step for this chip; train nothing")
    add("--topology", help="chips to compile for, as 2x2x1 (2x2 for v5e, v6e); none is one chip")
    add("--hlo", type=Path, help="file for the text of the compiled step")
    options = parser.parse_args(arguments)
    if options.compile_for is None and (options.topology or options.hlo):
        parser.error("--topology and --hlo: expected with --compile-for")
    if options.text is not None and not options.text.is_file():
        parser.error(f"--text: got {options.text}, expected an existing file")
    return Config(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Config)}), options


def main() -> int:
    """Runs the script; its exit code: 1 where a step could not be compiled, or holds no kernels."""
    config, options = parse()
    if options.compile_for is None:
        train(config, options.text, options.every)
        return 0
    # This process computes on the CPU and needs the TPU's compiler only.
    os.environ.update(aot.worker_environment())
    jax.config.update("jax_platforms", "cpu")
    try:
        compiled = compile_step(config, options.compile_for, options.topology)
    except aot.CompileError as error:
        print(f"not compiled for {options.compile_for}: {error}", file=sys.stderr)
        return 1
    if options.hlo is not None:
        options.hlo.write_text(compiled.text)
    return 0 if report(compiled) else 1


if __name__ == "__main__":
    sys.exit(main())
