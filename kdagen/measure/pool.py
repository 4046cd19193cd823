"""Worker processes that outlive their jobs but not their accidents.

A worker that dies, exceeds its memory or does not answer in time costs the job it had; a new one
takes its place when the next job comes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdagen.errors import KdagenError

_START_SECONDS = 120.0
_MEMORY_POLL_SECONDS = 0.5


class PoolError(KdagenError):
    """A worker that does not even start: nothing a candidate could be blamed for."""


@dataclass(frozen=True)
class Outcome:
    """The end of one job.

    Attributes:
      job: what ``submit`` was given.
      value: the task's value; None where the job came to nothing.
      status: "ok", or what happened: the status that the task gave, "died" or "hung".
      reason: one line; empty for "ok".
      seconds: from the submission to the end.
    """

    job: Hashable
    value: dict[str, Any] | None
    status: str
    reason: str
    seconds: float


class _Worker:
    """One child process and the job it has."""

    def __init__(self, environment: Callable[[Path], Mapping[str, str]]) -> None:
        self._environment = environment
        self.directory = Path(tempfile.mkdtemp(prefix="kdagen-worker-"))
        self.process: subprocess.Popen[bytes] | None = None
        self.job: Hashable | None = None
        self.busy = False
        self.started = self.deadline = 0.0
        self._ready = False
        self._buffer = b""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def start(self) -> None:
        dumps = self.directory / "dumps"
        dumps.mkdir(exist_ok=True)
        self._ready, self._buffer = False, b""
        with (self.directory / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kdagen.measure.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(self._environment(dumps)),
                # Ctrl-C at the terminal is for the parent, who ends its workers in order.
                start_new_session=True,
            )

    def submit(self, job: Hashable, request: Mapping[str, Any], timeout: float) -> None:
        if self.process is not None and self.process.poll() is not None:
            self.end()
        if self.process is None:
            self.start()
        assert self.process is not None and self.process.stdin is not None
        self.job, self.busy = job, True
        self.started = time.monotonic()
        self.deadline = self.started + timeout + (0.0 if self._ready else _START_SECONDS)
        # One that dies just now is seen by wait(), as the end of its output.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> dict[str, Any] | None:
        """A reply if a whole one is there. Called when the output can be read.

        Raises:
          EOFError: the process has closed its output, which is its end.
        """
        assert self.process is not None and self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            raise EOFError
        self._buffer += data
        while b"\n" in self._buffer:
            line, self._buffer = self._buffer.split(b"\n", 1)
            reply = json.loads(line)
            if "ready" not in reply:
                return reply
            self._ready = True
        return None

    def memory_bytes(self) -> int:
        """Resident memory of the process; 0 where the system does not tell."""
        try:
            pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def end(self) -> str:
        """Kill the process if it still runs; how it ended, in words."""
        process, self.process = self.process, None
        if process is None:
            return "was not running"
        if process.poll() is None:
            process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        said = (self.directory / "stderr").read_bytes()[-4000:].decode("utf-8", "replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return f"{how}: {lines[-1][:200]}" if lines else how

    def has_started(self) -> bool:
        return self._ready


class Pool:
    """Up to ``workers`` jobs at a time, each in a process of its own. A context manager.

    Args:
      workers: how many processes.
      environment: given a worker's directory for compiler dumps, the environment of its process.
      memory_bytes: resident memory above which a worker is ended; None is this machine's memory,
        less a fifth, divided by the workers.
    """

    def __init__(
        self,
        workers: int,
        environment: Callable[[Path], Mapping[str, str]],
        memory_bytes: int | None = None,
    ) -> None:
        self._workers = [_Worker(environment) for _ in range(workers)]
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._memory_bytes = memory_bytes or int(0.8 * total / workers)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def idle(self) -> int:
        """Workers without a job."""
        return sum(not w.busy for w in self._workers)

    @property
    def busy(self) -> int:
        """Workers with a job."""
        return len(self._workers) - self.idle

    def submit(self, job: Hashable, request: Mapping[str, Any], timeout: float) -> None:
        """Give an idle worker a request; ``timeout`` seconds later the job counts as hung."""
        next(w for w in self._workers if not w.busy).submit(job, request, timeout)

    def pids(self) -> dict[Hashable, int]:
        """The process that has each job."""
        return {w.job: w.pid for w in self._workers if w.busy and w.pid is not None}

    def wait(self, seconds: float) -> list[Outcome]:
        """The jobs that end within ``seconds``; returns when the first has.

        Raises:
          PoolError: a worker ended before it had started.
        """
        end = time.monotonic() + seconds
        while True:
            busy = [w for w in self._workers if w.busy]
            remaining = end - time.monotonic()
            outcomes = self._collect(busy, min(max(remaining, 0.0), _MEMORY_POLL_SECONDS))
            if outcomes or not busy or remaining <= 0:
                return outcomes

    def _collect(self, busy: list[_Worker], seconds: float) -> list[Outcome]:
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                assert worker.process is not None and worker.process.stdout is not None
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            readable = {key.data for key, _ in selector.select(seconds)} if busy else set()
        outcomes = []
        for worker in busy:
            outcome = self._look_at(worker, worker in readable)
            if outcome is not None:
                worker.busy = False
                outcomes.append(outcome)
        return outcomes

    def _look_at(self, worker: _Worker, readable: bool) -> Outcome | None:
        now = time.monotonic()

        def ended(status: str, reason: str, value: dict[str, Any] | None = None) -> Outcome:
            return Outcome(worker.job, value, status, reason, now - worker.started)

        if readable:
            try:
                reply = worker.read()
            except EOFError:
                started, how = worker.has_started(), worker.end()
                if not started:
                    raise PoolError(f"a worker process did not start: {how}") from None
                return ended("died", f"its process ended by {how}")
            if reply is not None:
                if "value" in reply:
                    return ended("ok", "", reply["value"])
                return ended(reply["status"], reply["reason"])
        if now > worker.deadline:
            worker.end()
            return ended("hung", f"no answer within {now - worker.started:.0f} s")
        used = worker.memory_bytes()
        if used > self._memory_bytes:
            worker.end()
            gib = 1 << 30
            limit = self._memory_bytes / gib
            return ended("died", f"its process took {used / gib:.2f} GiB of memory of {limit:.2f}")
        return None

    def close(self) -> None:
        """End all workers, whatever they do, and remove what they left."""
        for worker in self._workers:
            worker.end()
            worker.busy = False
            shutil.rmtree(worker.directory, ignore_errors=True)
