"""From a problem and a variant to the source of a kernel, and to a module Python can import.

A template selects and binds; the logic is in ``kdagen.kernels``, which the generated module
imports. So the identity of a variant covers its parameters, the facts it is specialised on, the
templates and the helpers: when any of them changes, so does the id, and what was measured before no
longer counts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import linecache
import os
import re
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kdagen.chips import Chip
from kdagen.errors import KdagenError
from kdagen.kernels.numerics import LOG_DECAY_FLOOR, TOKEN_FLOOR
from kdagen.kernels.tiling import LANES
from kdagen.problem import Problem, canonical_json
from kdagen.variant import MIB, Variant

TEMPLATE = "kda_forward.py.j2"
SPECIALISED = (
    "dtype", "gate", "gate_dtype", "qk_l2norm", "initial_state", "final_state", "layout",
    "key_dim",
)  # fmt: skip
"""Facts of a problem that its generated code depends on; the others are the call's shapes."""

_PACKAGE = Path(__file__).parent
_TEMPLATES = _PACKAGE / "_templates"


class GenerateError(KdagenError):
    """A template that does not render, or a generated module that does not import."""


@dataclass(frozen=True)
class Generated:
    """A kernel as source.

    Attributes:
      source: text of a Python module with a function ``forward``.
      variant_id: sha256, hex, of all that the source depends on.
      module_name: name under which ``load`` imports it.
    """

    source: str
    variant_id: str
    module_name: str


def variant_id(problem: Problem, variant: Variant, chip: Chip) -> str:
    """sha256, hex, of parameters, specialised facts, chip, templates and helpers."""
    return hashlib.sha256(
        canonical_json(
            {
                "chip": chip.name,
                "code": code_hash(),
                "parameters": variant.to_dict(),
                "problem": facts(problem),
            }
        ).encode()
    ).hexdigest()


@functools.cache
def code_hash(template: str = TEMPLATE) -> str:
    """sha256, hex, of a template, what it includes, and every helper that its modules reach."""
    digest = hashlib.sha256()
    # plans and constants are bound into the source
    always = {_PACKAGE / name for name in _BOUND}
    for path in sorted(always | _reached(_TEMPLATES / template)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


_BOUND = ("emission.py", "kernels/__init__.py", "kernels/numerics.py")
_INCLUDES = re.compile(r'{% *-? *(?:from|include|extends|import) "([^"]+)"')
_IMPORTS = re.compile(r"from kdagen\.kernels(?:\.(\w+))? import (\([^)]*\)|[^\n]*)")


def _reached(start: Path) -> set[Path]:
    """A template or module and all that it includes or imports from the helpers, and so on."""
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        text = path.read_text(encoding="utf-8")
        waiting += [_TEMPLATES / name for name in _INCLUDES.findall(text)]
        for module, names in _IMPORTS.findall(text):
            modules = [module] if module else re.findall(r"\w+", names)
            waiting += [_PACKAGE / "kernels" / f"{name}.py" for name in modules]
    return found


def generate(problem: Problem, variant: Variant, chip: Chip) -> Generated:
    """Renders the kernel of a variant; whether it is legal ``kdagen.variant.check`` says.

    Raises:
      GenerateError: the template does not render.
    """
    import jinja2

    identity = variant_id(problem, variant, chip)
    raw_gate = problem.gate != "log_decay"
    short = identity[:12]
    try:
        source = (
            _environment()
            .get_template(TEMPLATE)
            .render(
                template=TEMPLATE,
                code_hash=code_hash(),
                variant_id=identity,
                chip=chip.name,
                problem=facts(problem),
                parameters=variant.to_dict(),
                again=_again(problem, variant, chip),
                p=variant,
                plan=variant.plan(),
                raw_gate=raw_gate,
                per_pack=LANES // variant.chunk,
                floor=TOKEN_FLOOR if variant.decay == "unbounded" else LOG_DECAY_FLOOR,
                exact=problem.exact,
                packed=problem.packed,
                segment_states=problem.segment_states,
                wide_inverse=variant.inverse_dtype == "float32",
                vmem_limit_bytes=variant.vmem_limit_mib * MIB or None,
                kernel_name=f"kda_forward_{short}",
            )
        )
    except jinja2.TemplateError as error:
        raise GenerateError(f"template {TEMPLATE}: {error}") from error
    return Generated(source, identity, f"kda_forward_{identity}")


# Threads may trace the same kernel at once, and a module is listed before it has run.
_LOADING = threading.Lock()


def load(generated: Generated) -> ModuleType:
    """Imports a generated module, from a file under ``cache_directory`` where one can be written.

    On a read-only disk the source is compiled from memory; tracebacks show its lines either way.

    Raises:
      GenerateError: the module does not import.
    """
    name = f"kdagen_generated.{generated.module_name}"
    with _LOADING:
        return sys.modules.get(name) or _loaded(generated, name)


def _loaded(generated: Generated, name: str) -> ModuleType:
    try:
        path = _written(generated)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        run = functools.partial(spec.loader.exec_module, module)
    except OSError:
        module = ModuleType(name)
        run = functools.partial(_run_from_memory, generated, module)
    sys.modules[name] = module
    try:
        run()
    except Exception as error:
        del sys.modules[name]
        raise GenerateError(
            f"generated module {generated.module_name} does not import: {error}"
        ) from error
    return module


def _run_from_memory(generated: Generated, module: ModuleType) -> None:
    filename = f"<kdagen {generated.module_name}>"
    lines = generated.source.splitlines(keepends=True)
    linecache.cache[filename] = (len(generated.source), None, lines, filename)
    module.__file__ = filename
    exec(compile(generated.source, filename, "exec"), module.__dict__)


def cache_directory() -> Path:
    """Where generated modules are kept: $KDAGEN_CACHE, else kdagen's folder in the user's cache."""
    chosen = os.environ.get("KDAGEN_CACHE")
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("kdagen"))


