"""From a problem and a chip to the variant that runs: tuned, nearest, or default.

In this order:

1. a tuned row of the same key (`Problem.key`), made with today's generator, of the first table
   that has one;
2. the nearest row of the chip: the same key tuned with another generator, else the fewest facts
   that differ, heads and widths counted by their ratio;
3. `kdagen.space.default_variant`, of a training step the default backward and a forward that
   keeps what it reads (`kdagen.gradient.step.paired`).

A problem that is trained has rows of its own, whose variants are training steps. Those tuned for
"residuals: tuned" serve either policy, and those tuned for "save" a call that names none.

A row is used only if `check` finds it legal for this problem on this chip. Where
there are several of a key, measured goes before modelled, then the same JAX and libtpu, then the
nearest length and batch, then the later environment. Tables are the user's (`configure`,
$KDAGEN_DB or what `kdagen tune` wrote), then the packaged ones.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import jax

from kdagen.chips import CHIPS, Chip
from kdagen.errors import KdagenError
from kdagen.gradient.step import Step, check_any, paired
from kdagen.problem import TUNED, Problem, ProblemError, canonical_json
from kdagen.runtime.table import (
    Row,
    packaged_tables,
    read_parameters,
    read_problem,
    read_table,
    user_table,
)
from kdagen.runtime.target import NoKernelError, warn_once
from kdagen.space import default_variant
from kdagen.variant import Variant, VariantError, check


class UntunedError(KdagenError):
    """`strict` dispatch met a problem that no table has tuned."""


@dataclass(frozen=True)
class Settings:
    """What `configure` set: a table to look into first, and whether a miss is an error."""

    db: Path | None = None
    strict: bool = False


@dataclass(frozen=True)
class Choice:
    """A legal variant and how it was found.

    Attributes:
      variant: what to run; a `Step` where the problem is trained.
      origin: "tuned", "nearest" or "default".
      note: for the last two, what was missing and what was taken instead, in words.
      table: for the first, the file of the row.
    """

    variant: Variant | Step
    origin: str
    note: str = ""
    table: Path | None = None


_settings = Settings()


def configure(*, db: str | Path | None = None, strict: bool = False) -> None:
    """Sets where tuned variants come from; call it before tracing, and alike on every host.

    Args:
      db: a table that `kdagen tune` wrote, in place of $KDAGEN_DB and of the default one. It must
        exist when it is first needed. None goes back to those.
      strict: a problem without a tuned row raises UntunedError instead of running on the nearest
        or the default variant with a warning.
    """
    global _settings
    _settings = Settings(None if db is None else Path(db), bool(strict))
    find.cache_clear()
    read_table.cache_clear()


def choose(problem: Problem, chip: Chip) -> Choice:
    """The variant for a problem on a chip; anything but a tuned one is warned of once.

    Raises:
      NoKernelError: no variant is legal, so no kernel serves the problem.
      UntunedError: `strict`, and no tuned row.
      TableError: a table that was named is absent or unreadable.
    """
    choice = find(problem, chip, tables_in_use())
    if choice.origin != "tuned":
        message = f"{choice.note} To tune it: {tune_command(problem, chip, _settings.db)}"
        if _settings.strict:
            raise UntunedError(message)
        warn_once(message)
    return choice


def tables_in_use() -> tuple[Path, ...]:
    """The tables that are asked, in this order: the user's, then the packaged ones."""
    own = _settings.db or user_table()
    return (*([] if own is None else [own]), *packaged_tables())


def tune_command(problem: Problem, chip: Chip, db: Path | None = None) -> str:
    """A shell command that tunes exactly this problem, into the table `db` if there is one."""
    facts = {
        f.name: getattr(problem, f.name)
        for f in fields(problem)
        if getattr(problem, f.name) != f.default
    }
    for name, same in (("value_heads", "heads"), ("gate_dtype", "dtype"), ("beta_dtype", "dtype")):
        if facts.get(name) == getattr(problem, same):
            del facts[name]
    command = ["kdagen", "tune", "--chip", chip.name, "--problem", canonical_json(facts)]
    return shlex.join(command if db is None else [*command, "--db", str(db)])


@functools.lru_cache(maxsize=1024)
def find(problem: Problem, chip: Chip, tables: tuple[Path, ...]) -> Choice:
    """What `choose` chooses from these tables, without a word.

    Raises:
      NoKernelError: no variant is legal, so no kernel serves the problem.
      TableError: a table is absent or unreadable.
    """
    try:
        default = _default(problem, chip, tables)
    except VariantError as error:
        raise NoKernelError(str(error)) from error
    generator, keys = _generator(problem), _keys(problem)
    by_table = [_of_chip(path, chip) for path in tables]
    for path, table in zip(tables, by_table, strict=True):
        current = [row for row in table if row.generator == generator]
        for key in keys:
            same_key = [row for row in current if row.problem_key == key]
            if (found := _first_legal(_by_trust(same_key, problem), problem, chip)) is not None:
                return Choice(found[1], "tuned", table=path)
    rows = [row for table in by_table for row in table if _parsed(row) is not None]
    asked = f"kdagen: {problem.to_json()} is not tuned for {chip.name}"
    nearest = sorted(_by_trust(rows, problem), key=lambda row: _distance(row, problem))
    if (found := _first_legal(nearest, problem, chip)) is not None:
        row, variant = found
        if row.problem_key in keys:
            what = "a row tuned with another version of the kernels"
        else:
            what = f"the variant tuned for {row.problem}, which is legal here"
        note = f"{asked}; it runs on {what}."
        return Choice(variant, "nearest", note)
    return Choice(default, "default", f"{asked}; it runs on the default variant.")


