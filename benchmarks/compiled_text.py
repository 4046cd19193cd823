"""What the text of a compiled program tells that the listings of its schedules do not.

libtpu schedules one of several equal operations and leaves the listings of that one alone. And it
leaves none of the copies between HBM and VMEM that run beside other operations. Standard library
only.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from math import prod

# Names of buffers, which take no time.
_NAMING = frozenset(("parameter", "constant", "bitcast", "get-tuple-element", "tuple"))
# Of what was copied to VMEM in slices.
_NAMING_CALL = 'custom_call_target="ConcatBitcast"'
# The two ends of a copy between HBM and VMEM, the second with the result as its type.
_COPIES = frozenset(("copy-start", "copy-done", "slice-start", "slice-done"))
_COPIED = frozenset(("copy-done", "slice-done"))
# The end of what runs on another core, by the name of what it is.
_OFFLOADED = frozenset(("custom-call-done", "call-done", "async-done"))
_SPARSE_CORE = re.compile(r"^(sparse-core|gather_offload|scatter_offload)")
_ARRAY = re.compile(r"(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<shape>[\d,]*)\]")
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%(?P<name>\S+) = (?P<type>.*?) (?P<opcode>[a-z][\w-]*)"
    r"\((?P<operands>[^)]*)\)(?P<attributes>.*)"
)
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%(?P<name>\S+) \(.*\{")
_NAME = re.compile(r"%([\w.-]+)")


@dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: str
    attributes: str

    @property
    def runs_by_itself(self) -> bool:
        """Whether the core is busy with it, and with nothing else meanwhile."""
        if self.opcode in _NAMING or self.opcode in _COPIES:
            return False
        return not (self.opcode == "custom-call" and _NAMING_CALL in self.attributes)


def unlisted(text: str, listed: Collection[str]) -> dict[str, str | None]:
    """The operations of a program's entry that no schedule was left of, but for copies between HBM
    and VMEM that run beside others.

    Two operations are equal if their opcodes, the shapes and layouts of results and operands, and
    their attributes (the compiler's own settings, such as windows, included) are, and so are the
    computations that they call, names and the tracing's metadata apart.

    Args:
      text: of the compiled program, ``CompiledFor.text``.
      listed: names of the operations with a schedule.

    Returns:
      By the name of such an operation a listed one that equals it, None where there is none.
    """
    computations, entry = _parse(text)
    types = {one.name: one.type for one in entry}
    known: dict[str, str] = {}
    signatures = {
        one.name: _signature(one, types, computations, known) for one in entry if one.runs_by_itself
    }
    representatives = {signature: name for name, signature in signatures.items() if name in listed}
    return {
        name: representatives.get(signature)
        for name, signature in signatures.items()
        if name not in listed
    }


def copied_bytes(text: str) -> int:
    """Bytes that the entry of a program copies between HBM and VMEM beside other operations."""
    _, entry = _parse(text)
    return sum(_size(one.type) for one in entry if one.opcode in _COPIED)


def offloaded_bytes(text: str) -> int:
    """Bytes that SparseCores read and write for the entry of a program, whose code is not listed:
    of gathers, scatters and changes of layout, at least what comes out, twice."""
    _, entry = _parse(text)
    done = [one for one in entry if one.opcode in _OFFLOADED and _SPARSE_CORE.search(one.name)]
    return 2 * sum(_size(one.type) for one in done)


def _size(array: str) -> int:
    """Bytes of an array's type without the padding of its layout."""
    found = _ARRAY.match(array)
    if found is None:
        raise ValueError(f"array: got {array!r}, expected a type as bf16[2,128]")
    elements = prod(int(length) for length in found["shape"].split(",") if length)
    return elements * int(found["bits"] or 8) // 8


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], list[_Instruction]]:
    """The computations of a program by name, and its entry."""
    computations: dict[str, list[_Instruction]] = {}
    entry: list[_Instruction] = []
    current: list[_Instruction] = []
    for line in text.splitlines():
        if head := _COMPUTATION.fullmatch(line):
            current = entry if head["entry"] else computations.setdefault(head["name"], [])
        elif found := _INSTRUCTION.fullmatch(_without_metadata(line)):
            current.append(_Instruction(**found.groupdict()))
    return computations, entry


def _signature(
    one: _Instruction,
    operands: dict[str, str],
    computations: dict[str, list[_Instruction]],
    known: dict[str, str],
) -> str:
    """The text of an instruction without names: what ``operands`` has for those of its operands,
    and the text of the computations it calls. ``known`` keeps the latter by name."""

    def called(name: str) -> str:
        if name not in computations:
            return "%" + name
        if name not in known:
            known[name] = _body(computations[name], computations, known)
        return known[name]

    given = _NAME.sub(lambda found: operands.get(found[1], found[0]), _plain(one.operands))
    attributes = _NAME.sub(lambda found: called(found[1]), _plain(one.attributes))
    return f"{one.type} {one.opcode}({given}){attributes}"


def _body(
    instructions: list[_Instruction],
    computations: dict[str, list[_Instruction]],
    known: dict[str, str],
) -> str:
    numbered = {one.name: f"#{number}" for number, one in enumerate(instructions)}
    lines = [_signature(one, numbered, computations, known) for one in instructions]
    return "{" + "; ".join(lines) + "}"


def _plain(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text)


def _without_metadata(line: str) -> str:
    """A line without what the tracing noted of it, which may hold braces inside quotes."""
    start = line.find(", metadata={")
    if start < 0:
        return line
    depth, quoted, place = 0, False, start + len(", metadata=")
    while place < len(line):
        char = line[place]
        if quoted and char == "\\":
            place += 1
        elif char == '"':
            quoted = not quoted
        elif not quoted:
            depth += (char == "{") - (char == "}")
            if depth == 0:
                break
        place += 1
    return line[:start] + line[place + 1 :]
