"""Decode the scalar side of a listing into steps that an interpreter can run quickly.

Control flow, DMA sizes and synchronisation of a TPU kernel are ordinary integer code on the scalar
unit. Registers are named by value (``%s1065_s18``: value 1065 in register 18); a ``sphi`` joins the
values that meet at a loop head and ``int_to_ptr`` renames one, so the names share one slot here.
Bounds checks, which end in nothing but a halt, and everything else no branch, store, DMA or wait
depends on are left out.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kdagen.compiler.bundles import Listing, Operation
from kdagen.errors import KdagenError

MASK = 0xFFFFFFFF
# An operand's address: far above any 32-bit number, so that pointer arithmetic keeps which it was.
OPERAND_BASE = 1 << 40

_REGISTER = re.compile(r"%[sp]\d+_[sp]\d+")


class WalkError(KdagenError):
    """A listing whose scalar code cannot be followed; the message says where and why."""


class Unknown:
    """A value from vector data or from memory nobody wrote; arithmetic on it is unknown too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()


@dataclass(frozen=True)
class Step:
    """One decoded operation.

    ``kind`` is "set" (result <- function of the sources), "load", "store", "dma", "wait", "add",
    "clear" (a synchronisation flag) or "branch". ``result``, ``sources``, ``predicate`` and
    ``otherwise`` are slots, -1 for none. ``detail`` is a branch's bundle index, or a DMA's (source
    space, destination space), None where the addresses must tell.
    """

    kind: str
    result: int
    function: Callable[..., Any] | None
    sources: tuple[int, ...]
    predicate: int
    negated: bool
    otherwise: int
    detail: Any = None


@dataclass(frozen=True)
class Program:
    """Decoded bundles: ``steps[i]`` are bundle i's, addresses to compute first in ``addresses``.

    ``initial`` holds every slot's value at entry.
    """

    steps: dict[int, tuple[Step, ...]]
    addresses: dict[int, tuple[tuple[int, int, tuple[int, ...]], ...]]
    initial: tuple[Any, ...]


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 32) if value >= 1 << 31 else value


