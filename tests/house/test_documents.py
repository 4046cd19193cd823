"""Every command explains itself, and the documents speak of what exists."""

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kdagen.cli import main
from kdagen.problem import load_shapes
from tests.house.documents import DOCUMENTS, ROOT, shell_lines


def examples(command: click.Command) -> list[str]:
    """Return the command lines that a command's help gives."""
    return re.findall(r"^\s*(?:\$ )?(kdagen .+)$", command.help or "", flags=re.MULTILINE)


def parse(line: str) -> None:
    """Parse a command line as kdagen would, without running it."""
    program, name, *arguments = shlex.split(line)
    assert program == "kdagen"
    assert name in main.commands, f"no command {name}: {line}"
    main.commands[name].make_context(name, arguments)


def test_the_commands_are_those_of_the_guide() -> None:
    guide = (ROOT / "docs/user-guide.md").read_text()
    described = set(re.findall(r"^### `kdagen ([\w-]+)`$", guide, flags=re.MULTILINE))
    assert described == set(main.commands)


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_has_help_with_an_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = main.commands[name]
    shown = CliRunner().invoke(main, [name, "--help"])
    assert shown.exit_code == 0
    lines = examples(command)
    assert any(line.split()[1] == name for line in lines)
    for line in lines:
        assert line in shown.output, "click wrapped the example; mark its paragraph"
        parse(line)
    undocumented = [
        parameter.name
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.help
    ]
    assert not undocumented


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_documents_parse(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = [line for line in shell_lines((ROOT / document).read_text()) if "kdagen " in line]
    for line in lines:
        parse(line.removeprefix(".venv/bin/"))


def test_shapes_in_the_guide_are_problems(tmp_path: Path) -> None:
    guide = (ROOT / "docs/user-guide.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", guide, flags=re.MULTILINE | re.DOTALL)
    path = tmp_path / "shapes.yaml"
    path.write_text(block)
    assert load_shapes(path)


def test_a_command_that_does_not_exist_is_found() -> None:
    with pytest.raises(AssertionError, match="no command"):
        parse("kdagen bake --chip v6e")
    with pytest.raises(click.UsageError):
        parse("kdagen tune --no-such-option")
