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
# wait for its instructions. Beside it what 64 tokens of one head take in a loop of this kernel at
# K = V = 128 in bfloat16, by factorisation, and what an inverse in float32 adds: the number is
# known only when it has been compiled.
MAX_LOOP_BUNDLES = 9700
_BUNDLES_PER_UNIT = {
    "v4": {"bounded": 540, "unbounded": 620, "tree": 700, "inverse": 1000},
    "v5e": {"bounded": 340, "unbounded": 380, "tree": 440, "inverse": 700},
    "v5p": {"bounded": 340, "unbounded": 380, "tree": 440, "inverse": 700},
    "v6e": {"bounded": 230, "unbounded": 270, "tree": 320, "inverse": 450},
    "v7x": {"bounded": 230, "unbounded": 270, "tree": 320, "inverse": 450},
}
_EXACT_BUNDLES = 5

_FEW_STREAMS = 8
_SUB_BLOCKS = {"bounded": (16, 32), "unbounded": (8,), "tree": (1,)}
_EMISSION = ("recurrence_span", "inverse_span", "relation_span", "lag", "order")
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
      heads, rows: value heads and batch rows a program works on in lockstep.
      chunks: chunks a program takes in one grid step.
      decay: "bounded" splits 2^(G_t - G_j) at a row inside a sub-block, which only a gate with a
        lower bound allows; "unbounded" splits it at boundaries between j and t, down to sub-blocks
        in which the decay of one token is floored; "tree" does so down to single rows, unfloored.
      sub_block: rows of the blocks whose relations share a reference row.
      inverse_block: rows of the diagonal blocks that are inverted first, by a sum of powers.
      inverse_dtype: in which the inverse is formed and applied.
      weight_depth: contraction depth of the products below 16-row blocks.
      recurrence_span, inverse_span, relation_span: slots over which the chunk-heads of a stage
        start; they decide how the stages interleave in program order.
      lag: slots by which the relations start after the recurrence.
      order: which stage goes first within a slot: "rir" recurrence, inverse, relations; "irr"
        inverse, recurrence, relations; "mix" deals them out.
      vmem_limit_mib: scoped VMEM limit to ask the compiler for, in MiB; 0 is the chip's default.
      states: dtype of the states at the start of every chunk that are kept for the backward, or
        "none".
      keep_inverse, keep_corrected, keep_gate: whether inverse, corrected values and summed log
        decay are kept as well.
    """

    chunk: int = 64
    heads: int = 16
    rows: int = 1
    chunks: int = 1
    decay: str = "bounded"
    sub_block: int = 32
    inverse_block: int = 8
    inverse_dtype: str = "bfloat16"
    weight_depth: int = 64
    recurrence_span: int = 4
    inverse_span: int = 2
    relation_span: int = 9
    lag: int = 0
    order: str = "rir"
    vmem_limit_mib: int = 0
    states: str = "none"
    keep_inverse: bool = False
    keep_corrected: bool = False
    keep_gate: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = type(field.default)
            if type(value) is not wanted:
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
    def streams(self) -> int:
        """Pairs of batch row and value head that a program works on."""
        return self.rows * self.heads

    @property
    def packs(self) -> int:
        """Groups of chunk-heads that fill the 128 lanes together, in one grid step."""
        return self.streams * self.chunks * self.chunk // LANES

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
            heads=self.streams,
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

    The product holds illegal points; ``check`` tells. Heads and rows are divisors of the problem's,
    and the chunks of a program no more than its sequence has.
    """
    decay, exact = _natural_decay(problem), problem.exact
    kept = (False, True) if problem.residuals == "save" else (False,)
    return {
        "chunk": (32, 64, 128),
        "heads": tuple(_divisors(problem.value_heads, 32)),
        "rows": tuple(_divisors(problem.batch, 32)),
        "chunks": tuple(n for n in _CHUNKS if n == 1 or 64 * (n - 1) < problem.tokens),
        "decay": (decay,),
        "sub_block": _SUB_BLOCKS[decay] if not exact else _SUB_BLOCKS[decay][:1],
        "inverse_block": (2, 4) if _wide_inverse(problem) else (2, 4, 8),
        "inverse_dtype": ("float32",) if _wide_inverse(problem) else ("bfloat16",),
        "weight_depth": (64, 128),
        "recurrence_span": (4, 5, 6, 7, 8, 9, 10, 12),
        "inverse_span": (1, 2, 3),
        "relation_span": (0, 4, 5, 6, 7, 8, 9),
        "lag": (0, 1),
        "order": ("rir", "irr"),
        "vmem_limit_mib": _vmem_limits(chip),
        "states": ("bfloat16", "float32") if problem.residuals == "save" else ("none",),
        "keep_inverse": kept,
        "keep_corrected": kept,
        "keep_gate": kept,
    }


