"""Prove that a training script resumes: make every check in order, and write a card of the proof.

The card is for a recipe: command, versions, tolerance, checks.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ckptkit.errors import Unsupported
from ckptkit.plugins.resume_proof.checks import CHECKS, NEEDED
from ckptkit.plugins.resume_proof.options import ScriptOptions
from ckptkit.plugins.resume_proof.others import last_checks
from ckptkit.plugins.resume_proof.restored import restored_checks
from ckptkit.plugins.resume_proof.runs import COPIES, LOGS, RUNS, Runs
from ckptkit.trainers.table import TRAINERS
from ckptkit.training.smoke.run_check import Check, CheckSkipped, run_check
from ckptkit.version import __version__

_RESULTS = {True: "passed", False: "**failed**", None: "skipped"}


def prove_script(
    script: ScriptOptions, run: Path, out: Path, nproc: int, report: Callable[[Check], None] = lambda _: None
) -> list[Check]:
    """Return the checks of a script, each reported when it is done.

    `run` gets the logs and the card `resume.md`, `out` the export.
    """
    remove_directories(run, RUNS, COPIES, LOGS)  # what an earlier proof has kept would be taken for new checkpoints
    runs = Runs(script, run, out, nproc)
    checks: list[Check] = []

    def make(name: str, look: Callable[[Runs], str]) -> bool:
        def look_or_skip() -> str:
            try:
                return look(runs)
            except Unsupported as error:  # no fault of the script, unless nothing else can be checked without it
                if name in NEEDED:
                    raise
                raise CheckSkipped(f"ckptkit cannot check it: {error.line}") from None

        checks.append(run_check(name, look_or_skip))
        report(checks[-1])
        return checks[-1].ok is not False or name not in NEEDED

    try:
        if all(make(name, look) for name, look in CHECKS.items()):
            for name, look in {**restored_checks(runs), **last_checks(runs)}.items():
                make(name, look)
    finally:
        if not script.keep:
            remove_directories(run, RUNS, COPIES)
    write_card(run / "resume.md", runs, checks)
    return checks


def remove_directories(root: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(root / name, ignore_errors=True)


def write_card(path: Path, runs: Runs, checks: Sequence[Check]) -> None:
    script, failed = runs.script, [check.name for check in checks if check.ok is False]
    verdict = f"failed: {', '.join(failed)}" if failed else "all checks passed"
    if not any(check.name == "deterministic" and check.ok for check in checks):
        tolerance = "not measured"
    elif runs.control_tolerance.is_exact:
        tolerance = "none: bit for bit"
    else:
        tolerance = f"4 x {runs.control_tolerance.largest:.2g} (relative)"
    versions = [f"ckptkit {__version__}", f"Python {platform.python_version()}"]
    for name in dict.fromkeys(("torch", *TRAINERS)):
        with suppress(PackageNotFoundError):  # most environments have only some
            versions.append(f"{name} {version(name)}")
    facts = [
        ("verdict", verdict),
        ("command", f"`{script.command}`"),
        *([("resume with", f"`{script.resume_with}`")] if script.resume_with else []),
        *([("ranks", str(runs.nproc))] if script.has_nproc_placeholder else []),
        ("steps", f"{script.steps}, saved every {script.save_every}"),
        ("tolerance", tolerance),
        ("versions", ", ".join(versions)),
    ]
    lines = [
        "# Resume proof",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {escape_table_cell(text)} |" for name, text in facts),
        "",
    ]
    lines += ["| check | result | seconds | detail |", "|---|---|---|---|"]
    lines += [
        f"| {one.name} | {_RESULTS[one.ok]} | {one.seconds:.1f} | {escape_table_cell(one.detail)} |" for one in checks
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def escape_table_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