def _default(problem: Problem, chip: Chip, tables: tuple[Path, ...]) -> Variant | Step:
    if not problem.trained:
        return default_variant(problem, chip)
    forward = find(replace(problem, residuals=None), chip, tables).variant
    assert isinstance(forward, Variant)
    return paired(problem, forward, (chip,))


def _generator(problem: Problem) -> str:
    """The hash of what generates the code of a problem today."""
    if problem.trained:
        from kdagen.gradient.source import step_hash

        return step_hash()
    from kdagen.generate import code_hash

    return code_hash()


def _keys(problem: Problem) -> list[str]:
    """Keys of the rows that are tuned for a problem, in the order in which they are taken."""
    keys = [problem.key()]
    if problem.trained:
        other = "save" if problem.residuals == TUNED else TUNED
        keys.append(replace(problem, residuals=other).key())
    return keys


def _of_chip(path: Path, chip: Chip) -> list[Row]:
    by_key = read_table(path, path in packaged_tables()).get(chip.name, {})
    return [row for rows in by_key.values() for row in rows]


def _by_trust(rows: Iterable[Row], problem: Problem) -> list[Row]:
    """Rows with the most trusted first."""
    versions = (jax.__version__, _libtpu_version())

    def doubt(row: Row) -> tuple[bool, bool, float, int]:
        size = _size_distance(row, problem)
        return (
            row.source != "hardware",
            (row.jax, row.libtpu) != versions,
            size,
            -row.environment_id,
        )

    return sorted(rows, key=doubt)


@functools.cache
def _libtpu_version() -> str:
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first_legal(
    rows: Iterable[Row], problem: Problem, chip: Chip
) -> tuple[Row, Variant | Step] | None:
    for row in rows:
        other = _parsed(row)
        if other is None or other.trained != problem.trained:
            continue
        try:
            variant = read_parameters(row.variant, other)
        except VariantError:
            continue  # of another version: a parameter has gone or come
        if isinstance(variant, Step):
            variant = _with_policy(variant, other, problem)
        if check_any(variant, problem, chip) is None:
            return row, variant
    return None


def _with_policy(step: Step, tuned: Problem, problem: Problem) -> Step:
    """A step tuned for another problem, with the policy that this one has: one that was chosen by
    tuning is kept where any will do."""
    if problem.residuals != TUNED:
        assert problem.residuals is not None
        return replace(step, residuals=problem.residuals)
    return step if tuned.residuals == TUNED else replace(step, residuals="save")


_SIZES = ("heads", "value_heads", "key_dim", "value_dim")


def _parsed(row: Row) -> Problem | None:
    try:
        return read_problem(row.problem)
    except ProblemError:
        return None  # of another version


def _ratio(a: int, b: int) -> float:
    return abs(math.log2(a / b))


def _size_distance(row: Row, problem: Problem) -> float:
    """How far length and batch are off; time per chunk hardly depends on them."""
    other = _parsed(row)
    if other is None:
        return math.inf
    return _ratio(other.tokens, problem.tokens) + _ratio(other.batch, problem.batch)


def _distance(row: Row, problem: Problem) -> tuple[float, float]:
    """How many facts differ between a row's problem and this one, and by which ratio the sizes."""
    other = _parsed(row)
    if other is None:
        return math.inf, math.inf
    aligned = {name: getattr(problem, name) for name in (*_SIZES, "tokens", "batch", "lower_bound")}
    try:
        theirs = json.loads(replace(other, **aligned).key())
    except ProblemError:  # a bound where that problem's gate has none
        theirs = json.loads(replace(other, **{**aligned, "lower_bound": other.lower_bound}).key())
    ours = json.loads(problem.key())
    differing = sum(ours[name] != theirs.get(name) for name in ours)
    sizes = sum(_ratio(getattr(other, name), getattr(problem, name)) for name in _SIZES)
    return differing, sizes


def portable_choice(problem: Problem) -> tuple[Choice, Chip]:
    """A default variant that is legal on every chip, and the chip whose default it is.

    Raises:
      NoKernelError: there is none.
    """
    reasons = []
    for chip in sorted(CHIPS.values(), key=lambda chip: chip.default_vmem_limit_bytes):
        try:
            variant = default_variant(problem, chip)
        except VariantError as error:
            reasons.append(str(error))
            continue
        broken = next((v for c in CHIPS.values() if (v := check(variant, problem, c))), None)
        if broken is None:
            return Choice(variant, "default"), chip
        reasons.append(str(broken))
    raise NoKernelError(f"no variant is legal on every chip: {reasons[0]}")
