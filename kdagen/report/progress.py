"""Progress of a tuning run: one line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kdagen.report import words
from kdagen.search.run import Progress, Run


class Printer:
    """Prints what ``kdagen.search.run.tune`` reports. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Printer:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, run: Run) -> None:
        """The searches are about to start."""
        for search in run.searches:
            known = f", {search.taken_over} candidates known from before"
            self._say(
                f"{search.name}: {words.problem(search.problem)}"
                + (known if search.taken_over else "")
            )
        for name, other in run.same.items():
            self._say(f"{name}: the same problem as {other}; it is tuned once, under that name")
        self._say(words.origin(run.source, run.environment, run.chip))

    def report(self, progress: Progress) -> None:
        """A job has ended."""
        line = _line(progress)
        if self._live is None:
            self._say(line)
            return
        self._live.update(Text(line, overflow="ellipsis", no_wrap=True))
        if progress.status != "ok":
            self._say(f"{progress.search.name}: {progress.status}: {progress.reason}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _line(progress: Progress) -> str:
    search, best = progress.search, progress.search.best
    what = "checked" if progress.job.task == "verify" else "tried"
    outcome = "" if progress.status == "ok" else f" ({progress.status}: {progress.reason})"
    parts = [f"[{progress.done}/{progress.total}] {search.name}: {what} a candidate{outcome}"]
    if best is not None:
        parts.append(f"best so far {words.seconds(best.seconds)} {words.kind(best.source)}")
        if search.default_result is not None:
            parts.append(f"{words.ratio(best, search.default_result)} against the default")
    if progress.seconds_left is not None:
        parts.append(f"about {words.duration(progress.seconds_left)} left")
    return ", ".join(parts)
