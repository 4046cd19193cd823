"""The example that trains: on kernels as on the chunk form, on several devices, and compiled."""

import functools
import importlib.util
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

from kdagen.compiler.aot import libtpu_version, worker_environment
from tests.house.documents import ROOT

SCRIPT = ROOT / "examples" / "train_step.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their own module up
    sys.modules["train_step"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_step"]


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile():
    """The host's programs run for moments here, and compile for much longer if optimised."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def small(example):
    return example.Config(batch=2, steps=4, model=64, width=32)


@pytest.fixture(scope="module")
def longer(small):
    return replace(small, batch=4, tokens=64, steps=60, implementation="xla_chunked")


@pytest.fixture(scope="module")
def text(example):
    """What is read, and what is held out."""
    return example.load_text(None)


@pytest.fixture(scope="module")
def trained(example, longer, text):
    """On one device, the weights and the losses."""
    return example.fit(longer, example.make_mesh(longer, jax.devices()[:1]), text[0])


# What one output may be off by, of its size (the contract of the operator). Gradients may be off by
# somewhat more, and the loss feels only what is off along the step.
BOUNDS = {"float32": 2e-5, "bfloat16": 5e-3}


@pytest.mark.parametrize(
    ("dtype", "facts"),
    [("float32", {}), ("bfloat16", dict(lower_bound=-5.0, checkpoint=True))],
)
def test_kernels_train_as_the_chunk_form_does(example, small, text, dtype, facts):
    config = replace(small, dtype=dtype, **facts)
    mesh = example.make_mesh(config, jax.devices()[:1])
    losses = {
        name: example.fit(replace(config, implementation=name), mesh, text[0])[1]
        for name in ("xla_chunked", "pallas")
    }
    np.testing.assert_allclose(losses["pallas"], losses["xla_chunked"], rtol=BOUNDS[dtype])
    assert losses["pallas"][-1] < losses["pallas"][0] - 0.5


def test_the_loss_falls_below_that_of_single_bytes(example, longer, text, trained):
    parameters, losses = trained
    unigram = example.unigram_loss(*text)
    held_out = example.measure(
        longer, example.make_mesh(longer, jax.devices()[:1]), parameters, text[1]
    )
    assert abs(losses[0] - math.log(256)) < 1
    assert 3 < unigram < 3.5
    assert held_out < unigram - 0.5 and np.mean(losses[-5:]) < unigram - 0.5


def test_the_model_looks_at_no_later_byte(example, small):
    parameters = example.init(small, jax.random.key(1))
    text = np.random.default_rng(0).integers(0, 256, (2, 64), np.uint8)
    other = text.copy()
    other[:, 33] ^= 1
    predict = jax.jit(functools.partial(example.predict, small, parameters))
    with jax.set_mesh(example.make_mesh(small, jax.devices()[:1])):
        change = np.abs(predict(text) - predict(other)).max(axis=(0, 2))
    assert not change[:33].any()
    assert change[33:].all()


def test_devices_that_do_not_divide_batch_and_heads_are_refused(example, small):
    with pytest.raises(SystemExit, match=r"--batch 2 and --heads 2: got .* 8 devices"):
        example.make_mesh(small, [object()] * 8)
    assert example.make_mesh(small, jax.devices()[:1]).shape == {"batch": 1, "heads": 1}


def test_whatever_divides_the_heads_divides_the_weights(example, small):
    config = replace(small, heads=5)
    weights = jax.eval_shape(functools.partial(example.start, config)).parameters["layers"]
    specs = {
        name: list(spec) for name, spec in example.partition({"layers": weights})["layers"].items()
    }
    divided = {
        name: weights[name].shape[spec.index("heads")]
        for name, spec in specs.items()
        if "heads" in spec
    }
    alike = {"gate_down", "output_gate_down", "output_norm", "mixer_norm", "mlp_norm"}
    assert divided.keys() == weights.keys() - alike
    assert all(size % 5 == 0 for size in divided.values()), divided


def test_bad_options_are_named(example, capsys):
    for arguments, said in (
        (["--batch", "0"], "argument --batch: got 0, expected 1 or more"),
        (["--text", "nowhere"], "--text: got nowhere, expected an existing file"),
        (["--topology", "2x2x1"], "--topology and --hlo: expected with --compile-for"),
        (["--compile-for", "v3"], "argument --compile-for: invalid choice: 'v3'"),
    ):
        with pytest.raises(SystemExit):
            example.parse(arguments)
        assert said in capsys.readouterr().err


def run(environment, *arguments):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_four_devices_train_as_one_does(longer, trained):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    host = {**os.environ, "XLA_FLAGS": flags.strip(), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    options = [
        f"--{name}={getattr(longer, name)}"
        for name in ("batch", "steps", "tokens", "model", "width", "implementation")
    ]
    said = run(host, *options, "--every", "10")
    assert "on 4 cpu, batch x heads (2, 2)" in said
    shown = [float(loss) for loss in re.findall(r"^step \d+/60  loss (\S+)", said, re.MULTILINE)]
    _, losses = trained
    # Later, what differs by rounding has grown; printed are four digits.
    expected = [losses[0], np.mean(losses[:10]), np.mean(losses[10:20])]
    np.testing.assert_allclose(shown[:3], expected, rtol=BOUNDS["float32"], atol=1e-4)
    assert shown[-1] < shown[0] - 2.5


@pytest.mark.skipif(libtpu_version() is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("options", "devices"),
    [
        pytest.param("--batch 1 --checkpoint", "2 devices, batch x heads (1, 2)", id="one-chip"),
        pytest.param("--heads 4 --topology 2x2x1", "8 devices, batch x heads (2, 4)", id="2x2x1"),
    ],
)
def test_compiled_for_v7x(example, tmp_path, options, devices):
    hlo = tmp_path / "step.txt"
    said = run(
        worker_environment(), "--compile-for", "v7x", "--dtype", "bfloat16", "--width", "128",
        "--hlo", str(hlo), *options.split(),
    )  # fmt: skip
    text = hlo.read_text()
    kernels = set(re.findall(r"kda_(forward|backward)_[0-9a-f]{12}", text))
    assert kernels == {"forward", "backward"}
    assert devices in said

    found = example.collectives_in(text)
    # the rest sums over heads and over batch, and moves nothing otherwise
    assert {name for name, _, _ in found} == {"all-reduce"}
    of_attention = [kind for _, kind, origin in found if "/kda/" in origin]
    if "--topology" not in options:
        assert of_attention == [] and "exchanged for the KDA call: nothing" in said
        return
    # A device's one head of four: a_log and delta_time_bias, of one layer or of both at once.
    assert all(kind.startswith("f32[") for kind in of_attention)
    sizes = sorted(math.prod(map(int, re.findall(r"\d+", kind[3:]))) for kind in of_attention)
    assert sizes in ([1, 128], [2, 256])
    assert said.count("exchanged for the KDA call: all-reduce of f32[") == 2