def _strict(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` on numbers, unknown as soon as one argument is."""

    def apply(*values: Any) -> Any:
        for value in values:
            if value is UNKNOWN:
                return UNKNOWN
        return function(*values)

    return apply


def _pointer_add(a: int, b: int) -> int:
    if a >= OPERAND_BASE:
        return a + _signed(b)
    if b >= OPERAND_BASE:
        return b + _signed(a)
    return (a + b) & MASK


def _on_offset(function: Callable[[int, int], int]) -> Callable[[int, int], int]:
    """Change an address's unit or alignment without losing which operand it points into."""

    def apply(a: int, b: int) -> int:
        operand, offset = divmod(a, OPERAND_BASE)
        return operand * OPERAND_BASE + function(offset, b)

    return apply


def _all(*values: Any) -> Any:
    if any(value is not UNKNOWN and not value for value in values):
        return False
    return UNKNOWN if UNKNOWN in values else True


def _any(*values: Any) -> Any:
    if any(value is not UNKNOWN and value for value in values):
        return True
    return UNKNOWN if UNKNOWN in values else False


def _not(value: Any) -> Any:
    return UNKNOWN if value is UNKNOWN else not value


def _select(condition: Any, on_true: Any, on_false: Any) -> Any:
    if condition is UNKNOWN:
        return on_true if on_true == on_false else UNKNOWN
    return on_true if condition else on_false


def _same(value: Any) -> Any:
    return value


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "sadd": _pointer_add,
    "scalar_lea": _pointer_add,
    "ssub": lambda a, b: a - b if a >= OPERAND_BASE else (a - b) & MASK,
    "sand": _on_offset(operator.and_),
    "sor": operator.or_,
    "sxor": operator.xor,
    "snot": lambda a: ~a & MASK,
    "sshll": _on_offset(lambda a, b: (a << (b & 31)) & MASK),
    "sshrl": _on_offset(lambda a, b: (a & MASK) >> (b & 31)),
    "sshra": lambda a, b: (_signed(a) >> (b & 31)) & MASK,
    "smul": lambda a, b: (a * b) & MASK,
    "smulhi": lambda a, b: ((a & MASK) * (b & MASK)) >> 32,
    "smax": lambda a, b: max(_signed(a), _signed(b)) & MASK,
    "smin": lambda a, b: min(_signed(a), _signed(b)) & MASK,
}
_LOGIC: dict[str, Callable[..., Any]] = {
    "pand": _all,
    "por": _any,
    "pnand": lambda *values: _not(_all(*values)),
    "pnor": lambda *values: _not(_any(*values)),
    "pneg": _not,
    "pmov": _same,
    "pxor": _strict(lambda a, b: bool(a) != bool(b)),
    "scalar_select": _select,
    "smov": _same,
}
# Of "kDivAndRem" the queue holds the quotient before the remainder.
_DIVISIONS: dict[str, Callable[[int, int], Any]] = {
    "kDiv": operator.floordiv,
    "kRem": operator.mod,
    "kDivAndRem": divmod,
}
_RELATIONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def _popped(position: int, results: Any) -> Any:
    """What the pop of a division takes that ``position`` others come before."""
    return results[position] if isinstance(results, tuple) else results


def _comparison(name: str) -> Callable[..., Any]:
    relation = _RELATIONS[name.split(".")[1]]
    if ".s32" in name:
        return _strict(lambda a, b: relation(_signed(a), _signed(b)))
    return _strict(relation)


class _Decoder:
    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.parents: dict[str, str] = {}
        self.slots: dict[Any, int] = {}
        self.values: list[Any] = []
        self.pops: Counter[str] = Counter()

    def find(self, register: str) -> str:
        root = register
        while (parent := self.parents.get(root, root)) != root:
            root = parent
        if root != register:
            self.parents[register] = root
        return root

    def join(self, operation: Operation) -> None:
        """Give the result and the sources of an operation that does nothing one slot."""
        for source in operation.arguments:
            if operation.result and _REGISTER.fullmatch(source):
                ours, theirs = self.find(operation.result), self.find(source)
                if ours != theirs:
                    self.parents[ours] = theirs

    def slot(self, key: Any, value: Any = UNKNOWN) -> int:
        if key not in self.slots:
            self.slots[key] = len(self.values)
            self.values.append(value)
        return self.slots[key]

    def operand(self, text: str, addresses: list[tuple[int, int, tuple[int, ...]]]) -> int:
        """The slot of a register, a number or an address."""
        negate = text.startswith("!")
        # a register or number may be followed by the allocation that it points into
        text = re.sub(r"^(%?\w+)\s+\[#allocation\d+\]$", r"\1", text.lstrip("!").strip())
        if _REGISTER.fullmatch(text):
            if negate:
                raise WalkError(f"negated operand {text} in {self.listing.name}")
            return self.slot(self.find(text))
        if re.fullmatch(r"-?\d+|0x[0-9a-f]+", text):
            number = int(text, 0) & MASK
            return self.slot(number, number)
        if "[" in text:
            return self.address(text, addresses)
        return self.slot("unknown")

    def address(self, text: str, addresses: list[tuple[int, int, tuple[int, ...]]]) -> int:
        constant, registers = 0, []
        for part in re.sub(r"[\[\]]|\w+:", " ", text).split("+"):
            part = part.strip().lstrip("$")
            allocation = re.fullmatch(r"#allocation(\d+)(_spill)?", part)
            if allocation:
                constant += allocation_address(int(allocation.group(1)), bool(allocation.group(2)))
            elif part.startswith("%"):
                registers.append(self.slot(self.find(part)))
            elif part:
                constant += int(part, 0)
        if not registers:
            return self.slot(constant, constant)
        result = self.slot(("address", constant, tuple(registers)))
        addresses.append((result, constant, tuple(registers)))
        return result

    def decode(self) -> Program:
        parsed: list[list[Operation]] = []
        for bundle in self.listing.bundles:
            operations = [
                operation
                for operation in bundle.operations()
                if not (operation.result or "").startswith("%v")
            ]
            for operation in operations:
                if operation.name == "sphi" or operation.name.startswith("int_to_ptr"):
                    self.join(operation)
            parsed.append(operations)
        for operand in self.listing.operands:
            self.slot(self.find(operand.register), OPERAND_BASE * (operand.index + 1))
        steps: dict[int, list[Step]] = {}
        addresses: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
        for index, operations in enumerate(parsed):
            computed: list[tuple[int, int, tuple[int, ...]]] = []
            decoded = [self.step(operation, computed) for operation in operations]
            kept = [step for step in decoded if step is not None]
            if kept:
                steps[index] = kept
                addresses[index] = computed
        return self.live(steps, addresses)

    def step(
        self, operation: Operation, addresses: list[tuple[int, int, tuple[int, ...]]]
    ) -> Step | None:
        name, base = operation.name, operation.name.split(".")[0]
        predicate = self.slot(self.find(operation.predicate)) if operation.predicate else -1
        otherwise = self.slot(self.find(operation.otherwise)) if operation.otherwise else -1
        is_scalar = bool(_REGISTER.fullmatch(operation.result or ""))
        result = self.slot(self.find(operation.result)) if is_scalar and operation.result else -1

        def make(kind: str, function: Any, arguments: Any, detail: Any = None) -> Step:
            sources = tuple(self.operand(argument, addresses) for argument in arguments)
            return Step(
                kind, result, function, sources, predicate, operation.negated, otherwise, detail
            )

        if base == "sbr":
            if operation.target is None:
                raise WalkError(f"branch to an unknown place in {self.listing.name}: {name}")
            # An empty region behind the last bundle has no mark: a branch there ends the kernel.
            end = len(self.listing.bundles)
            return make("branch", None, (), self.listing.regions.get(operation.target, end))
        if name == "dma.done.wait":
            return make("wait", None, operation.arguments[:2])
        if base == "dma":
            spaces = re.fullmatch(r"dma\.(\w+?)_to_(\w+)", name)
            return make("dma", None, operation.arguments[:4], spaces.groups() if spaces else None)
        if name == "vsyncadd":
            return make("add", None, operation.arguments[:2])
        if name in ("vsyncpa", "vsyncset"):
            return make("clear", None, operation.arguments[:2])
        if base in ("sdivrem", "spop") and operation.result:
            return self.division(operation, make)
        if base == "sst":
            return make("store", None, operation.arguments[:2])
        if result < 0 or base in ("sphi", "int_to_ptr", "inlined_call_operand"):
            return None
        if base == "sld":
            return make("load", None, operation.arguments[:1])
        if base == "scmp":
            return make("set", _comparison(name), operation.arguments)
        if base in _ARITHMETIC:
            return make("set", _strict(_ARITHMETIC[base]), operation.arguments)
        if base in _LOGIC:
            return make("set", _LOGIC[base], operation.arguments)
        return make("set", lambda: UNKNOWN, ())

    def division(self, operation: Operation, make: Callable[..., Step]) -> Step | None:
        """Integer division leaves its result in a queue, from which ``spop.drf`` takes it.

        What other units push (``spop``) comes from vector data.
        """
        if operation.name == "spop.drf":
            queue = operation.arguments[0]
            step = make("set", functools.partial(_popped, self.pops[queue]), ())
            self.pops[queue] += 1
            return replace(step, sources=(self.slot(queue),))
        if operation.name.startswith("spop"):
            return make("set", lambda: UNKNOWN, ())
        mode = operation.arguments[2] if len(operation.arguments) > 2 else ""
        if not operation.name.endswith(".u32") or mode not in _DIVISIONS:
            return None
        function = _DIVISIONS[mode]
        step = make(
            "set", _strict(lambda a, b: function(a, b) if b else 0), operation.arguments[:2]
        )
        return replace(step, result=self.slot(operation.result))

    def live(self, steps: dict[int, list[Step]], addresses: dict[int, Any]) -> Program:
        """Keep what a branch, a store, a DMA or a wait depends on."""
        producers: dict[int, list[Step]] = {}
        for bundle in steps.values():
            for step in bundle:
                if step.result >= 0:
                    producers.setdefault(step.result, []).append(step)
        computed = {item[0]: item[2] for bundle in addresses.values() for item in bundle}
        needed: set[int] = set()

        def uses(step: Step) -> list[int]:
            return [*step.sources, step.predicate, step.otherwise]

        pending = [
            slot
            for bundle in steps.values()
            for step in bundle
            if step.kind not in ("set", "load")
            for slot in uses(step)
        ]
        while pending:
            slot = pending.pop()
            if slot < 0 or slot in needed:
                continue
            needed.add(slot)
            pending.extend(computed.get(slot, ()))
            for step in producers.get(slot, ()):
                pending.extend(uses(step))
        kept = {
            index: tuple(
                step for step in bundle if step.kind not in ("set", "load") or step.result in needed
            )
            for index, bundle in steps.items()
        }
        return Program(
            steps={index: bundle for index, bundle in kept.items() if bundle},
            addresses={
                index: tuple(item for item in addresses[index] if item[0] in needed)
                for index, bundle in kept.items()
                if bundle
            },
            initial=tuple(self.values),
        )


def allocation_address(number: int, spill: bool = False) -> int:
    """Where the walk puts a numbered allocation: anywhere apart from the others will do."""
    return ((number + 1) << 20) + (1 << 19 if spill else 0)


def decode(listing: Listing) -> Program:
    """Decode a listing.

    Raises:
      WalkError: it branches in a way that is not understood.
    """
    return _Decoder(listing).decode()
