"""What `import kdagen.runtime.kda` adds to `import jax`: the median of five processes each.

    python benchmarks/import_time.py

Prints milliseconds and exits with 1 if the difference is over the limit of 50.
"""

import statistics
import subprocess
import sys

LIMIT_MS = 50
PROCESSES = 5

# Measured inside the process, after JAX: its own start and JAX's import vary by more than the rest.
_PROGRAM = """
import time
import jax
start = time.perf_counter()
import kdagen.runtime.kda
print(1e3 * (time.perf_counter() - start))
"""


def measure() -> list[float]:
    """Milliseconds that the import adds, one number a process."""
    run = [sys.executable, "-c", _PROGRAM]
    done = (
        subprocess.run(run, check=True, capture_output=True, text=True) for _ in range(PROCESSES)
    )
    return [float(process.stdout) for process in done]


def main() -> int:
    """Runs the benchmark; its exit code."""
    times = measure()
    median = statistics.median(times)
    print(f"import kdagen.runtime.kda adds {median:.1f} ms to import jax "
          f"(of {', '.join(f'{t:.1f}' for t in times)}; limit {LIMIT_MS})")  # fmt: skip
    return int(median > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
