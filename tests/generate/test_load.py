"""Importing what was generated: from the cache where it can be written, from memory elsewhere."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from kdagen.chips import get_chip
from kdagen.generate import Generated, GenerateError, cache_directory, generate, load
from kdagen.problem import Problem
from kdagen.variant import Variant

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "kdagen"
PROBLEM = Problem(tokens=64, heads=2, gate="bounded", lower_bound=-5.0)


@pytest.fixture
def made(monkeypatch):
    """A generated module that nothing has imported, whatever ran before."""
    generated = generate(PROBLEM, Variant(heads=2, lag=3), get_chip("v6e"))
    monkeypatch.delitem(sys.modules, f"kdagen_generated.{generated.module_name}", raising=False)
    yield generated
    sys.modules.pop(f"kdagen_generated.{generated.module_name}", None)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KDAGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def unwritable(tmp_path, monkeypatch):
    """A cache below something that is no folder: not even the superuser can write there."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KDAGEN_CACHE", str(tmp_path / "file" / "cache"))


def forget(generated: Generated) -> None:
    del sys.modules[f"kdagen_generated.{generated.module_name}"]


def assert_works(module, generated: Generated) -> None:
    assert generated.variant_id == module.VARIANT_ID
    with pytest.raises(AttributeError) as caught:
        module.forward(*[None] * 10, scale=1.0, lower_bound=-5.0)
    shown = "".join(traceback.format_exception(caught.value))
    assert "return fused.call(" in shown, "the traceback shows the generated line"
    assert module.__file__ in shown


def test_a_module_is_written_once_and_imported_from_there(made, cache):
    module = load(made)
    path = cache / "generated" / f"{made.module_name}.py"
    assert module.__file__ == str(path)
    assert path.read_text(encoding="utf-8") == made.source
    assert_works(module, made)
    assert load(made) is module
    before = path.stat()
    forget(made)
    assert load(made) is not module
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [p.name for p in path.parent.glob("*") if p.is_file()] == [path.name]


@pytest.mark.parametrize("stale", [b"half of a mod", b"\xff\xfe not text"])
def test_what_stands_there_is_replaced_whole(made, cache, stale):
    path = cache / "generated" / f"{made.module_name}.py"
    path.parent.mkdir(parents=True)
    path.write_bytes(stale)
    with path.open("rb") as reader:
        assert_works(load(made), made)
        # who had it open still reads the old file, not one that grows under its hands
        assert reader.read() == stale
    assert path.read_text(encoding="utf-8") == made.source


def test_a_failed_write_leaves_nothing_behind(made, cache, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    assert_works(load(made), made)
    assert list((cache / "generated").iterdir()) == []


def test_where_nothing_can_be_written_it_is_imported_from_memory(made, unwritable):
    module = load(made)
    assert not Path(module.__file__).exists()
    assert_works(module, made)
    assert load(made) is module


def test_many_processes_load_at_once(made, cache):
    program = (
        "import json, sys; from kdagen.generate import Generated, load;"
        "made = Generated(*json.load(sys.stdin)); print(load(made).VARIANT_ID)"
    )
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for child in children:
        child.stdin.write(json.dumps(dataclasses.astuple(made)))
        child.stdin.close()
    assert [child.stdout.read().strip() for child in children] == [made.variant_id] * 3
    assert [child.wait() for child in children] == [0] * 3
    assert [p.name for p in (cache / "generated").glob("*.tmp")] == []


@pytest.mark.parametrize("where", ["cache", "unwritable"])
@pytest.mark.parametrize("source", ["raise ValueError('no')\n", "def broken(:\n"])
def test_a_module_that_does_not_import_says_so(request, where, source):
    request.getfixturevalue(where)
    broken = Generated(source, "0" * 64, f"broken_{where}_{len(source)}")
    for _ in range(2):
        with pytest.raises(GenerateError, match=f"{broken.module_name} does not import"):
            load(broken)


def test_without_a_setting_the_cache_is_the_users(monkeypatch):
    monkeypatch.delenv("KDAGEN_CACHE", raising=False)
    assert cache_directory().name == "kdagen"
    monkeypatch.setenv("KDAGEN_CACHE", "elsewhere")
    assert cache_directory() == Path("elsewhere")


@pytest.fixture(scope="module")
def after_changes(tmp_path_factory):
    """What ``changed_package`` finds in a copy of the package."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, root / "kdagen", ignore=shutil.ignore_patterns("__pycache__"))
    child = subprocess.run(
        [sys.executable, str(HERE / "changed_package.py"), str(root)],
        env=os.environ | {"PYTHONPATH": str(root), "KDAGEN_CACHE": str(root / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_the_id_changes_with_the_template_and_every_helper_that_it_loads(after_changes):
    original, loaded = after_changes[""], set(after_changes["loaded"])
    ids = {name: found for name, found in after_changes.items() if name.endswith((".py", ".j2"))}
    changed = {name for name, found in ids.items() if found != original}
    assert len(loaded) > 8
    templates = {"_templates/kda_forward.py.j2", "_templates/_header.j2"}
    assert changed == loaded | templates | {"emission.py"}
    assert "_templates/kda_backward.py.j2" in ids


def test_an_undefined_name_in_a_template_is_an_error(after_changes):
    assert "depth_of_nothing" in after_changes["undefined"]


def test_threads_that_load_at_once_get_one_whole_module(cache):
    """Of 64, at least some of which would meet one that is half loaded."""
    threads = 8
    barrier = Barrier(threads)
    problems = (dataclasses.replace(PROBLEM, key_dim=64 + n) for n in range(64))
    all_made = [generate(one, Variant(heads=2, lag=4), get_chip("v6e")) for one in problems]

    def load_all(_):
        found = []
        for made in all_made:
            barrier.wait()
            module = load(made)
            found.append((module, hasattr(module, "forward")))
        return found

    try:
        with ThreadPoolExecutor(threads) as pool:
            first, *others = pool.map(load_all, range(threads))
    finally:
        for made in all_made:
            sys.modules.pop(f"kdagen_generated.{made.module_name}", None)
    assert all(whole for _, whole in first)
    assert all(found == first for found in others)
