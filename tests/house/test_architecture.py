"""Who may import whom, read from the source of every module of the package."""

import ast
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What each part of the package may import of the others; everything may import errors. A part is
# a module or a folder directly below kdagen/.
DESCRIPTION = {"problem", "chips", "variant", "space"}
TUNING = {"measure", "search", "store", "report"}
MAY_IMPORT = {
    "errors": set(),
    "chips": set(),
    "problem": set(),
    "emission": {"problem", "chips", "kernels"},
    "schedulers": {"kernels"},
    "variant": {"problem", "chips", "emission", "schedulers", "kernels"},
    "space": {"problem", "chips", "variant", "kernels"},
    "generate": DESCRIPTION | {"emission", "kernels"},
    "gradient": DESCRIPTION | {"emission", "generate", "kernels"},
    "kernels": set(),
    "reference": set(),
    "compiler": DESCRIPTION | {"generate"},
    "measure": DESCRIPTION | {"generate", "gradient", "compiler", "kernels", "reference"} | TUNING,
    # What the runtime reads and chooses, they show and check.
    "search": DESCRIPTION | {"generate", "gradient", "compiler", "runtime"} | TUNING,
    "store": DESCRIPTION | {"generate", "gradient", "compiler", "runtime"} | TUNING,
    "report": DESCRIPTION | {"generate", "gradient", "compiler", "runtime"} | TUNING,
    "cli": DESCRIPTION | {"generate", "compiler"} | TUNING,
    "runtime": DESCRIPTION | {"generate", "gradient", "reference"},
}

# The one part that may use a package; a training process loads none of these.
ONLY_USER = {"optuna": {"search"}, "sqlite_utils": {"store"}, "click": {"cli"}}
PLAIN_JAX = {"jax", "jaxlib", "numpy"}

# Where the name to import is not the name to install.
DISTRIBUTION = {"yaml": "pyyaml", "sqlite_utils": "sqlite-utils"}

Imports = dict[str, set[str]]


def imported_names(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Yield the absolute dotted name of everything that a module's source imports, anywhere."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                above = parents[: len(parents) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def read_package(root: Path) -> Imports:
    """Return what each module under root/kdagen imports, by the module's dotted name."""
    imports = {}
    for path in sorted((root / "kdagen").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        imports[module] = set(imported_names(path.read_text(), module, is_package))
    return imports


def part_of(name: str) -> str | None:
    """Return the part of the package that a dotted name belongs to, or None."""
    first, *rest = name.split(".")
    return rest[0] if first == "kdagen" and rest else None


def layer_violations(imports: Imports) -> list[str]:
    found = []
    for module, names in imports.items():
        part = part_of(module)
        if part is None:
            found += [f"{module} imports {name}" for name in names if name.startswith("kdagen")]
            continue
        allowed = MAY_IMPORT[part] | {part, "errors"}
        found += [
            f"{module} imports {name}" for name in names if (part_of(name) or part) not in allowed
        ]
    return sorted(found)


def outside_violations(imports: Imports) -> list[str]:
    found = []
    for module, names in imports.items():
        part = part_of(module)
        for name in names:
            package = name.partition(".")[0]
            if package in sys.stdlib_module_names or package == "kdagen":
                continue
            users = ONLY_USER.get(package)
            if users is not None and part not in users:
                found.append(f"{module} imports {name}")
            if part in ("kernels", "reference") and package not in PLAIN_JAX:
                found.append(f"{module} imports {name}")
    return sorted(found)


@pytest.fixture(scope="module")
def package() -> Imports:
    return read_package(ROOT)


def test_every_part_has_a_rule_and_every_rule_a_part(package: Imports) -> None:
    assert {part for module in package if (part := part_of(module))} == set(MAY_IMPORT)
    assert {part for parts in MAY_IMPORT.values() for part in parts} <= set(MAY_IMPORT)


def test_parts_import_only_what_lies_below(package: Imports) -> None:
    assert not layer_violations(package)


def test_parts_do_not_import_each_other_in_a_circle(package: Imports) -> None:
    graph: dict[str, set[str]] = {}
    for module, names in package.items():
        part = part_of(module)
        if part:
            others = {other for name in names if (other := part_of(name)) and other != part}
            graph.setdefault(part, set()).update(others)
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_packages_from_outside_stay_in_their_part(package: Imports) -> None:
    assert not outside_violations(package)


def outside_packages(imports: Imports) -> set[str]:
    """Return the names to install of all packages from outside that are imported."""
    packages = {name.partition(".")[0] for names in imports.values() for name in names}
    packages -= sys.stdlib_module_names | {"kdagen"}
    return {DISTRIBUTION.get(package, package) for package in packages}


def declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0].lower() for requirement in requirements}


def test_dependencies_are_those_that_are_imported(package: Imports) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = declared(project["dependencies"])
    # libtpu is asked for its version, and comes with the extra that compiles for a TPU. jaxlib
    # is named beside jax because the two must agree.
    assert outside_packages(package) - {"libtpu"} == required


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("runtime/kda.py", "from kdagen.store import tuned"),
        ("runtime/kda.py", "def late():\n    import kdagen.measure.worker"),
        ("runtime/kda.py", "from ..search.study import run"),
        ("kernels/gates.py", "import kdagen.chips"),
        ("variant.py", "from kdagen import generate"),
        ("variant.py", "from . import generate"),
        ("compiler/aot.py", "from kdagen.store.tuned import Row"),
    ],
)
def test_an_import_from_above_is_found(tmp_path: Path, module: str, source: str) -> None:
    path = tmp_path / "kdagen" / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source + "\n")
    assert layer_violations(read_package(tmp_path))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("runtime/table.py", "import sqlite_utils"),
        ("runtime/kda.py", "def late():\n    from optuna import create_study"),
        ("report/tables.py", "import click"),
        ("kernels/gates.py", "from jinja2 import Template"),
    ],
)
def test_a_package_in_the_wrong_part_is_found(tmp_path: Path, module: str, source: str) -> None:
    path = tmp_path / "kdagen" / module
    path.parent.mkdir(parents=True)
    path.write_text(source + "\n")
    assert outside_violations(read_package(tmp_path))
