"""The generated kernels behind the public function: interpreted here, compiled for a TPU."""

import dataclasses
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdagen.chips import get_chip
from kdagen.generate import variant_id
from kdagen.gradient import source
from kdagen.gradient.step import check_step, keeping, paired
from kdagen.gradient.variant import Request
from kdagen.measure.accuracy import relative_error
from kdagen.problem import Problem
from kdagen.reference.options import Options
from kdagen.runtime import dispatch, pallas
from kdagen.runtime.arguments import check_call
from kdagen.runtime.kda import kimi_delta_attention
from kdagen.runtime.target import (
    KdagenWarning,
    NoKernelError,
    Target,
    find_target,
    forget_warnings,
)
from kdagen.space import default_variant
from kdagen.store.rows import Environment
from kdagen.store.tuned import Store
from kdagen.variant import VariantError
from tests.reference.cases import assert_close, make_case
from tests.runtime.run import PER_TOKEN, call, results
from tests.store.rows import result

EXAMPLE = Path(__file__).parents[2] / "examples" / "aot_step.py"


QUICK = {"xla_backend_optimization_level": 0}
OPTIONAL = (
    "a_log", "delta_time_bias", "lower_bound", "scale", "initial_state", "segment_ids",
    "cu_seqlens", "max_num_segments", "context_parallel", "residuals", "implementation",
)  # fmt: skip
STATIC = dict(use_gate_in_kernel=False, use_qk_l2norm=True, output_final_state=False, layout="HBTD")


@pytest.mark.parametrize(
    ("facts", "options"),
    [
        (dict(raw=True, dtype="bfloat16", width_k=128, width_v=128), dict(residuals="save")),
        (
            dict(raw=True, lower_bound=-5.0, dtype="float32", batch=2, value_heads=2),
            dict(residuals="rematerialize", layout="BTHD"),
        ),
        (dict(gate="resets", dtype="bfloat16"), dict()),
    ],
    ids=[
        "softplus, saved states",
        "bounded and grouped in float32, rematerialised, BTHD",
        "resets",
    ],
)
def test_interpreted_with_its_gradient(facts, options):
    case = make_case(heads=1, tokens=140, **facts)
    if options.get("layout") != "BTHD":
        found, again = (results(case, implementation="pallas", **options) for _ in range(2))
        assert_close(found, case)
        jax.tree.map(np.testing.assert_array_equal, found, again)
        return
    moved = dataclasses.replace(
        case, operands=heads_moved(case.operands), d_output=jnp.moveaxis(case.d_output, 0, 2)
    )
    found = results(moved, implementation="pallas", **options)
    assert_close(heads_moved(found, back=True), case)


def heads_moved(tensors, back=False):
    """Between layouts HBTD and BTHD."""
    ways = (2, 0) if back else (0, 2)
    moved = (*PER_TOKEN, "output")
    return {n: jnp.moveaxis(x, *ways) if n in moved else x for n, x in tensors.items()}


@pytest.mark.parametrize(
    ("precision", "told", "exact"),
    [
        ("high", "high", False),
        ("tensorfloat32", "high", False),
        ("BF16_BF16_F32_X3", "high", False),
        ("highest", "highest", True),
        ("float32", "highest", True),
        ("F32_F32_F32", "highest", True),
    ],
)
def test_the_matmul_precision_of_the_call_is_that_of_the_kernel(precision, told, exact):
    operands = {name: jnp.zeros((1, 1, 8, 128), jnp.bfloat16) for name in PER_TOKEN}
    operands["beta"] = operands["beta"][..., 0]

    def found(dtype=jnp.bfloat16):
        given = {name: x.astype(dtype) for name, x in operands.items()}
        call = check_call(**given, **dict.fromkeys(OPTIONAL), **STATIC)
        return pallas.kernel_for(call, find_target())

    assert found().problem.precision == "default"
    with jax.default_matmul_precision(precision):
        assert (found().problem.precision, found().problem.exact) == (told, exact)
        assert found().settled(False).forward_variant.inverse_dtype == "float32"
        assert found(jnp.float32).problem.precision == "default"
    with jax.default_matmul_precision("bfloat16"):
        assert found().problem.precision == "default"


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_parallel_keys_hold_their_accuracy_where_it_is_asked_for(precision):
    sizes = dict(heads=1, tokens=128, width_k=128, width_v=128)
    case = make_case(key="parallel", beta=0.98, gate="-0.001", dtype="bfloat16", **sizes)
    with jax.default_matmul_precision(precision):
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
    problem = Problem(
        tokens=8192, heads=32, gate="bounded", lower_bound=-5.0, qk_l2norm=True, residuals="tuned"
    )
    default = paired(problem, default_variant(problem, chip), (chip,))
    step = dataclasses.replace(
        default,
        forward=dataclasses.replace(default.forward, sub_block=16),
        backward=dataclasses.replace(default.backward, weight_depth=128),
    )
    assert check_step(step, problem, chip) is None
    libtpu = importlib.metadata.version("libtpu")
    made_with = Environment("v7x", jax.__version__, "", libtpu, "", source.step_hash(), "m")
    path = tmp_path / "tuned.sqlite"
    with Store(path) as store:
        where = store.put_environment(made_with), store.put_problem(problem, "example")
        row = result(step)
        store.put_result(*where, row)
        store.choose(*where, "compiler", row.variant_id)
    done = run_program(str(EXAMPLE), "--db", str(path), "--strict")
    assert done.returncode == 0, done.stderr
    (forward,), (backward,) = (
        re.findall(rf"kernel kda_{name}_([0-9a-f]{{12}})", done.stdout)
        for name in ("forward", "backward")
    )
    kept = keeping(problem)
    assert variant_id(kept, step.forward, chip).startswith(forward)
    everything = Request.everything(problem)
    assert source.variant_id(kept, everything, step.backward, chip).startswith(backward)
    assert not variant_id(kept, default.forward, chip).startswith(forward)


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
    assert gradient == "(None, 0, 0)"


