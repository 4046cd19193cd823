#!/usr/bin/env python3
"""Print the path of the newest Python on this machine, of version 3.12 or above.

Looks at the pythonX.Y commands on PATH and at pyenv's versions. Exits with status 1, and says why
on standard error, where there is none. Standard library only: any Python 3 runs it.
"""

import glob
import os
import re
import subprocess
import sys

OLDEST = (3, 12)

# A usable interpreter is a release that can make a virtual environment with pip in it.
PROBE = """
import ensurepip, sys, venv
if sys.version_info.releaselevel != "final":
    raise SystemExit(1)
print(*sys.version_info[:3])
"""


def candidates():
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield from glob.glob(os.path.join(glob.escape(folder), "python3*"))
    pyenv_root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    yield from glob.glob(os.path.join(glob.escape(pyenv_root), "versions", "*", "bin", "python3*"))


def version_of(path):
    """Return the version of the interpreter at path as three integers, or None."""
    try:
        result = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # pyenv's stand-ins for versions that are not selected exit with an error.
    return tuple(map(int, result.stdout.split())) if result.returncode == 0 else None


def versions():
    """Return the version of every interpreter by its path."""
    paths = [path for path in candidates() if re.search(r"python3(\.\d+)?$", path)]
    found = {path: version_of(path) for path in dict.fromkeys(paths)}
    return {path: version for path, version in found.items() if version}


def newest(found):
    """Return the path of the newest of these versions that is new enough, or None."""
    usable = [path for path, version in found.items() if version >= OLDEST]
    return max(usable, key=lambda path: found[path], default=None)


def main():
    found = versions()
    path = newest(found)
    if path is None:
        known = sorted({".".join(map(str, version)) for version in found.values()})
        wanted = ".".join(map(str, OLDEST))
        sys.exit(
            f"No Python {wanted} or newer on PATH or among pyenv's versions; "
            f"found: {', '.join(known) or 'none'}."
        )
    print(path)


if __name__ == "__main__":
    main()
