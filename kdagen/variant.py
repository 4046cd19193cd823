"""How a problem is solved: parameters of a generated kernel, and their legality."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kdagen.chips import Chip
from kdagen.emission import INTERLEAVED, ORDERS, Plan, plan
from kdagen.errors import KdagenError
from kdagen.kernels.pipeline import DRAIN
from kdagen.kernels.tiling import LANES
from kdagen.problem import Problem, canonical_json
from kdagen.schedulers import SCHEDULERS, Products

MIB = 1 << 20

# The largest loop body, in bundles, with a published time that the model meets; a larger one may
# wait for its instructions.
MAX_LOOP_BUNDLES = 9700

# Where the items of a stage start close together, more of them are alive at once.
_NARROW_SPAN, _NARROW_SPILLS = 4, 2
# And where segments of all stages alternate.
_MIXED_SPILLS = 1.4

# What an inverse in bfloat16 loses grows with the chunk, and averages out over the channels. With
# chunks of 128 the output of 1024 tokens of hardly any decay is off by 4.8e-3 at 128 channels, by
# 5.0e-3 at 100, 5.3e-3 at 80 and 5.5e-3 at 64; with chunks of 64 by 4.9e-3 at 64. Where writes
# reflect, the final state at 128 channels is off by 7.8e-3 under a bounded gate, and by 9.9e-3 to
# 1.1e-2 under others, of 1e-2.
_LEAST_LONG_KEY_DIM = {"bounded": 128, "softplus": 160, "log_decay": 160}

SUB_BLOCKS = {"bounded": (16, 32), "unbounded": (8,), "tree": (1,)}
_BYTES = {"bfloat16": 2, "float32": 4}


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


class Parameters:
    """What frozen dataclasses of a kernel's parameters share: checked types and their JSON."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

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
    def from_dict(cls, fields: dict[str, Any]) -> Self:
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


@dataclass(frozen=True)
class Variant(Parameters):
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
      ends: steps at either end of a sweep, 0 to 2, that have code of their own for the stages that
        have work there. Few blocks gain a good part of their time, and the code is larger by up to
        two and a half times.
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
    ends: int = 0
    vmem_limit_mib: int = 0
    states: str = "none"
    keep_inverse: bool = False
    keep_corrected: bool = False
    keep_gate: bool = False

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


def chunks(problem: Problem, inverse_dtype: str) -> tuple[int, ...]:
    """Chunks that a kernel may have with an inverse in ``inverse_dtype``."""
    long = inverse_dtype == "float32" or problem.key_dim >= _LEAST_LONG_KEY_DIM[problem.gate]
    return (32, 64, 128) if long else (32, 64)


def check(variant: Variant, problem: Problem, chip: Chip) -> Violation | None:
    """Whether a variant is legal for a problem on a chip: None, or the first constraint it breaks.

    The one judge of legality: search, fallback, import and look-up all ask it.
    """
    for constraint in CONSTRAINTS:
        message = constraint(variant, problem, chip)
        if message is not None:
            return Violation(constraint.__name__.removeprefix("_"), message)
    return None


