"""How far every implementation is from the token recurrence in float64, beside what it may be.

    python benchmarks/accuracy.py [--quick] [--out PATH] [--implementation xla_chunked] [...]

runs xla_chunked and the generated kernels, those in Pallas' interpreter, with their gradients on
data of every kind that is hard for them, and prints the worst relative error of every
implementation, tensor, dtype, kind of gate and of keys, chunk and width. It also holds that the
error grows neither with the strength of the gate nor with the length of the sequence. The exit
status is 1 if anything is outside. No TPU is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from error_table import HEADING, Row, line, page, worst

from kdagen.measure import accuracy, kinds, operands
from kdagen.measure.kinds import Kind
from kdagen.problem import RESIDUAL_POLICIES, Problem
from kdagen.variant import Variant, check

if TYPE_CHECKING:
    from kdagen.gradient.step import Step

KERNELS = "pallas"
IMPLEMENTATIONS = ("xla_chunked", "recurrent", KERNELS)
CHUNKS = (32, 64, 128)
WIDTHS = ((128, 128), (48, 60), (100, 129), (129, 127), (64, 64), (256, 256), (1, 1))
# Legality of a kernel depends on a chip where its VMEM counts.
CHIP = "v6e"
_FACTORISATIONS = (("bounded", 32), ("bounded", 16), ("unbounded", 8), ("tree", 1))
_INVERSES = (("bfloat16", 8), ("float32", 8), ("float32", 4), ("float32", 2))

# Log decays a token, ever stronger: no error may be more than so many times the largest before it.
LADDER = tuple(
    f"-{x}" for x in (1e-3, 0.01, 0.1, 0.5, 1, 2, 3, 4, 5, 5.5, 6, 8, 10, 14, 20, 22, 40, 100, 1e4)
)
JUMP = 2.0
# Tokens at which a long sequence is cut: no part may be so many times as wrong as the first.
PARTS = (0, 256, 1024, 2048, 4096)
GROWTH = 1.5
SEED = 1


@dataclass(frozen=True)
class Data:
    """One set of operands, and what is run on it.

    Attributes:
      problem: its facts, of one key head; every kind of data gets one.
      kinds: of data.
      check: "bounds" alone, or "ladder" or "length" for growth with the gate or with the length.
      copies: heads a kind.
      differentiated: whether gradients of the kernels are run as well.
    """

    problem: Problem
    kinds: tuple[Kind, ...]
    check: str = "bounds"
    copies: int = 1
    differentiated: bool = True

    def __str__(self) -> str:
        p = self.problem
        group = f", {p.value_heads} value heads a key head" if p.value_heads > 1 else ""
        precision = f", precision {p.precision}" if p.precision != "default" else ""
        return (
            f"{p.dtype} {p.gate} {p.key_dim}x{p.value_dim} T={p.tokens}{group}{precision}, "
            f"{len(self.kinds)} kinds of data ({self.check})"
        )


class Found(NamedTuple):
    """What one set of data gave: rows, what grew, what no kernel serves, and the seconds."""

    rows: list[Row]
    grown: list[str]
    refused: list[str]
    seconds: float


def data_sets(options: argparse.Namespace) -> Iterator[Data]:
    """All sets of data that the options leave."""
    for dtype in options.dtype:
        for gate in options.gate:
            plain = Problem(
                tokens=300, heads=1, dtype=dtype, gate=gate,
                lower_bound=-5.0 if gate == "bounded" else None, qk_l2norm=gate != "log_decay",
                initial_state=True, final_state=True,
            )  # fmt: skip
            alter = lambda plain=plain, **facts: dataclasses.replace(plain, **facts)  # noqa: E731
            for key_dim, value_dim in options.width:
                problem = alter(key_dim=key_dim, value_dim=value_dim)
                if (key_dim, value_dim) == WIDTHS[0]:
                    # of parameters, gradients are sums over all tokens: one may be near 0
                    full = not options.quick
                    copies = 4 if options.gradients and gate != "log_decay" and full else 1
                    yield Data(problem, kinds.every(problem), copies=copies, differentiated=full)
                elif gate == "log_decay" or (key_dim, value_dim) == (100, 129):
                    precise = dataclasses.replace(problem, tokens=150, precision="high")
                    given = kinds.telling(precise)
                    copies = 8 if key_dim * value_dim == 1 else 1 if gate == "log_decay" else 4
                    yield Data(
                        dataclasses.replace(problem, tokens=150), given, copies=copies,
                        differentiated=not options.quick,
                    )  # fmt: skip
            if options.quick:
                if options.gradients and dtype == "bfloat16":
                    yield Data(alter(tokens=70), kinds.telling(plain), copies=4)
                continue
            if dtype == "bfloat16":
                highest = alter(tokens=150, precision="highest")
                yield Data(highest, kinds.telling(highest))
            yield Data(alter(tokens=150, batch=2, value_heads=3), kinds.telling(plain))
            yield Data(alter(tokens=150, layout="BTHD"), kinds.telling(plain), copies=4)
            for tokens in (1, 7):
                yield Data(alter(tokens=tokens), kinds.telling(plain), copies=8)
            reflecting = (Kind(kinds.SLOW[gate], "random", True),)
            for width in (64, 128):
                many = alter(tokens=1024, key_dim=width, value_dim=width)
                yield Data(many, reflecting, copies=3, differentiated=False)
            if gate == "log_decay":
                yield Data(plain, tuple(Kind(x) for x in LADDER), "ladder")
                long = alter(tokens=PARTS[-1], initial_state=False)
                yield Data(long, (Kind("0"), Kind("-0.001"), Kind("-0.05")), "length")
                yield Data(long, (Kind("0", "random", True),))


def variants(problem: Problem, chunks: Sequence[int], *, every: bool) -> Iterator[Variant | str]:
    """For every chunk a legal variant, one a factorisation of the decay where ``every`` is asked
    for, or why there is none."""
    from kdagen.chips import get_chip

    for chunk in chunks:
        served = set[str]()
        reason = ""
        for (decay, sub_block), inverse in itertools.product(_FACTORISATIONS, _INVERSES):
            variant = Variant(
                chunk=chunk, heads=1, chunks=128 // chunk, decay=decay, sub_block=sub_block,
                inverse_dtype=inverse[0], inverse_block=inverse[1],
            )  # fmt: skip
            violation = check(variant, problem, get_chip(CHIP))
            if violation is not None:
                reason = str(violation)
            elif decay not in served and (every or not served):
                served.add(decay)
                yield variant
        if not served:
            yield f"chunk {chunk}: {reason}"


def kernels(
    data: Data, problem: Problem, chunks: Sequence[int]
) -> Iterator[tuple[Problem, Variant | str]]:
    """What the kernels are told of a problem, and a variant (see ``variants``) that serves it.

    Data of every kind is run on every factorisation and chunk, both with the inverse that bfloat16
    has and with the one that hard keys need. Elsewhere one factorisation, and hard keys at one
    chunk, will do; a few tokens, and a precision that is asked for, need one chunk only.
    """
    full = data.kinds == kinds.every(data.problem)
    middle = [chunk for chunk in chunks if chunk == 64] or chunks[:1]
    several = problem.tokens > 64 and problem.precision == "default"
    yield from (
        (problem, variant)
        for variant in variants(problem, chunks if several else middle, every=full)
    )
    if needs_precise(data, problem):
        precise = dataclasses.replace(problem, precision="high")
        yield from (
            (precise, variant)
            for variant in variants(precise, chunks if full else middle, every=False)
        )


def needs_precise(data: Data, problem: Problem) -> bool:
    """Whether there are keys that a kernel has to be told of."""
    told = problem.dtype == "float32" or problem.precision != "default"
    return not told and any(kind.ill_conditioned for kind in data.kinds)


def _public(
    problem: Problem,
    values: dict[str, Any],
    implementation: str,
    cotangents: dict[str, Any],
) -> dict[str, Any]:
    """Results of the public function, and with cotangents its gradients."""
    import jax

    from kdagen.measure.verify import static_arguments
    from kdagen.runtime.kda import kimi_delta_attention

    tokens = ("query", "key", "value", "gate", "beta")

    def forward(values: dict[str, Any]) -> dict[str, Any]:
        rest = {name: x for name, x in values.items() if name not in tokens}
        given = operands.in_layout({name: values[name] for name in tokens}, problem)
        output, state = kimi_delta_attention(
            **given, **rest, **static_arguments(problem), output_final_state=True,
            layout=problem.layout, implementation=implementation,
        )  # fmt: skip
        if problem.layout == "BTHD":
            output = jax.numpy.moveaxis(output, 2, 0)
        return {"output": output, "final_state": state}

    def run(values: dict[str, Any], cotangents: dict[str, Any]) -> dict[str, Any]:
        if not cotangents:
            return forward(values)
        results, pull = jax.vjp(forward, values)
        return results | pull(cotangents)[0]

    # hardly optimised, since it runs for a moment
    options = {"xla_backend_optimization_level": 0}
    with jax.default_matmul_precision(problem.precision):
        return jax.jit(run, compiler_options=options)(values, cotangents)


def run(data: Data, options: argparse.Namespace) -> Found:
    """Every implementation on one set of data."""
    from kdagen.chips import get_chip
    from kdagen.measure import verify, verify_steps
    from kdagen.reference.oracle import recurrent_float64_vjp
    from kdagen.reference.windows import chunk_size

    started = time.perf_counter()
    given = data.kinds * data.copies
    problem = kinds.with_heads(data.problem, given)
    values = kinds.draw(problem, given, SEED)
    cotangents: dict[str, Any] = {}
    if data.check == "bounds" and problem.tokens < PARTS[-1] and options.gradients:
        drawn = verify_steps.cotangents(problem, SEED)
        cotangents = {"output": drawn["d_output"], "final_state": drawn["d_final"]}
    if cotangents:
        output, state, grads = recurrent_float64_vjp(
            **verify.told(problem, values),
            output_cotangent=cotangents["output"], state_cotangent=cotangents["final_state"],
        )  # fmt: skip
        expected = {"output": output, "final_state": state, **grads}
    else:
        expected = verify.reference(problem, values)
    found = Found([], [], [], 0.0)

    def judge(implementation: str, told: Problem, chunk: int, how: str, got: dict) -> None:
        # a_log of single heads, which may cancel, is for products of float32
        rounded = implementation == KERNELS and told.precision != "highest"
        measure = kinds.step_errors if rounded else kinds.errors
        errors = measure(told, given, got, {n: expected[n] for n in expected if n in got})
        width = f"{told.key_dim}x{told.value_dim}"
        for (kind, name), error in errors.items():
            what = (implementation, name, told.dtype, told.gate, kind.gate, kind.keys)
            limit, asked = kind.bound(name, told), kinds.asked(kind, told)
            found.rows.append(Row(*what, chunk, width, how, error, limit, asked))
        if data.check == "ladder":
            texts = jumps(errors)
        elif data.check == "length":
            texts = growth(told, given, got["output"], expected["output"])
        else:
            return
        found.grown.extend(f"{implementation} {how}, chunk {chunk}: {data}: {x}" for x in texts)

    for implementation in options.implementation:
        if implementation == KERNELS:
            for told, variant in kernels(data, problem, options.chunk):
                if isinstance(variant, str):
                    found.refused.append(f"{data}: {variant}")
                    continue
                got = verify.call(told, variant, get_chip(CHIP), values)
                judge(KERNELS, told, variant.chunk, f"{variant.decay}, {told.precision}", got)
            differentiated = bool(cotangents) and data.differentiated
            for told, step in gradients(data, problem, options) if differentiated else ():
                if isinstance(step, str):
                    found.refused.append(f"{data}: gradient, {step}")
                    continue
                given_back = {
                    "d_output": cotangents["output"],
                    "d_final": cotangents["final_state"],
                }
                got = verify_steps.call(told, step, get_chip(CHIP), values, given_back)
                what = f"gradient, {step.residuals}, sub-block {step.backward.sub_block}"
                judge(KERNELS, told, step.forward.chunk, f"{what}, {told.precision}", got)
            continue
        # both compute in f32, whatever the precision
        told = dataclasses.replace(problem, precision="highest")
        chunked = implementation == "xla_chunked"
        got = _public(told, values, implementation, cotangents if chunked else {})
        judge(implementation, told, chunk_size(told.tokens) if chunked else 1, "", got)
    return found._replace(seconds=time.perf_counter() - started)


def gradients(
    data: Data, problem: Problem, options: argparse.Namespace
) -> Iterator[tuple[Problem, Step | str]]:
    """What the kernels of a gradient are told of a problem, and a step (see ``steps``).

    Data of every kind is run on every chunk, sub-block and policy, in bfloat16 with either inverse.
    Elsewhere one chunk and its largest sub-block will do.
    """
    full = data.kinds == kinds.every(data.problem)
    middle = [chunk for chunk in options.chunk if chunk == 64] or options.chunk[:1]
    told = [problem]
    if needs_precise(data, problem):
        told.append(dataclasses.replace(problem, precision="high"))
    for facts in told:
        for step in steps(facts, options.chunk if full else middle, every=full):
            yield facts, step


def steps(problem: Problem, chunks: Sequence[int], *, every: bool) -> Iterator[Step | str]:
    """For every chunk legal steps, one a sub-block and policy where ``every`` is asked for, or why
    there is none."""
    from kdagen.chips import get_chip
    from kdagen.gradient.step import Step, check_step, keeping_for
    from kdagen.gradient.variant import BackwardVariant, sub_blocks

    heads = problem.value_heads // problem.heads
    for forward in variants(problem, chunks, every=False):
        if isinstance(forward, str):
            yield forward
            continue
        for sub_block in sub_blocks(problem)[0 if every else -1 :]:
            backward = BackwardVariant(
                chunk=forward.chunk, heads=heads, chunks=128 // gcd(128, heads * forward.chunk),
                sub_block=sub_block, inverse_block=forward.inverse_block,
                inverse_dtype=forward.inverse_dtype,
            )  # fmt: skip
            kept = keeping_for(forward, backward, problem, alike=True)
            for policy in RESIDUAL_POLICIES if every else RESIDUAL_POLICIES[:1]:
                step = Step(kept, backward, policy)
                violation = check_step(step, problem, get_chip(CHIP))
                yield step if violation is None else f"chunk {forward.chunk}: {violation}"


def jumps(errors: dict[tuple[Kind, str], float]) -> Iterator[str]:
    """Where the error of a tensor jumps on the way up the ladder of gates."""
    for name in {name: None for _, name in errors}:
        most = float("inf")
        for gate in LADDER:
            error = errors[Kind(gate), name]
            if not error <= JUMP * most:
                yield f"{name} {error:.1e} at a gate of {gate}, {most:.1e} at weaker ones"
            most = error if most == float("inf") else max(most, error)


def growth(problem: Problem, given: Sequence[Kind], got: Any, expected: Any) -> Iterator[str]:
    """Where a later part of a sequence is more wrong than its first."""
    import numpy as np

    for head, kind in enumerate(kinds.of_head(given, problem)):
        errors = []
        for start, stop in itertools.pairwise(PARTS):
            mine = (head, slice(None), slice(start, stop))
            errors.append(accuracy.relative_error(np.asarray(got)[mine], expected[mine]))
        if not max(errors) <= GROWTH * errors[0]:
            parts = ", ".join(f"{error:.1e}" for error in errors)
            yield f"output at a gate of {kind.gate}: {parts} between tokens {PARTS}"


def _width(text: str) -> tuple[int, int]:
    key_dim, _, value_dim = text.partition("x")
    if not (key_dim.isdigit() and value_dim.isdigit()):
        raise argparse.ArgumentTypeError(f"got {text!r}; it must be K and V, as 128x64")
    return int(key_dim), int(value_dim)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])

    def several(name: str, choices: Sequence[Any], help: str, **more: Any) -> None:
        options.add_argument(name, action="append", choices=choices, help=help, **more)

    several("--implementation", IMPLEMENTATIONS, "several; all but recurrent if not given")
    several("--dtype", ("bfloat16", "float32"), "of query, key and value; both if not given")
    several("--gate", tuple(kinds.GATES), "all if not given")
    several("--chunk", CHUNKS, "of the kernels; all if not given", type=int)
    options.add_argument(
        "--width",
        action="append",
        type=_width,
        metavar="KxV",
        help="as 128x64; several if not given",
    )
    options.add_argument(
        "--no-gradients", action="store_false", dest="gradients", help="leave the gradients out"
    )
    options.add_argument(
        "--quick",
        action="store_true",
        help="one chunk, two widths, gradients of few kinds; one or two minutes",
    )
    options.add_argument("--out", metavar="PATH", type=Path, help="write a Markdown page there")
    options.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes; a processor each"
    )
    chosen = options.parse_args(arguments)
    chosen.implementation = chosen.implementation or ["xla_chunked", KERNELS]
    chosen.dtype = chosen.dtype or ["bfloat16", "float32"]
    chosen.gate = chosen.gate or list(kinds.GATES)
    chosen.gradients &= chosen.implementation != ["recurrent"]
    chosen.chunk = chosen.chunk or ([64] if chosen.quick else list(CHUNKS))
    chosen.width = chosen.width or list(WIDTHS[: 2 if chosen.quick else None])
    return chosen


def _run(job: tuple[Data, argparse.Namespace]) -> tuple[Data, Found]:
    return job[0], run(*job)


def main() -> int:
    options = parse()
    # children inherit it: nothing here looks for an accelerator
    os.environ["JAX_PLATFORMS"] = "cpu"
    sets = sorted(data_sets(options), key=lambda data: -data.problem.tokens * len(data.kinds))
    rows: list[Row] = []
    grown: list[str] = []
    refused: list[str] = []
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        done = pool.imap_unordered(_run, [(data, options) for data in sets])
        for count, (data, found) in enumerate(done, 1):
            rows += found.rows
            grown += found.grown
            refused += found.refused
            bad = [line(row) for row in found.rows if row.outside] + found.grown
            done_in = f"[{count}/{len(sets)}, {time.perf_counter() - started:.0f} s]"
            what = f"{done_in} {data}: {found.seconds:.0f} s, {len(found.rows)} errors"
            print("\n   ".join([what, *bad]), file=sys.stderr, flush=True)
    print(HEADING)
    for row in worst(rows, lambda row: (row[:8], row.asked)):
        print(line(row))
    for title, texts in (("grows", grown), ("no kernel", refused)):
        for text in sorted(set(texts)):
            print(f"{title}: {text}")
    outside = sum(row.outside for row in rows)
    nearest = max((row.error / row.bound for row in rows if row.asked), default=0.0)
    print(
        f"{len(rows)} errors, {outside} outside; the worst is {nearest:.0%} of its bound; "
        f"{len(grown)} grow; {len(set(refused))} calls that no kernel serves"
    )
    if options.out is not None:
        options.out.write_text(page(rows), encoding="utf-8")
    return 1 if outside or grown else 0


if __name__ == "__main__":
    sys.exit(main())
