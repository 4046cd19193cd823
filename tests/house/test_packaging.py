"""A wheel, a wheel built from the source archive, and an editable install all work alike."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.house.documents import ROOT

PROBE = """
import json
from pathlib import Path
import kdagen

package = Path(kdagen.__file__).parent
data = {
    str(path.relative_to(package)): path.read_bytes().hex()
    for folder in ("_templates", "_tuning_db")
    for path in sorted((package / folder).rglob("*"))
    if path.is_file()
}
print(json.dumps({"package": str(package), "data": data}))
"""

SHAPE = ["--shapes", "examples/shapes.yaml", "--shape", "train-fixed"]
RENDER = ["render", "--chip", "v6e", *SHAPE, "--default"]


def run(*command: str | Path) -> str:
    """Run a command away from this source tree's PYTHONPATH and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(outdir: Path, *options: str) -> Path:
    """Build into outdir, without a network, and return the wheel."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", outdir, *options, ".")
    (wheel,) = outdir.glob("*.whl")
    return wheel


def tracked(*folders: str) -> list[str]:
    """Return the paths that git tracks, in these folders or anywhere."""
    command = ["git", "ls-files", "-z", *folders]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listing.split("\0") if name]


def data_files() -> dict[str, bytes]:
    """Return the tracked templates and tables by the path that the package has them under."""
    return {f"_{name}": (ROOT / name).read_bytes() for name in tracked("templates", "tuning_db")}


class Environment:
    """A new virtual environment that sees this one's packages, but not its kdagen."""

    def __init__(self, path: Path, *requirement: str | Path) -> None:
        venv.create(path, symlinks=True)
        self.python = path / "bin/python"
        self.script = path / "bin/kdagen"
        site = run(
            self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
        ).strip()
        # Files that only extend sys.path are not followed from here, so an editable kdagen of
        # this environment stays out of sight.
        Path(site, "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(
            *(sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet"),
            *("--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"),
            *requirement,
        )

    def probe(self) -> tuple[Path, dict[str, bytes]]:
        """Return where the package lies and its data files."""
        found = json.loads(run(self.python, "-P", "-c", PROBE))
        data = {name: bytes.fromhex(content) for name, content in found["data"].items()}
        return Path(found["package"]), data


@pytest.fixture(scope="module")
def direct_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("direct"), "--wheel")


@pytest.fixture(scope="module")
def archive_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("archive"))


@pytest.fixture(scope="module")
def wheel_environment(direct_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("installed"), direct_wheel)


@pytest.fixture(scope="module")
def editable_environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("editable"), "--editable", ROOT)


def test_wheel_holds_the_templates_and_tables_as_files(direct_wheel: Path) -> None:
    expected = {f"kdagen/{name}": content for name, content in data_files().items()}
    assert any("_templates/" in name for name in expected)
    with zipfile.ZipFile(direct_wheel) as wheel:
        names = wheel.namelist()
        assert "kdagen/py.typed" in names
        assert any(name.endswith("licenses/LICENSE") for name in names)
        assert not [name for name in names if name.startswith(("tests/", "templates/"))]
        assert expected == {name: wheel.read(name) for name in expected if name in names}


def test_wheel_built_from_the_archive_is_the_same(direct_wheel: Path, archive_wheel: Path) -> None:
    with zipfile.ZipFile(direct_wheel) as direct, zipfile.ZipFile(archive_wheel) as indirect:
        assert {name: indirect.read(name) for name in indirect.namelist()} == {
            name: direct.read(name) for name in direct.namelist()
        }


def test_archive_holds_every_tracked_file(archive_wheel: Path) -> None:
    (archive,) = archive_wheel.parent.glob("*.tar.gz")
    root = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as contents:
        held = {
            str(Path(member.name).relative_to(root)): contents.extractfile(member).read()
            for member in contents
            if member.isfile()
        }
    files = [name for name in tracked() if not (ROOT / name).is_symlink()]
    assert sorted(set(files) - set(held)) == []
    assert not [name for name in files if (ROOT / name).read_bytes() != held[name]]


def test_archive_holds_no_link_that_leads_out_of_it(archive_wheel: Path) -> None:
    (archive,) = archive_wheel.parent.glob("*.tar.gz")
    with tarfile.open(archive) as contents:
        assert not [member.name for member in contents if member.issym() or member.islnk()]


def test_installed_wheel_has_the_data(wheel_environment: Environment) -> None:
    package, data = wheel_environment.probe()
    assert not package.is_relative_to(ROOT)
    assert data == data_files()


def test_editable_install_reads_the_source_tree(editable_environment: Environment) -> None:
    package, data = editable_environment.probe()
    assert package == ROOT / "kdagen"
    assert data_files().items() <= data.items()


def test_both_installs_generate_the_same_kernel(
    wheel_environment: Environment, editable_environment: Environment
) -> None:
    source = run(wheel_environment.script, *RENDER)
    assert "\ndef forward(" in source
    assert source == run(editable_environment.script, *RENDER)
