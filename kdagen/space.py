"""The space of variants that a search goes through, and the variant where nothing was tuned."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from kdagen.chips import Chip
from kdagen.kernels.pipeline import DRAIN
from kdagen.kernels.tiling import LANES
from kdagen.problem import Problem
from kdagen.variant import MIB, SUB_BLOCKS, Variant, VariantError, check, chunks

_EMISSION = ("recurrence_span", "inverse_span", "relation_span", "lag", "order")
_CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32)

_FEW_STREAMS = 8
# So many that the steps in which the pipeline fills and drains take more than they would in code of
# their own, by enough to make up for compiling that.
_FEW_BLOCKS = 32


def space(problem: Problem, chip: Chip) -> dict[str, tuple[Any, ...]]:
    """Every parameter with the ordered values that a search over this problem tries.

    The product holds illegal points; ``check`` tells. Heads and rows are divisors of the problem's,
    and the chunks of a program no more than its sequence has.
    """
    decay, exact = _natural_decay(problem), problem.exact
    inverse_dtype = _inverse_dtype(problem)
    kept = (False, True) if problem.residuals == "save" else (False,)
    return {
        "chunk": chunks(problem, inverse_dtype),
        "heads": tuple(_divisors(problem.value_heads, 32)),
        "rows": tuple(_divisors(problem.batch, 32)),
        "chunks": tuple(n for n in _CHUNKS if n == 1 or 64 * (n - 1) < problem.tokens),
        "decay": (decay,),
        "sub_block": SUB_BLOCKS[decay] if not exact else SUB_BLOCKS[decay][:1],
        "inverse_block": (2, 4) if problem.wide_inverse else (2, 4, 8),
        "inverse_dtype": (inverse_dtype,),
        "weight_depth": (64, 128),
        "recurrence_span": (4, 5, 6, 7, 8, 9, 10, 12),
        "inverse_span": (1, 2, 3),
        "relation_span": (0, 4, 5, 6, 7, 8, 9),
        "lag": (0, 1),
        "order": ("rir", "irr"),
        "ends": tuple(range(DRAIN + 1)),
        "vmem_limit_mib": _vmem_limits(chip),
        "states": ("bfloat16", "float32") if problem.residuals == "save" else ("none",),
        "keep_inverse": kept,
        "keep_corrected": kept,
        "keep_gate": kept,
    }


def legal_variants(problem: Problem, chip: Chip) -> Iterator[Variant]:
    """Every point of the space that ``check`` passes, in a fixed order.

    A raised VMEM limit is offered only where the default one does not hold the variant.
    """
    values = space(problem, chip)
    spread = {name: values.pop(name) for name in _EMISSION}
    for point in itertools.product(*values.values()):
        cuts = dict(zip(values, point, strict=True))
        # the widest spans take the least VMEM: where those are illegal, all are
        widest = Variant(**cuts, **{name: max(of) for name, of in spread.items()})
        if check(widest, problem, chip) is not None:
            continue
        for spans in itertools.product(*spread.values()):
            variant = Variant(**cuts, **dict(zip(spread, spans, strict=True)))
            if check(variant, problem, chip) is not None:
                continue
            plain = dataclasses.replace(variant, vmem_limit_mib=0)
            if variant == plain or check(plain, problem, chip) is not None:
                yield variant


def default_variant(problem: Problem, chip: Chip) -> Variant:
    """The variant used where nothing was tuned: 2048 tokens of heads in flight, or what fits.

    More batch rows of a program, then more of its chunks, make up for missing heads, as far as
    there are any. Few streams take long chunks: the recurrence of a stream is a chain of three
    products a chunk, and nothing else fills its waits. Few blocks have code of their own for both
    ends. The first that ``check`` passes is taken, from the most tokens in flight and the most
    heads down.

    Raises:
      VariantError: no variant serves the problem on this chip; the message is that of ``check``.
    """
    decay, exact = _natural_decay(problem), problem.exact
    inverse_dtype = _inverse_dtype(problem)
    violation = None
    for in_flight in (2048, 1536, 1024, 512, 256, 128):
        for heads in reversed(_divisors(problem.value_heads, in_flight // 64)):
            rows = max(_divisors(problem.batch, max(in_flight // 64 // heads, 1)))
            streams = rows * heads
            few = streams < _FEW_STREAMS and 128 * streams <= in_flight
            chunk = 128 if few and 128 in chunks(problem, inverse_dtype) else 64
            # as many as fill the lanes at least
            least = LANES // math.gcd(LANES, chunk * streams)
            count = _chunks(in_flight // (chunk * streams), chunk, problem.tokens)
            count = -(-count // least) * least
            for limit in _vmem_limits(chip):
                variant = Variant(
                    chunk=chunk,
                    heads=heads,
                    rows=rows,
                    chunks=count,
                    decay=decay,
                    sub_block=SUB_BLOCKS[decay][0 if exact else -1],
                    inverse_block=4 if problem.wide_inverse or chunk == 128 else 8,
                    inverse_dtype=inverse_dtype,
                    weight_depth=128 if chunk == 128 else 64,
                    # one chunk leaves its recurrence early; several fill the step with theirs
                    recurrence_span=5 if count == 1 else 8,
                    inverse_span=1,
                    relation_span=8,
                    order="irr" if count == 1 else "rir",
                    ends=DRAIN if -(-problem.tokens // (chunk * count)) <= _FEW_BLOCKS else 0,
                    vmem_limit_mib=limit,
                    states="bfloat16" if problem.residuals == "save" else "none",
                )
                violation = check(variant, problem, chip)
                if violation is None:
                    return variant
    raise VariantError(f"no variant serves this problem on {chip.name}: {violation}")


def _inverse_dtype(problem: Problem) -> str:
    """The fastest that is right."""
    return "float32" if problem.wide_inverse else "bfloat16"


def _natural_decay(problem: Problem) -> str:
    """The fastest factorisation that is right for the gate and the dtype."""
    if problem.gate == "bounded":
        return "bounded"
    return "tree" if problem.exact else "unbounded"


def _vmem_limits(chip: Chip) -> tuple[int, ...]:
    default = chip.default_vmem_limit_bytes // MIB
    raised = chip.usable_vmem_bytes * 3 // 4 // MIB
    return (0, raised) if raised > default else (0,)


def _chunks(most: int, chunk: int, tokens: int) -> int:
    """Chunks of a program: the most, or hardly fewer if they divide the sequence without a rest,
    which every load would have to mask."""
    most = max(1, min(most, -(-tokens // chunk)))
    even = [n for n in range(-(-3 * most // 4), most + 1) if tokens % (n * chunk) == 0]
    return max(even, default=most)


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]