def _wide_inverse(problem: Problem) -> bool:
    """Whether the inverse must be formed and applied above bfloat16."""
    return problem.exact or problem.precision == "highest"


def _natural_decay(problem: Problem) -> str:
    """The fastest factorisation that is right for the gate and the dtype."""
    if problem.gate == "bounded":
        return "bounded"
    return "tree" if problem.exact else "unbounded"


def _vmem_limits(chip: Chip) -> tuple[int, ...]:
    default = chip.default_vmem_limit_bytes // MIB
    raised = chip.usable_vmem_bytes * 3 // 4 // MIB
    return (0, raised) if raised > default else (0,)


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
    products a chunk, and nothing else fills its waits. The first that ``check`` passes is taken,
    from the most tokens in flight and the most heads down.

    Raises:
      VariantError: no variant serves the problem on this chip; the message is that of ``check``.
    """
    decay, exact = _natural_decay(problem), problem.exact
    violation = None
    for in_flight in (2048, 1024, 512, 256, 128):
        for heads in reversed(_divisors(problem.value_heads, in_flight // 64)):
            rows = max(_divisors(problem.batch, max(in_flight // 64 // heads, 1)))
            streams = rows * heads
            chunk = 128 if streams < _FEW_STREAMS and 128 * streams <= in_flight else 64
            chunks = min(in_flight // (chunk * streams), -(-problem.tokens // chunk))
            for limit in _vmem_limits(chip):
                variant = Variant(
                    chunk=chunk,
                    heads=heads,
                    rows=rows,
                    chunks=max(1, chunks),
                    decay=decay,
                    sub_block=_SUB_BLOCKS[decay][0 if exact else -1],
                    inverse_block=4 if _wide_inverse(problem) else 8,
                    inverse_dtype="float32" if _wide_inverse(problem) else "bfloat16",
                    vmem_limit_mib=limit,
                    states="bfloat16" if problem.residuals == "save" else "none",
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
    if problem.segments is not None:
        return (
            f"segments={problem.segments!r} of the problem: the fused kernel serves unpacked "
            "sequences"
        )
    return None


def _values(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    """Values that a parameter may have at all, alone and together."""
    takes: dict[str, tuple[Any, ...]] = {
        "chunk": (32, 64, 128),
        "decay": tuple(_SUB_BLOCKS),
        "sub_block": _SUB_BLOCKS.get(variant.decay, ()),
        "inverse_block": (2, 4, 8),
        "inverse_dtype": ("bfloat16", "float32"),
        "weight_depth": (64, 128),
        "order": tuple(ORDERS),
        "states": ("none", "bfloat16", "float32"),
    }
    for name, values in takes.items():
        value = getattr(variant, name)
        if value not in values:
            return f"{name}={value!r}: it may be {', '.join(map(repr, values))} here"
    least = {"heads": 1, "rows": 1, "chunks": 1, "recurrence_span": 1, "inverse_span": 1}
    for name in (
        "heads",
        "rows",
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
    """Heads and rows divide into programs, and chunk-heads into packs that fill the lanes."""
    if problem.value_heads % variant.heads:
        return (
            f"heads={variant.heads}: it must divide the problem's {problem.value_heads} value heads"
        )
    ratio = problem.value_heads // problem.heads
    if variant.heads % ratio and ratio % variant.heads:
        return (
            f"heads={variant.heads}: it must divide the {ratio} value heads of a key head, or be a "
            "multiple of them"
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


def _decay(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    """The bounded factorisation overflows unless static facts bound the gate."""
    if variant.decay == "bounded" and problem.gate != "bounded":
        return (
            f"decay='bounded': a {problem.gate} gate has no lower bound; it must be 'unbounded' or "
            "'tree'"
        )
    return None


def _precision(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    """Float32 keeps its accuracy, and ill-conditioned keys theirs where that is asked for."""
    if not _wide_inverse(problem):
        return None
    asked = "precision='highest'"
    if problem.exact:
        asked = f"dtype={problem.dtype!r} with key_dim={problem.key_dim}"
    if variant.inverse_dtype != "float32":
        return f"inverse_dtype={variant.inverse_dtype!r}: {asked} needs 'float32'"
    # a sum of powers over 8 rows loses up to 50 times the accuracy where keys are nearly parallel
    if variant.inverse_block > 4:
        return f"inverse_block={variant.inverse_block}: {asked} takes 2, 4"
    # within 32 rows a factor may be 2^-115, and the low parts of its product are flushed to zero
    if problem.exact and variant.sub_block not in (1, 16):
        return (
            f"decay={variant.decay!r}, sub_block={variant.sub_block}: {asked} takes 'tree', or "
            "'bounded' with sub_block=16"
        )
    return None


def _residuals(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    """Residual outputs are those of a call whose policy keeps them."""
    kept = variant.keep_inverse or variant.keep_corrected or variant.keep_gate
    if problem.residuals == "save":
        if variant.states == "none":
            return "states='none': residuals='save' keeps 'bfloat16' or 'float32' states"
    elif kept or variant.states != "none":
        return (
            f"states={variant.states!r}, keep_inverse={variant.keep_inverse}, "
            f"keep_corrected={variant.keep_corrected}, keep_gate={variant.keep_gate}: a problem "
            f"with residuals={problem.residuals!r} keeps none"
        )
    return None


def _code_size(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    """A loop of known size; a program of a single pack is as small as any."""
    of = _BUNDLES_PER_UNIT[chip.name]
    unit = of[variant.decay] * sum(_whole_registers(problem)) / (2 * LANES)
    if problem.exact:
        unit *= _EXACT_BUNDLES
    elif variant.inverse_dtype == "float32":
        unit += of["inverse"]
    bundles = round(variant.streams * variant.chunks * variant.chunk / 64 * unit)
    if bundles > MAX_LOOP_BUNDLES and variant.packs > 1:
        return (
            f"heads={variant.heads}, rows={variant.rows}, chunks={variant.chunks}, "
            f"chunk={variant.chunk}: about {bundles} bundles in the loop, more than the "
            f"{MAX_LOOP_BUNDLES} known to run well"
        )
    return None


def _whole_registers(problem: Problem) -> tuple[int, int]:
    """K and V in whole registers of 128 lanes, as a kernel holds them."""
    key_dim, value_dim = (-(-d // LANES) * LANES for d in (problem.key_dim, problem.value_dim))
    return key_dim, value_dim


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


CONSTRAINTS = (_served, _values, _packing, _decay, _precision, _residuals, _code_size, _vmem)


def vmem_bytes(variant: Variant, problem: Problem, chip: Chip) -> int:
    """VMEM that the kernel of a variant takes, in bytes, from above.

    Scratch and pipelined blocks are exact; what the compiler spills is not known before it has
    compiled, so the most that was seen over the space is allowed for.
    """
    size = {"bfloat16": 2, "float32": 4}
    streams, chunk, packs = variant.streams, variant.chunk, variant.packs
    items = streams * variant.chunks
    key_dim, value_dim = _whole_registers(problem)
    operand, element = size["float32" if problem.exact else "bfloat16"], size[problem.dtype]
    state = streams * key_dim * value_dim * 4
    pack = (key_dim + 2 * chunk) * LANES * size[variant.inverse_dtype]
    pack += chunk * LANES * 4 + 8 * key_dim * 4
    handover = 2 * (items * 2 * chunk * key_dim * operand + packs * pack)
    key_heads = max(variant.heads // (problem.value_heads // problem.heads), 1)
    blocks = variant.rows * key_heads * variant.chunks * chunk * 2 * key_dim * element
    row = 2 * value_dim * element + key_dim * size[problem.gate_dtype]
    row += variant.keep_corrected * value_dim * element + variant.keep_gate * key_dim * 4
    blocks += items * chunk * row + max(packs, 8) * LANES * 4
    if variant.states != "none":
        blocks += items * key_dim * value_dim * size[variant.states]
    if variant.keep_inverse:
        blocks += packs * chunk * LANES * operand
    if problem.gate != "log_decay":
        blocks += variant.heads * 8 * key_dim * 4
    spill = _SPILL_BYTES_PER_PACK.get(chip.name, _OTHER_SPILL_BYTES_PER_PACK)
    spans = (variant.recurrence_span, variant.relation_span or variant.recurrence_span)
    if min(spans) < _NARROW_SPAN:
        spill *= _NARROW_SPILLS
    spill = spill * max(key_dim, value_dim) // LANES * operand // 2
    return state + handover + 2 * blocks + _LEAST_SPILL_BYTES + packs * spill