WITH_X64 = """
import jax, jax.numpy as jnp, numpy as np
from kdagen.runtime.kda import kimi_delta_attention
jax.config.update("jax_enable_x64", True)
keys = jax.random.split(jax.random.key(0), 4)
q, k, v = (jax.random.normal(key, (1, 1, 40, 128), jnp.bfloat16) for key in keys[:3])
gate = -jnp.abs(jax.random.normal(keys[3], (1, 1, 40, 128), jnp.bfloat16))
beta = jnp.full((1, 1, 40), 0.5, jnp.bfloat16)
def run(name):
    def call(v):
        return kimi_delta_attention(
            q, k, v, gate, beta, use_qk_l2norm=True, output_final_state=True, implementation=name
        )
    out, pull = jax.vjp(call, v)
    return [np.asarray(x, np.float64) for x in (*out, *pull(jax.tree.map(jnp.ones_like, out)))]
for x, y in zip(run("pallas"), run("recurrent")):
    print(np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2)) < 1e-2)
"""


def test_kernels_are_right_with_64_bit_types_enabled():
    done = run_program("-c", WITH_X64)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 3


def gradient_of(value):
    arrays = [jnp.zeros((1, 1, 8, 128), jnp.bfloat16)] * 4 + [jnp.zeros((1, 1, 8), jnp.bfloat16)]

    def loss(value):
        output, _ = kimi_delta_attention(*arrays[:2], value, *arrays[3:], implementation="pallas")
        return output.sum()

    return jax.grad(loss)(value)


def test_a_gradient_through_a_kernel_is_a_kernel():
    text = str(jax.make_jaxpr(gradient_of)(jnp.zeros((1, 1, 8, 128), jnp.bfloat16)))
    assert "kda_backward_" in text and "while" not in text


