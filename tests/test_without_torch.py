"""Without torch: with only the packages of the README's command, the commands write the same files and lines.

The environment consists of links to packages of this one. If `CKPTKIT_WITHOUT_TORCH` names the Python of a real
environment, as `scripts/matrix` makes it, the tests use that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import producers
from tests.command import ckptkit
from tests.conftest import Produce
from tests.directories import files_in

ROOT = Path(__file__).parents[1]

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# As a job in CI types them, in a directory with a run of two checkpoints. Later commands read what earlier ones wrote.
COMMANDS = (
    "inspect run",
    "verify run",
    "doctor run/ckpt-2",
    "manifest run/ckpt-2",
    "ls run --json",  # without it, the age
    "consolidate run/ckpt-2 model --dtype bfloat16 --quiet",
    "convert run/ckpt-2 state.pt --to pt --quiet",
    "convert model again --to dcp --quiet",
    "reshard run/ckpt-2 --to 2 --quiet",
    "diff run/ckpt-2 model",
    "diff again state.pt",
    "cp run/ckpt-2 copied --quiet",
    "prune run --keep-last 1 --yes",
)


def packages() -> list[str]:
    """The packages that the README installs where torch is not."""
    (line,) = re.findall(r"pip install (.*) && pip install --no-deps", (ROOT / "README.md").read_text())
    return line.split()


def with_requirements(names: list[str]) -> Iterator[str]:
    """These packages and all that they require, as pip finds them."""
    seen: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name not in seen:
            seen.add(name)
            yield name
            required = map(Requirement, distribution(name).requires or ())
            names += [one.name for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run Python in an environment without torch."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    start = [environment.pop("CKPTKIT_WITHOUT_TORCH", "")]
    environment.pop("PYTHONPATH", None)
    if not start[0]:
        room = tmp_path_factory.mktemp("packages")
        link_packages(room)
        start, environment["PYTHONPATH"] = [sys.executable, "-S"], str(room)  # -S: without site-packages

    def run_there(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        command = [*start, *arguments]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)

    return run_there


def link_packages(room: Path) -> None:
    """Link ckptkit and the packages that the README's command installs into a directory."""
    (room / "ckptkit").symlink_to(ROOT / "ckptkit")
    for name in with_requirements(packages()):
        package = distribution(name)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            (room / top).symlink_to(Path(str(package.locate_file(top))))


def test_the_readme_names_every_dependency_but_torch() -> None:
    required = map(Requirement, distribution("ckptkit-fsdp").requires or ())
    direct = {canonicalize_name(one.name) for one in required if "extra" not in str(one.marker)}
    assert set(packages()) == direct - {"torch"}


def test_there_is_no_torch(run: Run, tmp_path: Path) -> None:
    found = run("-c", "from importlib.util import find_spec; print(find_spec('torch'))", cwd=tmp_path)
    assert found.stdout == "None\n", found.stderr


@pytest.mark.slow
def test_the_same_without_torch(run: Run, produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.fsdp2).root

    def outcome(start: Run) -> tuple[list[tuple[str, int, str]], dict[str, bytes]]:
        """Exit codes and lines of all commands, and the files afterwards; each time in the same directory."""
        place = tmp_path / "place"
        for step in (1, 2):
            shutil.copytree(source, place / "run" / f"ckpt-{step}")
        done = [(command, start(*command.split(), cwd=place)) for command in COMMANDS]
        files = files_in(place)
        shutil.rmtree(place)
        return [(command, ended.returncode, ended.stdout) for command, ended in done], files

    theirs, ours = outcome(partial(run, "-m", "ckptkit")), outcome(ckptkit)
    assert theirs[0] == ours[0]
    assert theirs[1] == ours[1]


@pytest.mark.parametrize(
    "line", ["from ckptkit.storage import Reader", "import ckptkit.storage", "from ckptkit import Run"]
)
def test_python_says_that_torch_is_missing(run: Run, tmp_path: Path, line: str) -> None:
    done = run("-c", line, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last == "ModuleNotFoundError: torch is not installed (hint: run `pip install torch`)"


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("train run --nproc 1 --steps 1", 2, "error: torch is not installed\nhint: run `pip install torch`\n"),
        ("smoke", 2, "error: torch is not installed\nhint: run `pip install torch`\n"),
        ("prove out --against run", 3, "error: prove runs models with transformers, which is not installed\n"),
    ],
)
def test_what_needs_torch_says_so(run: Run, tmp_path: Path, command: str, code: int, said: str) -> None:
    done = run("-m", "ckptkit", *command.split(), cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 2
    assert not list(tmp_path.iterdir())
