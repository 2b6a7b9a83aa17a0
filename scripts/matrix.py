"""Try the wheel of HEAD with each Python and torch: `scripts/matrix` prints a table, `--write` puts it into a page.

Each pair gets an environment of its own, where the repository is not, and gives its room back. By default the oldest
Python is tried with each minor version of torch, and every other with the oldest and the newest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from scripts.markdown import ROOT, paragraph, table, write_part

PAGE = ROOT / "CONTRIBUTING.md"
PART = "matrix"
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 10)
TESTS = ("tests/formats/dcp", "tests/formats/pt")
NEEDED = ("accelerate", "hypothesis", "pytest", "zstandard")

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A Python, by its full version, and a torch."""

    python: str
    torch: str


def main() -> None:
    """Parse the command line, try each pair, and show or write what came of them. Exits with 1 if one failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is cleared away
    parser = argparse.ArgumentParser(prog="scripts/matrix", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", action="append", help="only this version of pyenv, as 3.12.1; several times")
    parser.add_argument("--torch", action="append", help="only this version, as 2.10.0; several times")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)} after each pair")
    options = parser.parse_args()
    results: dict[Pair, str] = {}
    with tempfile.TemporaryDirectory(prefix="matrix-") as home:
        wheel, suite = prepare(Path(home))
        for pair in choose(options.python, options.torch):
            results[pair] = attempt(pair, wheel, suite, Path(home, "pair"))
            print(f"Python {pair.python}, torch {pair.torch}: {results[pair]}", file=sys.stderr)
            if options.write:
                write_part(PAGE, PART, describe(results))
    if not options.write:
        print(describe(results))
    sys.exit(any(result != "passed" for result in results.values()))


def choose(pythons: Sequence[str] | None, torches: Sequence[str] | None) -> Iterator[Pair]:
    """Yield the pairs to try: those asked for, or some of what pyenv and the package index have."""
    if torches:
        yield from map(Pair, *zip(*product(pythons or installed_pythons(), torches), strict=True))
        return
    for number, python in enumerate(pythons or installed_pythons()):
        found = published_torches(python)
        yield from (Pair(python, torch) for torch in (found if number == 0 else [found[0], found[-1]]))


def parsed(version: str) -> Version:
    """Return a version as numbers: (3, 12, 1)."""
    return tuple(map(int, version.split(".")))


def newest_of_each_minor(versions: Sequence[str], oldest: Version) -> list[str]:
    """Return the newest release of each minor version that is not older than `oldest`, in order."""
    releases = [parsed(version) for version in versions if re.fullmatch(r"\d+\.\d+\.\d+", version)]
    newest = {release[:2]: release for release in sorted(releases) if release >= oldest}
    return [".".join(map(str, release)) for release in newest.values()]


def pyenv() -> Path:
    """Return the directory in which pyenv keeps its versions."""
    return Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"


def installed_pythons() -> list[str]:
    """Return the newest version of each Python that pyenv has."""
    return newest_of_each_minor([path.name for path in pyenv().iterdir()], OLDEST_PYTHON)


def published_torches(python: str) -> list[str]:
    """Return the newest release of each minor version of torch that pip finds for a Python."""
    command: list[str | Path] = [pyenv() / python / "bin" / "python", "-m", "pip", "index", "versions", "torch"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return newest_of_each_minor(re.findall(r"[\d.]+\d", said.partition("Available versions:")[2]), OLDEST_TORCH)


def prepare(home: Path) -> tuple[Path, Path]:
    """Build the wheel of HEAD, and lay out its tests without its package. Returns both."""
    archive, source, suite = home / "source.zip", home / "source", home / "suite"
    subprocess.run(["git", "archive", "--output", archive, "HEAD"], cwd=ROOT, check=True)
    shutil.unpack_archive(archive, source)
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        home,
        source,
    ]
    subprocess.run(command, check=True)
    suite.mkdir()
    for name in ("tests", "scripts", "pyproject.toml"):  # some tests use the scripts
        shutil.move(source / name, suite / name)
    (wheel,) = home.glob("*.whl")
    return wheel, suite


def attempt(pair: Pair, wheel: Path, suite: Path, home: Path) -> str:
    """Install the wheel in an environment of its own and use it. Returns `passed`, or the step that failed."""
    work = home / "work"
    work.mkdir(parents=True)
    python = home / "venv" / "bin" / "python"
    tests = [suite / one for one in TESTS]
    steps: list[tuple[str, Path, list[str | Path]]] = [
        ("install", work, [pyenv() / pair.python / "bin" / "python", "-m", "venv", home / "venv"]),
        ("install", work, [python, "-m", "pip", "install", "--quiet", f"torch=={pair.torch}", wheel, *NEEDED]),
        ("first commands", work, [ROOT / "scripts" / "first"]),
        ("tests", suite, [python, "-m", "pytest", "-q", *tests]),
    ]
    try:
        failed = next((name for name, cwd, command in steps if not succeeds(command, python.parent, cwd)), None)
    finally:
        shutil.rmtree(home)
    return f"failed: {failed}" if failed else "passed"


def succeeds(command: Sequence[str | Path], programs: Path, cwd: Path) -> bool:
    """Run a command with the programs of an environment, and show what it prints if it fails."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    return done.returncode == 0


def describe(results: dict[Pair, str]) -> str:
    """Return the table of what was tried, in Markdown."""
    pythons = sorted({pair.python for pair in results}, key=parsed)
    torches = sorted({pair.torch for pair in results}, key=parsed)
    rows = [[python, *(results.get(Pair(python, torch), "not tried") for torch in torches)] for python in pythons]
    tests = ", ".join(f"`{test}`" for test in TESTS)
    head = f"""Tried on {datetime.now(UTC):%Y-%m-%d} without a GPU. Each environment has the wheel, torch, what both
        require, and {", ".join(NEEDED)}. The README's first commands ran in it, then {tests}."""
    return f"{paragraph(head)}\n{table([['Python', *(f'torch {torch}' for torch in torches)], *rows])}"


if __name__ == "__main__":
    main()
