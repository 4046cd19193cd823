"""The project's documents, and the commands that they give."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/user-guide.md")


def shell_lines(text: str) -> list[str]:
    """Return the command lines of the ``sh`` blocks of a Markdown text, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = (line.split(" #")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def python_blocks(text: str) -> list[str]:
    """Return the ``python`` blocks of a Markdown text."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
