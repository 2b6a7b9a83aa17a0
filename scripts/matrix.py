"""Run the tests of scripts/check with each Python and torch, and with the oldest and the newest packages.

Each case gets its own environment, which is deleted before the next one is made. The oldest Python runs with every
minor version of torch, the others with the oldest and the newest. Two more cases have the oldest and the newest version
of every direct dependency. `--write` updates the rows in CONTRIBUTING.md.
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
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts.markdown import ROOT, paragraph, read_part, table, write_part

PAGE = ROOT / "CONTRIBUTING.md"
PART = "matrix"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
TESTED, OLDEST, NEWEST = "tested", "oldest", "newest"  # what other packages a case has
VERSIONS = "import platform, importlib.metadata as m; print(platform.python_version(), m.version('torch'))"

Ended = subprocess.CompletedProcess[str]


@dataclass(frozen=True, slots=True)
class Case:
    """Minor versions of Python and torch, such as 3.11 and 2.10, and how the other packages are chosen."""

    python: str
    torch: str
    packages: str


Row = list[str]  # versions of Python and torch, packages, result, date


def main() -> None:
    """Parse the command line, try each case, and show or write the table. Exits with 1 if a case failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is deleted
    parser = argparse.ArgumentParser(prog="scripts/matrix", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", action="append", help="only this minor version, such as 3.12; repeatable")
    parser.add_argument("--torch", action="append", help="only this minor version, such as 2.10; repeatable")
    parser.add_argument("--packages", action="append", choices=(TESTED, OLDEST, NEWEST), help="only these; repeatable")
    parser.add_argument("--write", action="store_true", help=f"update {PAGE.relative_to(ROOT)} after each case")
    options = parser.parse_args()
    every = cases()
    chosen = [
        case
        for case in every
        if case.python in (options.python or [case.python])
        and case.torch in (options.torch or [case.torch])
        and case.packages in (options.packages or [case.packages])
    ]
    rows: dict[Case, Row] = {}
    with tempfile.TemporaryDirectory(prefix="matrix-") as home:
        source, without_torch = prepare(Path(home))
        for case in chosen:
            rows[case] = attempt(case, source, without_torch, Path(home, "case"))
            print(*rows[case], sep=", ", file=sys.stderr)
            if options.write:
                write_part(PAGE, PART, describe(known_rows(every) | {case: rows[case]}, every))
    if not options.write:
        print(describe(rows, chosen))
    sys.exit(any("failed" in rows[case][3] for case in chosen))


def cases() -> list[Case]:
    """Return all cases, for the Pythons of pyproject.toml's classifiers and the published versions of torch."""
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    (first,) = re.findall(r'"torch>=2\.(\d+)"', project)
    torches = [f"2.{minor}" for minor in published_torches() if minor >= int(first)]
    pairs = [(pythons[0], torch) for torch in torches]
    pairs += [(python, torch) for python in pythons[1:] for torch in (torches[0], torches[-1])]
    tested = [Case(*pair, TESTED) for pair in pairs]
    return [*tested, Case(pythons[0], torches[0], OLDEST), Case(pythons[-1], torches[-1], NEWEST)]


def published_torches() -> list[int]:
    """Return the minor versions of torch 2 that pip finds, in order."""
    found = run(sys.executable, "-m", "pip", "index", "versions", "torch").stdout
    return sorted({int(minor) for minor in re.findall(r"\b2\.(\d+)\.\d+", found)})


def prepare(home: Path) -> tuple[Path, Path]:
    """Return a clone of HEAD, and the Python of an environment that the README's command made without torch."""
    source, environment = home / "source", home / "without-torch"
    run("git", "clone", "--quiet", "--shared", ROOT, source).check_returncode()
    run("uv", "venv", "--quiet", "--no-project", "--seed", environment).check_returncode()
    (command,) = re.findall(r"pip install .* && pip install --no-deps .*", (ROOT / "README.md").read_text())
    run("bash", "-c", command, cwd=source, env=activated(environment)).check_returncode()
    return source, environment / "bin" / "python"


def attempt(case: Case, source: Path, without_torch: Path, home: Path) -> Row:
    """Return the row of a case. Makes its environment, and runs the README's first commands and the tests there."""
    environment, work = home / "environment", home / "work"
    work.mkdir(parents=True)
    found = [case.python, case.torch]
    try:
        if install(case, source, environment).returncode:
            result = "failed: install"
        else:
            env = {**activated(environment), "CKPTKIT_WITHOUT_TORCH": str(without_torch)}
            found = run("python", "-c", VERSIONS, env=env).stdout.split()[-2:]
            first = run(ROOT / "scripts" / "first", cwd=work, env=env)
            suites = ("check_suite", f"suite -m 'slow and not nightly' --skip-missing {' '.join(slow_tests())}")
            ends = [run("bash", "-c", f"source scripts/suite; {suite}", cwd=source, env=env) for suite in suites]
            result = "failed: the README's first commands" if first.returncode else counted(ends)
    finally:
        shutil.rmtree(home)
    return [*found, case.packages, result, f"{datetime.now(UTC):%Y-%m-%d}"]


def slow_tests() -> list[str]:
    """Return the tests where versions differ most: saving in ranks, the Hub, and private names of other libraries."""
    of_private_names = re.findall(r"\| `(tests/[\w/.]+)` \|$", PAGE.read_text(), re.MULTILINE)
    return sorted({"tests/plugins/hub", "tests/test_without_torch.py", "tests/training/saving", *of_private_names})


def install(case: Case, source: Path, environment: Path) -> Ended:
    """Install ckptkit and what scripts/check needs into a new environment."""
    asked: list[str | Path] = ["--editable", f"{source}[check]"]
    if case.packages == TESTED:
        tested = environment.parent / "constraints.txt"
        tested.write_text(
            "".join(line for line in CONSTRAINTS.read_text().splitlines(True) if not line.startswith("torch=="))
        )
        asked += [f"torch=={case.torch}.*", "--constraint", tested]
    if case.packages == OLDEST:
        asked += ["--resolution", "lowest-direct"]
    run("uv", "venv", "--quiet", "--no-project", "--seed", "--python", case.python, environment).check_returncode()
    return run("uv", "pip", "install", "--quiet", "--python", environment / "bin" / "python", *asked)


def activated(environment: Path) -> dict[str, str]:
    """Return the variables of a shell in which an environment is active."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**env, "PATH": f"{environment / 'bin'}{os.pathsep}{env['PATH']}"}


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command to its end, and pass on what it prints. Ends what it started if we are interrupted."""
    settings: dict[str, Any] = {"cwd": cwd, "env": env, "text": True, "start_new_session": True}
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings) as process:
        try:
            for line in process.stdout or ():
                print(line, end="", file=sys.stderr, flush=True)
                lines.append(line)
            process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return Ended(command, process.returncode, "".join(lines))