def _values(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    """Values that a parameter may have at all, alone and together."""
    takes: dict[str, tuple[Any, ...]] = {
        "chunk": (32, 64, 128),
        "decay": tuple(SUB_BLOCKS),
        "sub_block": SUB_BLOCKS.get(variant.decay, ()),
        "inverse_block": (2, 4, 8),
        "inverse_dtype": ("bfloat16", "float32"),
        "weight_depth": (64, 128),
        "order": tuple(ORDERS),
        "ends": tuple(range(DRAIN + 1)),
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
    """Float32 and narrow keys keep their accuracy, ill-conditioned keys where it is asked for."""
    if not problem.wide_inverse:
        return beyond_chunks(variant.chunk, problem, variant.inverse_dtype)
    asked = f"precision={problem.precision!r}"
    if problem.precision == "default":
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


def beyond_chunks(chunk: int, problem: Problem, inverse_dtype: str) -> str | None:
    """What is wrong with a chunk beside an inverse in ``inverse_dtype``; None if nothing."""
    takes = chunks(problem, inverse_dtype)
    if chunk in takes:
        return None
    return (
        f"chunk={chunk}: with inverse_dtype={inverse_dtype!r} and key_dim={problem.key_dim} it may "
        f"be {', '.join(map(str, takes))}"
    )


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


def loop_bundles(variant: Variant, problem: Problem, chip: Chip) -> int:
    """About how many bundles the loop of a variant's kernel has."""
    units = variant.streams * variant.block_tokens / 64
    return SCHEDULERS[chip.name].bundles(_products(variant, problem), units)


def _code_size(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    """A loop of known size; a program of a single pack is as small as any."""
    bundles = loop_bundles(variant, problem, chip)
    if bundles > MAX_LOOP_BUNDLES and variant.packs > 1:
        return (
            f"heads={variant.heads}, rows={variant.rows}, chunks={variant.chunks}, "
            f"chunk={variant.chunk}: about {bundles} bundles in the loop, more than the "
            f"{MAX_LOOP_BUNDLES} known to run well"
        )
    return None


def _whole_registers(problem: Problem) -> tuple[int, int]:
    """K and V in whole registers of 128 lanes, as a kernel holds them."""
    return _in_lanes(problem.key_dim), _in_lanes(problem.value_dim)


def _in_lanes(width: int) -> int:
    return -(-width // LANES) * LANES


def _in_tile(rows: int) -> int:
    """Rows that so few take, in a tile of 1, 2, 4 or 8."""
    return 1 << (rows - 1).bit_length() if rows < 8 else -(-rows // 8) * 8


def _vmem(variant: Variant, problem: Problem, chip: Chip) -> str | None:
    return beyond_vmem(variant.vmem_limit_mib, vmem_bytes(variant, problem, chip), chip)


def beyond_vmem(vmem_limit_mib: int, used: int, chip: Chip) -> str | None:
    """What is wrong with ``used`` bytes under a limit that is asked of a chip; None if nothing."""
    limit = vmem_limit_mib * MIB or chip.default_vmem_limit_bytes
    if limit > chip.usable_vmem_bytes:
        return (
            f"vmem_limit_mib={vmem_limit_mib}: {chip.name} grants at most "
            f"{chip.usable_vmem_bytes // MIB}"
        )
    if used > limit:
        return f"about {used / MIB:.1f} MiB of VMEM, of {limit / MIB:.0f} allowed on {chip.name}"
    return None


CONSTRAINTS = (_values, _packing, _decay, _precision, _residuals, _code_size, _vmem)


def vmem_bytes(variant: Variant, problem: Problem, chip: Chip) -> int:
    """VMEM that the kernel of a variant takes, in bytes, from above.

    Scratch and pipelined blocks are as good as exact; what the compiler spills is not known before
    it has compiled, so ``_spill_bytes`` allows for it.
    """
    return (
        _scratch_bytes(variant, problem)
        + _window_bytes(variant, problem)
        + _spill_bytes(variant, problem, chip)
    )


def _scratch_bytes(variant: Variant, problem: Problem) -> int:
    """The states, and two slots of what the stages hand over."""
    chunk = variant.chunk
    key_dim, value_dim = _whole_registers(problem)
    operand, inverse = _BYTES[problem.operand], _BYTES[variant.inverse_dtype]
    # a final state is a window, of which there are two
    windows = problem.final_state and not problem.packed
    state = variant.streams * key_dim * value_dim * 4 * (1 + windows)
    item = 2 * chunk * key_dim * operand
    pack = (key_dim + 2 * chunk) * LANES * inverse + chunk * LANES * 4 + 8 * key_dim * 4
    handed = 2 * (variant.streams * variant.chunks * item + variant.packs * pack)
    return state + handed + _segment_bytes(variant, problem)


def _segment_bytes(variant: Variant, problem: Problem) -> int:
    """What tells of segments, and with states of theirs what forms those."""
    if not problem.packed:
        return 0
    chunk, items = variant.chunk, variant.streams * variant.chunks
    key_dim, value_dim = _whole_registers(problem)
    operand, inverse = _BYTES[problem.operand], _BYTES[variant.inverse_dtype]
    # a window of spans holds a block of both in tiles of 8 rows
    rows = variant.rows * variant.chunks * key_dim * 8 + 4 * _in_tile(variant.packs) * LANES
    rows += 2 * variant.rows * 8 * _in_lanes(variant.block_tokens)
    total = rows * 4
    state = key_dim * value_dim * 4
    if problem.segment_states:
        total += 3 * items * chunk * key_dim * 4
    if problem.initial_state:
        total += 2 * items * 2 * chunk * key_dim * operand
        total += items * (2 * chunk * value_dim * 4 + state) + variant.heads * state
    if problem.final_state:
        total += 3 * items * (key_dim * _in_lanes(chunk) * inverse + 8 * _in_lanes(chunk) * 4)
        total += items * chunk * value_dim * inverse
        total += (variant.streams + variant.heads) * state
    return total


def _spill_bytes(variant: Variant, problem: Problem, chip: Chip) -> int:
    spill = SCHEDULERS[chip.name].spill_bytes(
        _products(variant, problem),
        chunk=variant.chunk,
        packs=variant.packs,
        streams=variant.streams,
    )
    spans = (variant.recurrence_span, variant.relation_span or variant.recurrence_span)
    narrow = _NARROW_SPILLS if min(spans) < _NARROW_SPAN else 1
    mixed = _MIXED_SPILLS if variant.order == INTERLEAVED else 1
    return math.ceil(spill * narrow * mixed)


def _products(variant: Variant, problem: Problem) -> Products:
    return Products(
        variant.decay,
        problem.exact,
        variant.inverse_dtype == "float32",
        *_whole_registers(problem),
    )


def _window_bytes(variant: Variant, problem: Problem) -> int:
    """Two buffers of every block that the grid steps through."""
    key_dim, value_dim = _whole_registers(problem)
    element = _BYTES[problem.dtype]
    ratio = problem.value_heads // problem.heads
    key_heads = max(variant.heads // ratio, 1)
    flat = problem.layout == "BTHD" and all(
        heads * width % LANES == 0 or heads == whole
        for heads, whole, width in (
            (key_heads, problem.heads, problem.key_dim),
            (variant.heads, problem.value_heads, problem.key_dim),
            (variant.heads, problem.value_heads, problem.value_dim),
        )
    )

    def lanes(heads: int, width: int) -> int:
        return _in_lanes(heads * width) if flat else heads * _in_lanes(width)

    keys = lanes(variant.heads, problem.key_dim)
    values = lanes(variant.heads, problem.value_dim)
    token = 2 * lanes(key_heads, problem.key_dim) * element
    token += keys * _BYTES[problem.gate_dtype] + 2 * values * element
    token += variant.keep_corrected * values * _BYTES[problem.operand]
    token += variant.keep_gate * keys * 4
    block = variant.rows * variant.block_tokens * token
    # beta, as it is given or as a lane row a pack
    packs = variant.packs
    given = variant.heads * _in_tile(variant.rows) * _in_lanes(variant.block_tokens)
    block += max(_in_tile(packs) * LANES, given) * 4
    if variant.states != "none":
        block += variant.streams * variant.chunks * key_dim * value_dim * _BYTES[variant.states]
    if variant.keep_inverse:
        block += packs * variant.chunk * LANES * _BYTES[problem.operand]
    # rate and bias of a raw gate: biases of all heads once, both of the heads of a program
    parameters = 0
    if problem.gate != "log_decay":
        rows = -(-problem.value_heads // 8) * 8 + 2 * _in_tile(variant.heads)
        parameters = rows * key_dim * 4
    return 2 * block + _in_tile(packs) * LANES * 4 + parameters
