"""How the gradient of a problem is computed: parameters of the backward kernel, their legality."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kdagen.chips import Chip
from kdagen.gradient.plan import (
    CORRECTIONS,
    GRADIENTS,
    ORDERS,
    RECURRENCE,
    RELATIONS,
    WRITES,
    Shape,
    Slots,
    plan,
)
from kdagen.gradient.plan import INVERSE as INVERSE_STAGE
from kdagen.kernels.handover import BYTES, Handover
from kdagen.kernels.tiling import LANES
from kdagen.problem import Problem
from kdagen.variant import (
    MAX_LOOP_BUNDLES,
    MIB,
    Parameters,
    VariantError,
    Violation,
    beyond_chunks,
    beyond_vmem,
    chunks,
)

OPERANDS = ("query", "key", "value", "gate", "beta", "initial_state", "a_log", "delta_time_bias")
"""What a call may be differentiated by."""

_DECAY_OPERANDS = ("gate", "a_log", "delta_time_bias")


@dataclass(frozen=True)
class Request:
    """What of a gradient is asked for; the generated code is specialised on it.

    Attributes:
      wanted: names out of ``OPERANDS``, in their order.
      output_cotangent, state_cotangent: whether there are such cotangents; an absent one is 0.
    """

    wanted: tuple[str, ...]
    output_cotangent: bool = True
    state_cotangent: bool = False

    @classmethod
    def of(cls, wanted: Collection[str], **cotangents: bool) -> Request:
        """With the names in order.

        Raises:
          VariantError: an unknown name.
        """
        unknown = sorted(set(wanted) - set(OPERANDS))
        if unknown:
            raise VariantError(
                f"wanted: got {', '.join(unknown)}; it may hold {', '.join(OPERANDS)}"
            )
        return cls(tuple(name for name in OPERANDS if name in wanted), **cotangents)

    @classmethod
    def everything(cls, problem: Problem) -> Request:
        """Every gradient that a call of the problem has."""
        absent = set() if problem.initial_state else {"initial_state"}
        if problem.gate == "log_decay":
            absent |= {"a_log", "delta_time_bias"}
        return cls.of(set(OPERANDS) - absent, state_cotangent=problem.final_state)

    @property
    def stages(self) -> frozenset[str]:
        """The stages of the kernel that it takes."""
        found = {RELATIONS, INVERSE_STAGE, RECURRENCE}
        if not {"query", "key", *_DECAY_OPERANDS}.isdisjoint(self.wanted):
            found |= {CORRECTIONS, GRADIENTS}
        if "beta" in self.wanted:
            found |= {CORRECTIONS, WRITES}
        return frozenset(found)


@dataclass(frozen=True)
class BackwardVariant(Parameters):
    """Parameters of the fused backward kernel.

    Attributes:
      chunk, heads, rows, chunks: the cuts, see ``kdagen.variant.Variant``; which of them must be
        those of the forward that kept the residuals, ``kdagen.gradient.step.check_step`` says.
        Heads that share a query and key head are of one program.
      sub_block: rows within which pairs share a reference row; see ``kdagen.kernels.decay_tree``.
      inverse_block, weight_depth: of the inverse, where it is formed again.
      inverse_dtype: in which the inverse is formed and applied.
      keep_inverse, keep_corrected: whether the forward kept them; they are formed again otherwise.
      span, lag, order: of the emission, see ``kdagen.gradient.plan.plan``.
      vmem_limit_mib: scoped VMEM limit to ask the compiler for, in MiB; 0 is the chip's default.
    """

    chunk: int = 64
    heads: int = 16
    rows: int = 1
    chunks: int = 1
    sub_block: int = 16
    inverse_block: int = 8
    weight_depth: int = 64
    inverse_dtype: str = "bfloat16"
    keep_inverse: bool = False
    keep_corrected: bool = False
    span: int = 8
    lag: int = 0
    order: str = "leaving"
    vmem_limit_mib: int = 0

    @property
    def streams(self) -> int:
        """Pairs of batch row and value head that a program works on."""
        return self.rows * self.heads

    @property
    def block_tokens(self) -> int:
        """Tokens of one grid step."""
        return self.chunk * self.chunks

    def plan(self, request: Request) -> Slots:
        """The order in which the stages of a grid step are emitted."""
        shape = Shape(
            chunk=self.chunk,
            streams=self.streams,
            chunks=self.chunks,
            base=self.sub_block,
            inverse_block=0 if self.keep_inverse else self.inverse_block,
            corrected=not self.keep_corrected,
            stages=request.stages,
        )
        return plan(shape, self.span, self.lag, self.order)


def states_dtype(problem: Problem) -> str:
    """The dtype in which a forward keeps the states that a backward takes."""
    return "float32" if problem.wide_inverse else "bfloat16"


def sub_blocks(problem: Problem) -> tuple[int, ...]:
    """Sub-blocks in which no factor leaves f32: single rows, or 16 rows of -5."""
    return (1, 16) if problem.gate == "bounded" else (1,)


def check(variant: BackwardVariant, problem: Problem, chip: Chip) -> Violation | None:
    """Whether a variant is legal for a problem on a chip: None, or the first rule it breaks."""
    for constraint in CONSTRAINTS:
        message = constraint(variant, problem, chip)
        if message is not None:
            return Violation(constraint.__name__.removeprefix("_"), message)
    return None


def _values(variant: BackwardVariant, problem: Problem, chip: Chip) -> str | None:
    takes: dict[str, tuple[Any, ...]] = {
        "chunk": (32, 64, 128),
        "sub_block": sub_blocks(problem),
        "inverse_block": (2, 4) if problem.wide_inverse else (2, 4, 8),
        "weight_depth": (64, 128),
        "inverse_dtype": ("float32",) if problem.wide_inverse else ("bfloat16", "float32"),
        "order": tuple(ORDERS),
    }
    for name, values in takes.items():
        value = getattr(variant, name)
        if value not in values:
            return f"{name}={value!r}: it may be {', '.join(map(repr, values))} here"
    for name, least in (
        ("heads", 1),
        ("rows", 1),
        ("chunks", 1),
        ("span", 1),
        ("lag", 0),
        ("vmem_limit_mib", 0),
    ):
        value = getattr(variant, name)
        if not least <= value <= 1024:
            return f"{name}={value}: it may be {least} to 1024"
    return None


def _chunk(variant: BackwardVariant, problem: Problem, chip: Chip) -> str | None:
    return beyond_chunks(variant.chunk, problem, variant.inverse_dtype)


def keeps_inverse(problem: Problem) -> tuple[bool, ...]:
    """What ``keep_inverse`` may be: a forward keeps it in the dtype of its other products."""
    return (False,) if problem.wide_inverse and not problem.exact else (False, True)


def keeps_corrected(problem: Problem) -> tuple[bool, ...]:
    """What ``keep_corrected`` may be: where segments have initial states of their own, these went
    into corrected values, which cannot be formed again."""
    return (True,) if problem.packed and problem.initial_state else (False, True)


def _kept(variant: BackwardVariant, problem: Problem, chip: Chip) -> str | None:
    if variant.keep_inverse not in keeps_inverse(problem):
        return (
            f"keep_inverse=True: precision={problem.precision!r} with key_dim={problem.key_dim} "
            "needs one above bfloat16, formed again"
        )
    if variant.keep_corrected not in keeps_corrected(problem):
        return (
            "keep_corrected=False: with initial states of segments corrected values are kept, and "
            "not formed again"
        )
    return None


def _packing(variant: BackwardVariant, problem: Problem, chip: Chip) -> str | None:
    """Heads and rows divide into programs, and chunk-heads into packs that fill the lanes."""
    if problem.value_heads % variant.heads:
        return (
            f"heads={variant.heads}: it must divide the problem's {problem.value_heads} value heads"
        )
    ratio = problem.value_heads // problem.heads
    if variant.heads % ratio:
        return (
            f"heads={variant.heads}: it must be a multiple of the {ratio} value heads that share a "
            "query and key head, whose gradients are summed in one program"
        )
    if problem.batch % variant.rows:
        return f"rows={variant.rows}: it must divide the problem's {problem.batch} batch rows"
    if variant.streams * variant.chunks * variant.chunk % LANES:
        return (
            f"heads={variant.heads}, rows={variant.rows}, chunks={variant.chunks}: "
            f"{LANES // variant.chunk} chunk-heads of {variant.chunk} tokens share the lanes: "
            "their product must be a multiple"
        )
    return None


def _vmem(variant: BackwardVariant, problem: Problem, chip: Chip) -> str | None:
    return beyond_vmem(variant.vmem_limit_mib, vmem_bytes(variant, problem, chip), chip)


# Bundles of the loop per 64 tokens of a head in flight, the fewest that were seen of many heads.
_LEAST_BUNDLES = {"base": 500, "tree": 700, "float32": 1000}
_LEAST_BUNDLES_OF_INVERSE = 110


def _code_size(variant: BackwardVariant, problem: Problem, chip: Chip) -> str | None:
    """What is larger for certain; the compiler says how large the others are."""
    bundles = _LEAST_BUNDLES[_kind(variant, problem)]
    if not variant.keep_inverse:
        bundles += _LEAST_BUNDLES_OF_INVERSE
    widths = sum(-(-d // LANES) for d in (problem.key_dim, problem.value_dim)) / 2
    bundles = round(bundles * variant.streams * variant.block_tokens / 64 * widths)
    # heads that share a key, and those that share the lanes, cannot be parted
    least = math.lcm(LANES // variant.chunk, problem.value_heads // problem.heads)
    if bundles > MAX_LOOP_BUNDLES and variant.streams * variant.chunks > least:
        return (
            f"heads={variant.heads}, rows={variant.rows}, chunks={variant.chunks}: about "
            f"{bundles} bundles in the loop, more than the {MAX_LOOP_BUNDLES} known to run "
            "well"
        )
    return None


def _kind(variant: BackwardVariant, problem: Problem) -> str:
    return "float32" if problem.exact else "tree" if variant.sub_block == 1 else "base"


# VMEM that values between the stages and spills take, per 64 tokens of one head of K = V = 128: the
# most that was seen, and a margin. The scheduler of v4 keeps more of them alive, and so do products
# of f32 operands in bf16 parts.
_SPILLED_MIB = {"base": 0.55, "tree": 0.8, "float32": 1.6}
_SPILL_FACTOR_OF_PARTS = 1.4
_SPILL_FACTOR = {"v4": 1.3}
_LEAST_SPILL_MIB = 0.25
# What is kept alive beside that however few chunk-heads there are, in states [K, V] f32 a chunk of
# 64 tokens, by one head and by several, whose products are written side by side: by the walk of
# the states of segments, and without it by keys of more than 128 channels.
_ALIVE_IN_WALK = {"base": (2, 9), "tree": (2, 9), "float32": (21, 21)}
_ALIVE_OF_WIDE = {"base": (0, 5), "tree": (0, 5), "float32": (8, 8)}

CONSTRAINTS = (_values, _chunk, _kept, _packing, _code_size, _vmem)


def vmem_bytes(variant: BackwardVariant, problem: Problem, chip: Chip) -> int:
    """VMEM that the kernel of a variant takes, in bytes, from above.

    Scratch and pipelined blocks are those of a call that reads the values too, which one with
    corrected values kept does not; of what the compiler keeps beside them the most that was seen is
    allowed for.
    """
    key_dim, value_dim = (-(-d // LANES) * LANES for d in (problem.key_dim, problem.value_dim))
    items = variant.streams * variant.chunks
    wide, operand = BYTES[problem.dtype], BYTES[problem.operand]
    row = (4 * key_dim + 3 * value_dim) * wide + 2 * key_dim * BYTES[problem.gate_dtype]
    if variant.keep_corrected:
        row += value_dim * operand
    if variant.keep_inverse:
        row += variant.chunk * operand
    states = key_dim * value_dim * BYTES[states_dtype(problem)]
    blocks = 2 * items * (variant.chunk * row + states)
    state = variant.streams * key_dim * value_dim * 4
    handed = handover(variant, problem, Request.everything(problem)).bytes(key_dim, value_dim)
    kind = _kind(variant, problem)
    units = items * variant.chunk / 64 * (key_dim + value_dim) / 256
    spilled = _SPILLED_MIB[kind] * _SPILL_FACTOR.get(chip.name, 1.0)
    if variant.inverse_dtype == "float32" and not problem.exact:
        spilled *= _SPILL_FACTOR_OF_PARTS
    spill = units * spilled + _LEAST_SPILL_MIB
    alive = (0, 0)
    if problem.segment_states:
        alive = _ALIVE_IN_WALK[kind]
    elif key_dim > LANES:
        alive = _ALIVE_OF_WIDE[kind]
    alive_states = alive[variant.heads > 1] * max(variant.chunk, 64) // 64
    return state + blocks + handed + round(spill * MIB) + alive_states * key_dim * value_dim * 4


def handover(variant: BackwardVariant, problem: Problem, request: Request) -> Handover:
    """What the two halves of the kernel of a variant hand over, as it is generated."""
    wants = CORRECTIONS in request.stages
    return Handover(
        chunk=variant.chunk,
        items=variant.streams * variant.chunks,
        base=variant.sub_block,
        dtype=problem.operand,
        inverse_dtype=variant.inverse_dtype,
        gradients=wants,
        norms=problem.qk_l2norm and not {"query", "key"}.isdisjoint(request.wanted),
        gate=not set(_DECAY_OPERANDS).isdisjoint(request.wanted),
        rate="a_log" in request.wanted,
        corrected=wants and not variant.keep_corrected,
        packed=wants and problem.packed,
        streams=variant.streams,
        heads=variant.heads,
        initial=problem.packed and problem.initial_state,
        final=problem.packed and request.state_cotangent,
        written=GRADIENTS in request.stages,
    )


def default_variant(problem: Problem, chip: Chip, *, kept: bool = False) -> BackwardVariant:
    """The variant used where nothing was tuned: the most chunk-heads in flight that fit, up to 16.

    Heads beside one another hide what a chain of products waits for, so that they are worth a
    higher VMEM limit. ``kept`` is whether the forward keeps what it may.

    Raises:
      VariantError: no variant serves the problem on this chip; the message is that of ``check``.
    """
    inverse_dtype = "float32" if problem.wide_inverse else "bfloat16"
    ratio = problem.value_heads // problem.heads
    limits = (0, chip.usable_vmem_bytes * 3 // 4 // MIB)
    violation = None
    # short chunks take the least VMEM, and the most time
    for short, in_flight, limit in itertools.product((False, True), (16, 8, 4, 2, 1), limits):
        for heads in reversed(range(1, max(in_flight, ratio) + 1)):
            if problem.value_heads % heads or heads % ratio:
                continue
            long = heads == 1 and 128 in chunks(problem, inverse_dtype)
            chunk = 32 if short else 128 if long else 64
            least = LANES // math.gcd(LANES, heads * chunk)  # chunks that fill the lanes
            most = min(in_flight // heads, -(-problem.tokens // chunk)) // least
            variant = BackwardVariant(
                chunk=chunk,
                heads=heads,
                chunks=least * max(1, most),
                sub_block=sub_blocks(problem)[-1],
                inverse_block=4 if problem.wide_inverse else 8,
                inverse_dtype=inverse_dtype,
                keep_inverse=keeps_inverse(problem)[-1 if kept else 0],
                keep_corrected=keeps_corrected(problem)[-1 if kept else 0],
                vmem_limit_mib=limit,
            )
            violation = check(variant, problem, chip)
            if violation is None:
                return variant
    raise VariantError(f"no variant serves this problem on {chip.name}: {violation}")
