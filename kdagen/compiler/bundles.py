"""Parser of libtpu's listing of final bundles (``*-final_bundles.txt``).

A bundle is what a core issues in one cycle:

    0x9a   : > { %s1414_s17 = smov %s1420_s7  ;;  %20 = sbr.rel (!%p18_p4) target = $region90 }

that is an address, perhaps marks (LB heads a loop), the loop depth as a number of ``>``, and
operations between braces. Comments may span lines. They carry two things that matter: "Start region
N" resolves branch targets, and ``/*name=*/`` labels the operands of a DMA.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BUNDLE = re.compile(
    r"^[ ]*(0x[0-9a-f]+|0)[ ]+((?:LH|LB|LE|PB|PF|CT|[, ])*):[ ]*((?:>[ ]*)*)\{", re.MULTILINE
)
_COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_LABEL = re.compile(r"(\w+)=$")
# Which half of a division an operation keeps.
_MODE = re.compile(r"\s*(k[A-Z]\w*)\s*")
_OPERAND = re.compile(
    r"(%s\d+_s\d+) = inlined_call_operand\.(<[^>]*>|\S+) "
    r"\[shape: (.*?), index: (\d+), kind: (\w+)"
)
NO_SPACE = "<no memory space>"
"""In place of the memory space of an operand that is passed by value."""

_CORE_ID = re.compile(r"sld \[smem:\[#allocation(\d+)\]\] /\* (?:megacore )?core id")
_OPERATION = re.compile(r"(?:(%\S+) = )?([a-z_][\w.]*)\s*(.*)$", re.DOTALL)
_PREDICATE = re.compile(r"\((!?%p\d+_p\d+)(?:, (%\S+?))?\)\s*,?\s*")
_STORE = re.compile(r"(\[smem:\[.*?\]\])\s*(.*)$", re.DOTALL)
_NAME = re.compile(r"(?:entry|exit) bundle: %(\S+) = (?:.*? )?([a-z][\w-]*)\(")


@dataclass(frozen=True)
class Operation:
    """One operation of a bundle.

    Attributes:
      name: with its suffixes, "scmp.ge.s32.totalorder".
      result: the register it defines, or None.
      predicate: register it is predicated on, or None; ``negated`` if it runs where that is false.
      otherwise: register whose value the result takes where the predicate does not hold.
      arguments: registers, integers, addresses ("[#allocation4 + $0x1]").
      labels: of the arguments, "" where a listing gives none. Only DMAs have them.
      target: region a branch goes to, or None.
    """

    name: str
    result: str | None
    predicate: str | None
    negated: bool
    otherwise: str | None
    arguments: tuple[str, ...]
    labels: tuple[str, ...] = ()
    target: int | None = None

    def labelled(self, label: str) -> str | None:
        """The argument of that label, or None."""
        return self.arguments[self.labels.index(label)] if label in self.labels else None


@dataclass(frozen=True)
class Bundle:
    """Operations issued together. ``texts`` are unparsed: most are vector work nobody reads."""

    address: int
    marks: str
    depth: int
    texts: tuple[str, ...]

    def operations(self) -> list[Operation]:
        parsed = (parse_operation(text) for text in self.texts)
        return [operation for operation in parsed if operation is not None]


@dataclass(frozen=True)
class KernelOperand:
    """An operand of the kernel: the register of its address, its memory space and its shape."""

    register: str
    index: int
    space: str
    shape: str
    kind: str


@dataclass(frozen=True)
class Listing:
    """A parsed listing.

    Attributes:
      name: of the compiled operation, as in the HLO text.
      opcode: of that operation; a Pallas kernel is a "custom-call".
      bundles: in address order.
      regions: bundle index at which each region starts.
      operands: of the kernel.
      core_id_allocation: scalar memory allocation that holds a megacore's core number, or None.
      grids: the distinct ``iteration_bounds`` of pipelined grids (per core on a megacore).
    """

    name: str
    opcode: str
    bundles: tuple[Bundle, ...]
    regions: dict[int, int]
    operands: tuple[KernelOperand, ...]
    core_id_allocation: int | None
    grids: tuple[tuple[int, ...], ...]


def read_listing(path: Path) -> Listing:
    """Parse a ``*-final_bundles.txt``.

    Raises:
      ValueError: the file holds no bundle.
    """
    return parse_listing(path.read_text(errors="replace"), path.name)


def parse_listing(text: str, source: str = "listing") -> Listing:
    """Parse the text of a listing; ``source`` names it in errors."""
    heads = list(_BUNDLE.finditer(text))
    if not heads:
        raise ValueError(f"{source}: no bundle found; expected libtpu's final bundles")
    bundles = []
    regions: dict[int, int] = {}
    for index, head in enumerate(heads):
        end = heads[index + 1].start() if index + 1 < len(heads) else len(text)
        body = text[head.end() : end]
        for comment in _COMMENT.findall(body):
            for region in _REGION.findall(comment):
                regions.setdefault(int(region), index)
        body = _COMMENT.sub(_keep_label, body)
        body = body[: body.rindex("}")] if "}" in body else body
        bundles.append(
            Bundle(
                address=int(head.group(1), 16),
                marks=head.group(2).strip(),
                depth=head.group(3).count(">"),
                texts=tuple(part.strip() for part in body.split(";;") if part.strip()),
            )
        )
    core_id = _CORE_ID.search(text)
    name = _NAME.search(text)
    bounds = dict.fromkeys(re.findall(r"iteration_bounds: \(([\d, ]+)\)", text))
    return Listing(
        name=name.group(1) if name else source,
        opcode=name.group(2) if name else "",
        bundles=tuple(bundles),
        regions=regions,
        operands=tuple(
            KernelOperand(register, int(index), space, shape, kind)
            for register, space, shape, index, kind in _OPERAND.findall(text)
        ),
        core_id_allocation=int(core_id.group(1)) if core_id else None,
        grids=tuple(tuple(int(n) for n in re.findall(r"\d+", bound)) for bound in bounds),
    )


def parse_operation(text: str) -> Operation | None:
    """Parse one operation, or None where the text is not one."""
    found = _OPERATION.match(text)
    if not found:
        return None
    result, name, rest = found.groups()
    rest = re.sub(r"\[(?:thread|resolvable):\$\w+\]\s*", "", rest.strip())
    target = None
    branch = re.search(r"target = \$region(\d+)", rest)
    if branch:
        target = int(branch.group(1))
        rest = rest[: branch.start()]
    # A store's and a load's predicate follow the address, every other one the name.
    store = _STORE.match(rest) if name in ("sst", "sld") else None
    address, rest = store.groups() if store else ("", rest)
    predicate, otherwise = None, None
    guard = _PREDICATE.match(rest)
    if guard:
        predicate, otherwise = guard.groups()
        rest = rest[guard.end() :]
    arguments = _split(rest.lstrip(", "))
    if address:
        arguments.insert(0, address)
    labels = []
    for position, argument in enumerate(arguments):
        label, separator, value = argument.partition("=")
        labels.append(label if separator else "")
        arguments[position] = (value if separator else argument).strip()
    negated = predicate is not None and predicate.startswith("!")
    return Operation(
        name=name,
        result=result,
        predicate=predicate.lstrip("!") if predicate else None,
        negated=negated,
        otherwise=otherwise,
        arguments=tuple(arguments),
        labels=tuple(labels) if any(labels) else (),
        target=target,
    )


def _keep_label(comment: re.Match[str]) -> str:
    label = _LABEL.fullmatch(comment.group(1))
    if label:
        return f"{label.group(1)}="
    mode = _MODE.fullmatch(comment.group(1))
    return f", {mode.group(1)}" if mode else ""


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]
