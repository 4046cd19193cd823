"""How a problem is solved: parameters of a generated kernel, their space, their legality."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kdagen.chips import Chip
from kdagen.emission import ORDERS, Plan, plan
from kdagen.errors import KdagenError
from kdagen.kernels.tiling import LANES
from kdagen.problem import Problem, canonical_json

MIB = 1 << 20

# The largest loop body, in bundles, with a published time that the model meets; a larger one may
# wait for its instructions. Beside it what 64 tokens of one head take in a loop of this kernel, by
# factorisation: the number is known only when it has been compiled.
MAX_LOOP_BUNDLES = 9700
_BUNDLES_PER_UNIT = {
    "v4": {"bounded": 540, "unbounded": 620},
    "v5e": {"bounded": 340, "unbounded": 380},
    "v5p": {"bounded": 340, "unbounded": 380},
    "v6e": {"bounded": 230, "unbounded": 270},
    "v7x": {"bounded": 230, "unbounded": 270},
}

_FEW_HEADS = 8
_CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32)

# VMEM that the compiler spills registers to, per pack: the most seen over the space, and a margin.
# The scheduler of v4 keeps far more values alive.
# Where the items of a stage start close together, more of them are alive at once.
_SPILL_BYTES_PER_PACK = {"v4": 640 * 1024}
_OTHER_SPILL_BYTES_PER_PACK = 360 * 1024
_LEAST_SPILL_BYTES = 512 * 1024
_NARROW_SPAN, _NARROW_SPILLS = 4, 2


class VariantError(KdagenError, ValueError):
    """A variant that cannot be: an unknown parameter, or a value of the wrong type."""


@dataclass(frozen=True)
class Violation:
    """The constraint that a variant breaks for a problem on a chip.

    Attributes:
      constraint: its short name, one of a fixed set, for counting.
      message: names the parameter, what it was and what it may be.
    """

    constraint: str
    message: str

    def __str__(self) -> str:
        return f"{self.constraint}: {self.message}"


@dataclass(frozen=True)
class Variant:
    """Parameters of the fused forward kernel. Everything the generated code depends on, but for the
    problem's own facts.

    Attributes:
      chunk: tokens a chunk, C.
      heads: value heads a program works on in lockstep.
      chunks: chunks a program takes in one grid step.
      decay: "bounded" splits 2^(G_t - G_j) at a row inside a sub-block, which only a gate with a
        lower bound allows; "unbounded" splits it at boundaries between j and t.
      sub_block: rows of the blocks whose relations share a reference row.
      inverse: "neumann" sums powers inside a diagonal block, "recursive" merges from blocks of 2.
      inverse_block: rows of the diagonal blocks that are inverted first.
      weight_depth: contraction depth of the products below 16-row blocks.
      recurrence_span, inverse_span, relation_span: slots over which the chunk-heads of a stage
        start; they decide how the stages interleave in program order.
      lag: slots by which the relations start after the recurrence.
      order: which stage goes first within a slot: "rir" recurrence, inverse, relations; "irr"
        inverse, recurrence, relations; "mix" deals them out.
      vmem_limit_mib: scoped VMEM limit to ask the compiler for, in MiB; 0 is the chip's default.
    """

    chunk: int = 64
    heads: int = 16
    chunks: int = 1
    decay: str = "bounded"
    sub_block: int = 32
    inverse: str = "neumann"
    inverse_block: int = 8
    weight_depth: int = 64
    recurrence_span: int = 4
    inverse_span: int = 2
    relation_span: int = 9
    lag: int = 0
    order: str = "rir"
    vmem_limit_mib: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = str if field.type in ("str", str) else int
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise VariantError(
                    f"{field.name}: got {value!r}; it must be of type {wanted.__name__}"
                )

    def to_dict(self) -> dict[str, Any]:
        """All parameters, in the order of their declaration."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Variant:
        """The inverse of ``to_dict``; every parameter must be there.

        Raises:
          VariantError: a parameter is unknown, missing or of the wrong type.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        for what, names in (("unknown", fields.keys() - known), ("missing", known - fields.keys())):
            if names:
                raise VariantError(f"{what} parameter(s) of a variant: {', '.join(sorted(names))}")
        return cls(**fields)

    def to_json(self) -> str:
        """The canonical form: every hash and row of a variant derives from it."""
        return canonical_json(self.to_dict())

    @property
    def packs(self) -> int:
        """Groups of chunk-heads that fill the 128 lanes together, in one grid step."""
        return self.heads * self.chunks * self.chunk // LANES

    @property
    def block_tokens(self) -> int:
        """Tokens of one grid step."""
        return self.chunk * self.chunks

    def plan(self) -> Plan:
        """The order in which the stages of a grid step are emitted.

        Raises:
          EmissionError: the order is not safe.
        """
        return plan(
            chunk=self.chunk,
            heads=self.heads,
            chunks=self.chunks,
            decay=self.decay,
            sub_block=self.sub_block,
            inverse_block=self.inverse_block,
            recurrence_span=self.recurrence_span,
            inverse_span=self.inverse_span,
            relation_span=self.relation_span,
            lag=self.lag,
            order=self.order,
        )


def space(problem: Problem, chip: Chip) -> dict[str, tuple[Any, ...]]:
    """Every parameter with the ordered values that a search over this problem tries.

    The product holds illegal points; ``check`` tells. Heads are divisors of the problem's, and the
    chunks of a program no more than its sequence has.
    """
    bounded = problem.gate == "bounded"
    return {
        "chunk": (64, 128),
        "heads": tuple(_divisors(problem.value_heads, 32)),
        "chunks": tuple(n for n in _CHUNKS if n == 1 or 64 * (n - 1) < problem.tokens),
        "decay": ("bounded",) if bounded else ("unbounded",),
        "sub_block": (16, 32) if bounded else (8,),
        "inverse": ("neumann", "recursive"),
        "inverse_block": (2, 4, 8),
        "weight_depth": (64, 128),
        "recurrence_span": (4, 5, 6, 7, 8, 9, 10, 12),
        "inverse_span": (1, 2, 3),
        "relation_span": (0, 4, 5, 6, 7, 8, 9),
        "lag": (0, 1),
        "order": ("rir", "irr"),
        "vmem_limit_mib": _vmem_limits(chip),
    }


def _vmem_limits(chip: Chip) -> tuple[int, ...]:
    default = chip.default_vmem_limit_bytes // MIB
    raised = chip.usable_vmem_bytes * 3 // 4 // MIB
    return (0, raised) if raised > default else (0,)


def legal_variants(problem: Problem, chip: Chip) -> Iterator[Variant]:
    """Every point of the space that ``check`` passes, in a fixed order.

    A raised VMEM limit is offered only where the default one does not hold the variant.
    """
    names, values = zip(*space(problem, chip).items(), strict=True)
    for point in itertools.product(*values):
        variant = Variant(**dict(zip(names, point, strict=True)))
        if check(variant, problem, chip) is not None:
            continue
        plain = dataclasses.replace(variant, vmem_limit_mib=0)
        if variant == plain or check(plain, problem, chip) is not None:
            yield variant


def default_variant(problem: Problem, chip: Chip) -> Variant:
    """The variant used where nothing was tuned: 2048 tokens of heads in flight, or what fits.

    More chunks of a program make up for missing heads, as far as the sequence has them. Few heads
    take long chunks: a head's recurrence is a chain of three products a chunk, and nothing else
    fills its waits. The first that ``check`` passes is taken, from the most tokens in flight and
    the most heads down.

    Raises:
      VariantError: no variant serves the problem on this chip; the message is that of ``check``.
    """
    bounded = problem.gate == "bounded"
    violation = None
    for in_flight in (2048, 1024, 512, 256, 128):
        for heads in reversed(_divisors(problem.value_heads, in_flight // 64)):
            chunk = 64 if heads >= _FEW_HEADS else 128
            chunks = min(in_flight // (chunk * heads), -(-problem.tokens // chunk))
            variant = Variant(
                chunk=chunk,
                heads=heads,
                chunks=max(1, chunks),
                decay="bounded" if bounded else "unbounded",
                sub_block=32 if bounded else 8,
            )
            violation = check(variant, problem, chip)
            if violation is None:
                return variant
    raise VariantError(f"no variant serves this problem on {chip.name}: {violation}")


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def check(variant: Variant, problem: Problem, chip: Chip) -> Violation | None:
    """Whether a variant is legal for a problem on a chip: None, or the first constraint it breaks.

    The one judge of legality: search, fallback, import and look-up all ask it.
    """
    for constraint in CONSTRAINTS:
        message = constraint(variant, problem, chip)
        if message is not None:
            return Violation(constraint.__name__.removeprefix("_"), message)
    return None


def _served(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    """What the fused forward kernel does not do in this version."""
    asks = {
        "dtype": (problem.dtype, "bfloat16"),
        "key_dim": (problem.key_dim, 128),
        "value_dim": (problem.value_dim, 128),
        "segments": (problem.segments, None),
    }
    for name, (asked, serves) in asks.items():
        if asked != serves:
            return f"{name}={asked!r} of the problem: the fused kernel serves {serves!r}"
    if problem.value_heads != problem.heads:
        return (
            f"value_heads={problem.value_heads} with heads={problem.heads} of the problem: "
            "the fused kernel serves as many value heads as heads"
        )
    return None


def _values(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    """Values that a parameter may have at all, alone and together."""
    takes: dict[str, tuple[Any, ...]] = {
        "chunk": (32, 64, 128),
        "decay": ("bounded", "unbounded"),
        "sub_block": (16, 32) if variant.decay == "bounded" else (8,),
        "inverse": ("neumann", "recursive"),
        "inverse_block": (4, 8) if variant.inverse == "neumann" else (2,),
        "weight_depth": (64, 128),
        "order": tuple(ORDERS),
    }
    for name, values in takes.items():
        value = getattr(variant, name)
        if value not in values:
            return f"{name}={value!r}: it may be {', '.join(map(repr, values))} here"
    least = {"heads": 1, "chunks": 1, "recurrence_span": 1, "inverse_span": 1}
    for name in (
        "heads",
        "chunks",
        "recurrence_span",
        "inverse_span",
        "relation_span",
        "lag",
        "vmem_limit_mib",
    ):
        value = getattr(variant, name)
        if not least.get(name, 0) <= value <= 1024:
            return f"{name}={value}: it may be {least.get(name, 0)} to 1024"
    return None


def _packing(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    """Heads divide into programs, and chunk-heads into packs that fill the lanes."""
    if problem.value_heads % variant.heads:
        return (
            f"heads={variant.heads}: it must divide the problem's {problem.value_heads} value heads"
        )
    if variant.heads * variant.chunks * variant.chunk % LANES:
        return (
            f"heads={variant.heads}, chunks={variant.chunks}: {LANES // variant.chunk} chunk-heads "
            f"of {variant.chunk} tokens share the lanes: their product must be a multiple"
        )
    return None


def _decay(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    """The bounded factorisation overflows unless static facts bound the gate."""
    if variant.decay == "bounded" and problem.gate != "bounded":
        return f"decay='bounded': a {problem.gate} gate has no lower bound; it must be 'unbounded'"
    return None


def _code_size(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    unit = _BUNDLES_PER_UNIT[chip.name][variant.decay]
    bundles = variant.heads * variant.chunks * variant.chunk // 64 * unit
    if bundles > MAX_LOOP_BUNDLES:
        return (
            f"heads={variant.heads}, chunks={variant.chunks}, chunk={variant.chunk}: about "
            f"{bundles} bundles in the loop, more than the {MAX_LOOP_BUNDLES} known to run well"
        )
    return None


def _vmem(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    limit = variant.vmem_limit_mib * MIB or chip.default_vmem_limit_bytes
    if limit > chip.usable_vmem_bytes:
        return (
            f"vmem_limit_mib={variant.vmem_limit_mib}: {chip.name} grants at most "
            f"{chip.usable_vmem_bytes // MIB}"
        )
    used = vmem_bytes(variant, problem, chip)
    if used > limit:
        return f"about {used / MIB:.1f} MiB of VMEM, of {limit / MIB:.0f} allowed on {chip.name}"
    return None


CONSTRAINTS = (_served, _values, _packing, _decay, _code_size, _vmem)


def vmem_bytes(variant: Variant, problem: Problem, chip: Chip) -> int:
    """VMEM that the kernel of a variant takes, in bytes, from above.

    Scratch and pipelined blocks are exact; what the compiler spills is not known before it has
    compiled, so the most that was seen over the space is allowed for.
    """
    items, packs, chunk = variant.heads * variant.chunks, variant.packs, variant.chunk
    key_dim, value_dim, narrow, wide = problem.key_dim, problem.value_dim, 2, 4
    state = variant.heads * key_dim * value_dim * wide
    pack = (
        (key_dim * LANES + 2 * chunk * LANES) * narrow + chunk * LANES * wide + 8 * key_dim * wide
    )
    handover = 2 * (items * 2 * chunk * key_dim * narrow + packs * pack)
    element = {"bfloat16": 2, "float32": 4}
    row = (2 * key_dim + 2 * value_dim) * element[problem.dtype] + key_dim * element[
        problem.gate_dtype
    ]
    blocks = 2 * items * chunk * row + 2 * max(packs, 8) * LANES * wide
    if problem.gate != "log_decay":
        blocks += 2 * variant.heads * 8 * key_dim * wide
    spill = _SPILL_BYTES_PER_PACK.get(chip.name, _OTHER_SPILL_BYTES_PER_PACK)
    spans = (variant.recurrence_span, variant.relation_span or variant.recurrence_span)
    if min(spans) < _NARROW_SPAN:
        spill *= _NARROW_SPILLS
    return state + handover + blocks + _LEAST_SPILL_BYTES + packs * spill