def counted(ends: Sequence[Ended]) -> str:
    """Return how many tests passed, failed and were skipped, from the last lines of pytest."""
    total: Counter[str] = Counter()
    for ended in ends:
        last = [line for line in ended.stdout.splitlines() if re.search(r" in [\d.]+s", line)][-1:]
        for number, outcome in re.findall(r"(\d+) (failed|error|passed|skipped)", "".join(last)):
            total[outcome] += int(number)
    counts = ", ".join(
        f"{total[outcome]:,} {outcome}" for outcome in ("failed", "error", "passed", "skipped") if total[outcome]
    )
    return counts if not any(ended.returncode for ended in ends) else f"failed: {counts or 'pytest'}"


def known_rows(every: Sequence[Case]) -> dict[Case, Row]:
    """Return the rows of the page by their cases."""
    part = read_part(PAGE, PART)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| 3.")
    ]
    known = {(minor(row[0]), minor(row[1]), row[2]): row for row in rows}
    return {case: known[key] for case in every if (key := (case.python, case.torch, case.packages)) in known}


def minor(version: str) -> str:
    """Return `3.11` of `3.11.7`."""
    return ".".join(version.split(".")[:2])


def describe(rows: Mapping[Case, Row], every: Sequence[Case]) -> str:
    """Return the table in Markdown; a case without a row was not run."""
    text = f"""Each environment ran the README's first commands, the tests of `scripts/check`, and the slow tests of
        saving and of [private names](#private-names-of-other-libraries), without a GPU. The other packages are those of
        `scripts/constraints.txt` ({TESTED}), or the oldest or newest version of every direct dependency that
        `pyproject.toml` allows. The tests without torch ran in an environment made by the README's command."""
    body = [rows.get(case, [case.python, case.torch, case.packages, "not run", ""]) for case in every]
    return f"{paragraph(text)}\n{table([['Python', 'torch', 'other packages', 'result', 'date'], *body])}"


if __name__ == "__main__":
    main()