def _written(generated: Generated) -> Path:
    folder = cache_directory() / "generated"
    path = folder / f"{generated.module_name}.py"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.read_text(encoding="utf-8") == generated.source:
            return path
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(generated.source)
        os.replace(temporary, path)  # readers see the old file or the new one, never half of it
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def facts(problem: Problem, specialised: tuple[str, ...] = SPECIALISED) -> dict[str, Any]:
    """What generated code depends on, in the words of a problem.

    Beside the facts ``specialised``, two that most problems lack: that there are segments, whatever
    they are, and that products of bfloat16 operands are asked to be of float32 ("high" is told by
    the parameters alone).
    """
    fields = problem.to_dict()
    found = {name: fields[name] for name in specialised}
    if problem.packed:
        found["segments"] = 1
    if problem.precision == "highest":
        found["precision"] = problem.precision
    return found


def _again(problem: Problem, variant: Variant, chip: Chip) -> str:
    """The command that prints this source: any problem of the same facts gives it."""
    asked = {**facts(problem), "heads": variant.heads, "tokens": variant.chunk}
    if problem.gate == "bounded":
        asked["lower_bound"] = -5.0  # the bound is an operand of the call
    if variant.rows > 1:
        asked["batch"] = variant.rows
    if variant.states != "none":
        asked["residuals"] = "save"
    return (
        f"kdagen render --chip {chip.name} --problem '{canonical_json(asked)}' "
        f"--variant '{variant.to_json()}'"
    )


@functools.cache
def _environment():
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["literal"] = _literal
    return environment


def _literal(value: Any) -> str:
    """Python source of a constant; anything but plain numbers, strings and tuples is refused."""
    allowed = value is None or isinstance(value, (bool, int, float, str))
    if isinstance(value, tuple):
        allowed = all(_literal(v) for v in value)
    if not allowed:
        raise GenerateError(
            f"a template binds {value!r}; it may bind numbers, strings and tuples of them"
        )
    return repr(value)
