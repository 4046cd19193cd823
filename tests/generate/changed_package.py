"""Run in a copy of the package: what each change of one of its files does to an identity.

Prints a JSON object: per file, the variant id after a comment was added to it; the helpers that a
generated module loads; and what a template that names something undefined raises.
"""

import json
import sys
from pathlib import Path

import kdagen.generate
from kdagen.chips import get_chip
from kdagen.problem import Problem
from kdagen.variant import Variant

package = Path(kdagen.generate.__file__).parent
assert package.parent == Path(sys.argv[1])
problem = Problem(tokens=64, heads=2, gate="bounded", lower_bound=-5.0)


def identity() -> str:
    kdagen.generate.code_hash.cache_clear()
    return kdagen.generate.variant_id(problem, Variant(heads=2), get_chip("v6e"))


found = {"": identity()}
for path in [*package.rglob("*.py"), *package.rglob("*.j2")]:
    text = path.read_text()
    path.write_text(text + ("{# changed #}" if path.suffix == ".j2" else "# changed\n"))
    found[str(path.relative_to(package))] = identity()
    path.write_text(text)
assert identity() == found[""]

kdagen.generate.load(kdagen.generate.generate(problem, Variant(heads=2), get_chip("v6e")))
found["loaded"] = [
    str(Path(module.__file__).relative_to(package))
    for name, module in sys.modules.items()
    if name.startswith("kdagen.kernels")
]

template = package / "_templates" / "kda_forward.py.j2"
template.write_text(template.read_text() + "{{ p.depth_of_nothing }}")
try:
    kdagen.generate.generate(problem, Variant(heads=2), get_chip("v6e"))
except kdagen.generate.GenerateError as error:
    found["undefined"] = str(error)
print(json.dumps(found))
