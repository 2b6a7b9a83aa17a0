"""Another package adds a format, a trainer, a family and a store; pip installs it for real."""

from __future__ import annotations

import shutil
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent / "example"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("example") / "source", tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE, source)
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    subprocess.run(command, check=True)
    return target


def execute(*code: str, paths: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": ":".join(map(str, paths)), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *code], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "run.example"
    path.write_bytes(array("f", [1, 2, 3]).tobytes())
    return path


@pytest.mark.slow
def test_the_command_line_uses_what_a_package_adds(installed: Path, checkpoint: Path) -> None:
    url = f"example:/{checkpoint.parent}/{checkpoint.name}"
    seen = execute("-m", "ckptkit", "inspect", url, paths=(ROOT, installed))
    assert seen.returncode == 0, seen.stderr
    assert "example checkpoint" in seen.stdout
    assert "trainer: Example Trainer" in seen.stdout
    assert "3 parameters" in seen.stdout

    # two lines of the package are not usable
    said = " ".join(seen.stderr.split())
    assert "skipped ckptkit.formats `broken` of ckptkit-example 1.0: AttributeError" in said
    assert "skipped ckptkit.formats `dcp` of ckptkit-example 1.0: ValueError: the name `dcp` is already in use" in said


@pytest.mark.slow
def test_the_family_of_a_package_is_known(installed: Path) -> None:
    code = (
        "from ckptkit.models.names import families_with; print([f.name for f in families_with({'example.0.w': (3,)})])"
    )
    assert execute("-c", code, paths=(ROOT, installed)).stdout == "['example']\n"


def test_without_plugins_nothing_searches_for_them() -> None:
    code = "import sys; from ckptkit.formats import FORMATS; print(len(FORMATS), 'importlib.metadata' in sys.modules)"
    assert execute("-c", code, paths=(ROOT,)).stdout.split()[-1] == "False"


def test_without_the_package_its_files_are_not_read(checkpoint: Path) -> None:
    assert execute("-m", "ckptkit", "inspect", str(checkpoint), paths=(ROOT,)).returncode == 3