def kernels_of(function, *arguments):
    """The names of the kernels in the program of a function, each with its operands and results."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                name = equation.params["name"].rpartition("_")[0]
                yield name, len(equation.invars), len(equation.outvars)
            else:
                for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
                    if hasattr(inner, "eqns"):
                        yield from walk(inner)

    return list(walk(jax.make_jaxpr(function)(*arguments).jaxpr))


def test_the_backward_kernel_has_what_is_asked_for_and_no_more():
    case = make_case(raw=True, heads=1, tokens=40, width_k=16, width_v=16)

    def backward_of(names, *, output=True, state=True):
        def loss(moving):
            operands = {**case.operands, **moving}
            found = call(operands, **case.static, output_final_state=True, implementation="pallas")
            return sum(jnp.sum(x) for x, used in zip(found, (output, state), strict=True) if used)

        forward, backward = kernels_of(jax.grad(loss), {n: case.operands[n] for n in names})
        assert (forward[0], backward[0]) == ("kda_forward", "kda_backward")
        return backward[1:]

    operands, results = backward_of(PER_TOKEN)
    assert results == 5
    assert backward_of(("value",))[1] == backward_of(("gate",))[1] == 1
    assert backward_of(PER_TOKEN, state=False)[0] == operands - 1
    assert backward_of(PER_TOKEN, output=False)[0] == operands - 1
    assert backward_of((*PER_TOKEN, "initial_state"))[1] == 6


def test_the_rematerializing_gradient_runs_the_forward_again_and_saves_no_states():
    case = make_case(heads=1, tokens=40, width_k=16, width_v=16)

    def gradient(residuals):
        def loss(operands):
            return call(operands, implementation="pallas", residuals=residuals)[0].sum()

        return [name for name, *_ in kernels_of(jax.grad(loss), case.operands)]

    assert gradient("save") == ["kda_forward", "kda_backward"]
    assert gradient("rematerialize") == ["kda_forward", "kda_forward", "kda_backward"]


def test_layers_under_scan_and_checkpoint_in_donated_buffers():
    case = make_case(heads=1, tokens=40, width_k=16, width_v=16)

    def loss(implementation, operands):
        @jax.checkpoint
        def layer(query, factor):
            output, _ = call({**operands, "query": query}, implementation=implementation)
            return factor * output, None

        # gates, betas and all else are of every layer
        return jnp.sum(jax.lax.scan(layer, operands["query"], jnp.asarray([1.0, 2.0]))[0] ** 2)

    def step(implementation):
        def run(operands):
            found = jax.grad(functools.partial(loss, implementation))(operands)
            return jax.tree.map(lambda x, g: x - g, operands, found)

        compiled = jax.jit(run, donate_argnums=0, compiler_options=QUICK)
        return compiled(jax.tree.map(jnp.copy, case.operands))

    found, wanted = step("pallas"), step("xla_chunked")
    for name, x in wanted.items():
        assert relative_error(found[name], np.asarray(x, np.float64)) < 1e-4, name


@pytest.fixture
def interpreted_v6e(monkeypatch):
    """Calls run what is tuned for a v6e, by the interpreter; the settled kernels are noted."""
    settled = []

    class Noted(pallas.Fused):
        def settled(self, differentiated):
            settled.append(super().settled(differentiated))
            return settled[-1]

    def kernel_for(call, target):
        return Noted(pallas.problem_of(call), call.options, "v6e", interpret=True)

    monkeypatch.setattr(pallas, "kernel_for", kernel_for)
    yield settled
    dispatch.configure()


@pytest.mark.parametrize(
    ("chosen", "asked", "kernels"),
    [
        ("save", None, ["kda_forward", "kda_backward"]),
        ("rematerialize", None, ["kda_forward", "kda_forward", "kda_backward"]),
        ("rematerialize", "save", ["kda_forward", "kda_backward"]),
    ],
)
def test_a_differentiated_call_runs_the_tuned_step(
    tmp_path, interpreted_v6e, chosen, asked, kernels
):
    chip = get_chip("v6e")
    sizes = dict(heads=2, tokens=140, width_k=128, width_v=128)
    case = make_case(dtype="bfloat16", **sizes)
    problem = Problem(
        tokens=140, heads=2, qk_l2norm=True, initial_state=True, final_state=True,
        residuals="tuned",
    )  # fmt: skip
    default = paired(problem, default_variant(problem, chip), (chip,), small=True)
    kept = {"keep_inverse": True, "keep_corrected": True}
    step = dataclasses.replace(
        default,
        forward=dataclasses.replace(default.forward, **kept),
        backward=dataclasses.replace(default.backward, **kept),
        residuals=chosen,
    )
    made_with = Environment("v6e", jax.__version__, "", "", "", source.step_hash(), "m")
    with Store(tmp_path / "tuned.sqlite") as store:
        where = store.put_environment(made_with), store.put_problem(problem, "step")
        store.put_result(*where, result(step))
        store.choose(*where, "compiler", result(step).variant_id)
    dispatch.configure(db=tmp_path / "tuned.sqlite", strict=True)

    def run(operands, d_output, d_state):
        static = {**case.static, "output_final_state": True, "residuals": asked}
        (output, state), pull = jax.vjp(
            lambda operands: call(operands, **static, implementation="pallas"), operands
        )
        return {"output": output, "final_state": state, **pull((d_output, d_state))[0]}

    given = case.operands, case.d_output, case.d_state
    assert [name for name, *_ in kernels_of(run, *given)] == kernels
    assert {one.step for one in interpreted_v6e} == {
        dataclasses.replace(step, residuals=asked or chosen)
    }
    assert_close(jax.jit(run, compiler_options=QUICK)(*given), case)


def test_a_gradient_that_no_kernel_serves_says_where_it_runs(monkeypatch):
    forget_warnings()

    def refuse(*_, **__):
        raise VariantError("no backward kernel serves the call: for a test")

    monkeypatch.setattr(pallas, "paired", refuse)
    problem, chip = Problem(tokens=8, heads=1), get_chip("v6e")
    options = Options(scale=1.0)
    fused = pallas.Fused(problem, options, chip.name, True, default_variant(problem, chip))
    with pytest.warns(KdagenWarning, match="runs on 'xla_chunked': .* for a test"):
        assert fused.settled(differentiated=True).step is None
    # who asked for kernels alone is told by an error
    with pytest.raises(NoKernelError, match="for a test"):
        # a function of its own: JAX keeps what it traced of another
        jax.make_jaxpr(lambda x: gradient_of(x))(jnp.zeros((1, 1, 8, 128), jnp.bfloat16))


def test_warnings_are_of_the_line_that_calls(monkeypatch):
    forget_warnings()
    target = Target(True, False, get_chip("v4").device_kinds[0], "for a test")
    monkeypatch.setattr("kdagen.runtime.kda.find_target", lambda: target)
    x, beta = jnp.zeros((1, 1, 24, 128)), jnp.zeros((1, 1, 24))

    @jax.jit
    def loss(value):
        return kimi_delta_attention(x, x, value, x, beta)[0].sum()

    with pytest.warns(KdagenWarning) as caught:
        loss.trace(x)
        jax.jit(jax.grad(loss)).trace(x)
    told = [w for w in caught if w.category is KdagenWarning]
    assert len(told) == 2, [str(w.message) for w in told]
    assert [w.filename for w in told] == [__file__] * 2


@pytest.mark.parametrize("layout", ["HBTD", "BTHD"])
def test_value_heads_too_many_for_a_program_have_copies_of_their_key(layout, monkeypatch):
    alone = pallas.paired

    def refuse(problem, *given, **options):
        if problem.heads != problem.value_heads:
            raise VariantError("no backward kernel serves the call: for a test")
        return alone(problem, *given, **options)

    monkeypatch.setattr(pallas, "paired", refuse)
    case = make_case(raw=True, heads=2, value_heads=6, tokens=70, width_k=20, width_v=24, batch=2)
    moved = case
    if layout == "BTHD":
        moved = dataclasses.replace(
            case, operands=heads_moved(case.operands), d_output=jnp.moveaxis(case.d_output, 0, 2)
        )
    for residuals in ("save", "rematerialize"):
        found = results(moved, implementation="pallas", layout=layout, residuals=residuals)
        assert_close(heads_moved(found, back=True) if layout == "BTHD" else found, case)


def test_a_small_chip_has_kernels_for_gradients_of_grouped_heads():
    """Whose sums over 3 value heads of a key do not fit its VMEM."""
    shapes = {"query": 1, "key": 1, "value": 3, "gate": 3}
    given = {n: jnp.zeros((heads, 1, 8, 128), jnp.bfloat16) for n, heads in shapes.items()}
    given["beta"] = jnp.zeros((3, 1, 8), jnp.bfloat16)
    call = check_call(**given, **dict.fromkeys(OPTIONAL), **STATIC)
    target = Target(True, False, get_chip("v4").device_kinds[0], "for a test")
    with pytest.warns(KdagenWarning, match="not tuned for v4"):
        settled = pallas.kernel_for(call, target).settled(differentiated=True)
    assert settled.step is not None
    assert (settled.problem.heads, settled.problem.value_heads) == (3, 3)


@pytest.mark.parametrize("mapped", ["everything", "value only", "a_log too"])
def test_what_vmap_maps_becomes_batch_rows(mapped):
    case = make_case(raw=True, heads=1, tokens=40, width_k=16, width_v=16, batch=2)
    names = {"everything": PER_TOKEN, "value only": ("value",), "a_log too": ("value", "a_log")}
    axes = {name: 0 if name in names[mapped] else None for name in case.operands}
    operands = {
        name: jnp.stack([x, 0.5 * x, 0.2 * x]) if axes[name] == 0 else x
        for name, x in case.operands.items()
    }

    def loss(implementation, operands):
        output, state = call(
            operands, **case.static, output_final_state=True, implementation=implementation
        )
        return jnp.sum(output * case.d_output) + jnp.sum(state * case.d_state)

    def gradients(implementation):
        one = jax.grad(functools.partial(loss, implementation))
        return jax.jit(jax.vmap(one, in_axes=(axes,)), compiler_options=QUICK)(operands)

    found, wanted = gradients("pallas"), gradients("recurrent")
    for name, x in wanted.items():
        assert relative_error(found[name], np.asarray(x, np.float64)) < 2e-4, name
