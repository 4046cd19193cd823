"""The child process that handles candidates, one at a time.

libtpu can abort the process, a compile can hang or take all memory: here that costs one candidate.
The parent (``kdagen.measure.pool``) writes a request as a line of JSON to standard input and reads
the reply as a line of JSON; data goes over the pipes and never code.

    -> {"task": "offline", ...arguments of that task...}
    <- {"value": {...}}   or   {"status": "vmem", "reason": "..."}

The first line it writes is {"ready": true}.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from kdagen.measure.rejected import Rejected

# Imported when first asked for: what a task needs takes seconds to import.
TASKS = {
    "offline": ("kdagen.measure.offline", "run"),
    "verify": ("kdagen.measure.verify", "run"),
    "hardware": ("kdagen.measure.hardware", "run"),
    "paired": ("kdagen.measure.hardware", "run_paired"),
}
# Of a problem that is trained, whose variants are steps.
STEP_TASKS = {
    "offline": ("kdagen.measure.steps", "run"),
    "verify": ("kdagen.measure.verify_steps", "run"),
    "hardware": ("kdagen.measure.hardware", "run_step"),
    "paired": ("kdagen.measure.hardware", "run_steps_paired"),
}


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Run the request's task; what it returned, or why the candidate came to nothing."""
    arguments = dict(request)
    tasks = STEP_TASKS if _of_steps(arguments) else TASKS
    module, function = tasks[arguments.pop("task")]
    run: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), function)
    try:
        return {"value": run(**arguments)}
    except Rejected as error:
        return {"status": error.status, "reason": error.reason}
    except Exception as error:
        # Whatever a candidate raises is that candidate's result; the search goes on.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return {"status": "compile_failed", "reason": reason}


def _of_steps(arguments: dict[str, Any]) -> bool:
    """Whether the variants are training steps: those of a trained problem, but where a forward that
    keeps residuals is asked for by itself."""
    variant = arguments.get("variant")
    if isinstance(variant, dict):
        return "backward" in variant
    return bool(arguments["problem"].get("residuals"))


def main() -> None:
    """Answer requests until standard input ends."""
    replies = _take_standard_output()
    _be_the_first_to_go()
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    _write(replies, {"ready": True})
    while True:
        _write(replies, handle(json.loads(requests.get())))


def _read_requests(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    # The parent is gone. A compile in the main thread would go on for nobody.
    os._exit(0)


def _take_standard_output() -> TextIO:
    # Libraries print to descriptor 1; the replies get one that nobody else knows.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _be_the_first_to_go() -> None:
    # Where memory runs out the kernel should end this process and not the parent.
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:
        pass


def _write(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
