"""Errors of many calls as tables: on the terminal, and as a page of the documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, NamedTuple

from kdagen.measure import accuracy, kinds


class Row(NamedTuple):
    """The error of one tensor on one kind of data, and its bound.

    ``how`` is what else the kernel is told, ``asked`` whether it has to be within the bound.
    """

    implementation: str
    tensor: str
    dtype: str
    gate: str
    gate_kind: str
    keys: str
    chunk: int
    width: str
    how: str
    error: float
    bound: float
    asked: bool

    @property
    def outside(self) -> bool:
        return not self.error <= self.bound if self.asked else not isfinite(self.error)


def worst(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[Row]:
    """Of the rows with one key the one nearest to its bound, or beyond it."""
    chosen: dict[Any, Row] = {}
    for row in rows:
        at = key(row)
        if at not in chosen or row.error / row.bound > chosen[at].error / chosen[at].bound:
            chosen[at] = row
    return [chosen[at] for at in sorted(chosen)]


HEADING = (
    f"{'':3}{'implementation':15}{'tensor':17}{'dtype':10}{'gate':11}{'kind of gate':24}"
    f"{'keys':22}{'chunk':>5} {'K x V':>8}  {'error':>8} {'bound':>8} {'share':>6}  how"
)


def line(row: Row) -> str:
    """A line of the table on the terminal, marked where it is outside."""
    bound = f"{row.bound:.1e}" if row.asked else "finite"
    share = f"{row.error / row.bound:.0%}" if row.asked else "-"
    return (
        f"{'!! ' if row.outside else '':3}{row.implementation:15}{row.tensor:17}{row.dtype:10}"
        f"{row.gate:11}{row.gate_kind:24}{row.keys:22}{row.chunk:5} {row.width:>8}  "
        f"{row.error:8.1e} {bound:>8} {share:>6}  {row.how}"
    )


# The columns of the bounds.
GROUPS = {
    "output, state": accuracy.OUTPUTS,
    "dq dk dv dh0": accuracy.INPUTS,
    "dgate dbeta": accuracy.GATES,
    "da_log ddelta_time_bias": accuracy.PARAMETERS,
}


def markdown(rows: list[Row]) -> str:
    """One table: the worst over tensors, chunks, widths and lengths for every kind of data."""
    lines = [
        "| implementation | dtype | gate | kind of gate | keys | " + " | ".join(GROUPS) + " |",
        "|---" * (5 + len(GROUPS)) + "|",
    ]
    asked = [row for row in rows if row.asked]
    key = lambda row: (row.implementation, row.dtype, row.gate, row.gate_kind, row.keys)  # noqa: E731
    order = {x: i for gate in kinds.GATES.values() for i, x in enumerate(gate)}
    found: dict[Any, dict[str, str]] = {}
    for group, names in GROUPS.items():
        for row in worst((row for row in asked if row.tensor in names), key):
            found.setdefault(key(row), {})[group] = f"{row.error:.1e} of {row.bound:.1e}"
    rank = lambda at: (*at[:3], order.get(at[3], 99), -len(at[3]), at[3:])  # noqa: E731
    for at in sorted(found, key=rank):
        cells = [found[at].get(group, "") for group in GROUPS]
        lines.append("| " + " | ".join([*at, *cells]) + " |")
    return "\n".join(lines) + "\n"


_PAGE = """# Accuracy

`make accuracy ACCURACY_ARGS="--out docs/accuracy.md"` writes this page, on any machine. It runs
every implementation, the generated kernels in Pallas' interpreter, and compares the results with
the token recurrence in NumPy float64 on the same rounded inputs. An error is
rms(x - reference) / rms(reference); a NaN or an infinity anywhere counts as infinite.

A line of the table is one kind of data. Beside every error stands the bound that it has to keep; it
is the one nearest to its bound of the tensors that the column names, over chunks of 32, 64 and 128
tokens, all factorisations of the decay, widths from 1 to 256, lengths from 1 to 4096, grouped value
heads and both layouts. Gradients of the kernels are those of random cotangents under both residual
policies. Columns are empty where a call has no such gradient.

Gates: a number is the log decay of every token and channel. `resets` forget everything in a tenth
of the tokens, `entry resets` in a tenth of the entries; `mixed` has every strength from hardly any
to -20 in neighbouring channels, and resets; `above 0` holds values above 0, which count as 0. Of
the raw gates, `saturated` has an `a_log` of 88 to 100, and in `vanishing` a softplus below the
smallest normal float32 meets an `a_log` of 88.

Keys: `parallel` are one direction with noise of 0.05 in every direction of unit variance, and
`repeated` are three distinct ones, both written with a beta from 0.9 to 1; for bfloat16 kernels
their lines are those under `jax.default_matmul_precision("high")`. `beta to 2` draws beta from 1
to 2. `leak` has values 1000 times larger before a reset, and its error is that after it.

"""


def page(rows: list[Row]) -> str:
    """A page of the documents: what the errors are, and the table."""
    return _PAGE + markdown(rows)
