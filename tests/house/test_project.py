"""What the project's own files promise: commands, changelog, and what must not be said."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.house.documents import DOCUMENTS, ROOT, shell_lines

MACHINE_PATH = re.compile(r"(?<![\w.}-])/(?:work|root|farm|Users)/")
REGISTRY_HOST = re.compile(
    "|".join(
        rf"\b{name}\.{domain}\b"
        for name, domain in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("npmjs", "(?:org|com)"),
            ("debian", "org"),
            ("crates", "io"),
        )
    )
)


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    paths = (ROOT / name for name in listing.split("\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize(
    ("forbidden", "example"),
    [
        pytest.param(MACHINE_PATH, "/" + "root/kdagen", id="machine-path"),
        pytest.param(REGISTRY_HOST, "https://pypi" + ".org/simple", id="registry-host"),
    ],
)
def test_no_tracked_file_holds(forbidden: re.Pattern[str], example: str) -> None:
    assert forbidden.search(example)
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {m.group()}" for m in forbidden.finditer(text)]
    assert not found


def test_readme_tunes_and_tests_by_make() -> None:
    commands = shell_lines((ROOT / "README.md").read_text())
    assert commands[:2] == ["make tune", "make test"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_commands_in_documents_exist(document: str) -> None:
    commands = [
        line for line in shell_lines((ROOT / document).read_text()) if line.startswith("make ")
    ]
    assert commands
    for command in commands:
        _, *arguments = command.split()
        result = subprocess.run(
            ["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, f"{document}: {command}: {result.stderr}"
        assert "Nothing to be done" not in result.stdout, f"{document}: {command} does nothing"


def test_continuous_integration_runs_the_test_command() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert "make test" in lines
    assert "make lint" in lines


def test_changelog_has_entries_under_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    _, separator, rest = text.partition("\n## [Unreleased]\n")
    assert separator
    assert re.search(r"^- \S", rest.split("\n## ")[0], flags=re.MULTILINE)


def test_version_is_semantic_and_wheel_is_typed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert "Typing :: Typed" in project["classifiers"]
    assert (ROOT / "kdagen/py.typed").is_file()
