"""How the comparisons find an interpreter and what they install; nothing is installed here."""

import argparse
import importlib.util
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("peer", ROOT / "benchmarks" / "peer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interpreter(directory, name, version):
    """A program that answers as a Python of that version would."""
    path = directory / name
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def machine(tmp_path, monkeypatch, peer):
    """A machine whose only Pythons are those put into the directory given back."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(peer.sys, "executable", interpreter(tmp_path, "running", "3 11"))
    return tmp_path


def test_a_new_enough_python_on_the_path_is_found(machine, peer):
    interpreter(machine, "python3", "3 10")
    interpreter(machine, "python3.12", "3 12 7")
    wanted = interpreter(machine, "python3.13", "3 13 0")
    assert peer.find_python() == wanted


def test_the_running_python_goes_first_if_it_is_new_enough(machine, peer):
    interpreter(machine, "python3.14", "3 14")
    own = interpreter(machine, "running", "3 12")
    assert peer.find_python() == own


def test_pyenv_is_searched(machine, peer):
    directory = machine / "pyenv" / "versions" / "3.12.1" / "bin"
    directory.mkdir(parents=True)
    wanted = interpreter(directory, "python3.12", "3 12")
    assert peer.find_python() == wanted


def test_without_one_the_comparison_says_so_and_fails(machine, peer, capsys):
    interpreter(machine, "python3", "3 11")
    assert peer.run("calibrate.py", argparse.Namespace(python=None), []) == 2
    assert "Python 3.12 or newer and none was found" in capsys.readouterr().err
    assert not (machine / "cache").exists()


def test_kdagens_own_requirements_are_installed(peer):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert peer._own_requirements() == project["dependencies"]
