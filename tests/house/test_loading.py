"""What importing a module loads, and what a generated module may import."""

import os
import re
import subprocess
import sys

from tests.house.documents import ROOT, python_blocks


def loaded_by(statement: str) -> set[str]:
    """Return the names of the modules that a new interpreter holds after a statement."""
    code = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(result.stdout.split())


def test_importing_the_chips_loads_no_jax() -> None:
    assert "jax" not in loaded_by("import kdagen.chips")


def test_importing_the_operator_loads_no_tuner_and_no_pallas() -> None:
    modules = loaded_by("import kdagen.runtime.kda")
    assert "jax" in modules
    unwanted = re.compile(
        r"optuna|sqlite_utils|click|rich|yaml|jinja2|jax\.experimental\.pallas"
        r"|jax\._src\.pallas|kdagen\.(?:kernels|search|measure|compiler|store|report|cli)"
    )
    assert not [name for name in modules if unwanted.match(name)]


def test_templates_import_only_jax_and_the_kernel_helpers() -> None:
    imports = {
        (path.name, match.group(1))
        for path in (ROOT / "templates").rglob("*")
        if path.is_file()
        for match in re.finditer(r"^(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE)
    }
    assert any(name.startswith("kdagen.kernels") for _, name in imports)
    allowed = re.compile(r"jax(?:\.|$)|kdagen\.kernels(?:\.|$)|(?:functools|math|typing)$")
    assert not [found for found in imports if not allowed.match(found[1])]


def test_readme_example_runs() -> None:
    (example,) = python_blocks((ROOT / "README.md").read_text())
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    result = subprocess.run(
        [sys.executable, "-c", example],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
