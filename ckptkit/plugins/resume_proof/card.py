"""Write the card of a proof, to commit beside a recipe: command, versions, tolerance, checks."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ckptkit.plugins.resume_proof.runs import Runs
from ckptkit.trainers.table import TRAINERS
from ckptkit.training.smoke.run_check import Check
from ckptkit.version import __version__

_RESULTS = {True: "passed", False: "**failed**", None: "skipped"}


def write_card(path: Path, runs: Runs, checks: Sequence[Check]) -> None:
    """Write the card to a file of Markdown."""
    script, failed = runs.script, [check.name for check in checks if check.ok is False]
    verdict = f"failed: {', '.join(failed)}" if failed else "all checks passed"
    facts = [
        ("verdict", verdict),
        ("command", f"`{script.command}`"),
        *([("resume with", f"`{script.resume_with}`")] if script.resume_with else []),
        *([("ranks", str(runs.nproc))] if script.has_nproc_placeholder else []),
        ("steps", f"{script.steps}, saved every {script.save_every}"),
        ("tolerance", describe_tolerance(runs, checks)),
        ("versions", ", ".join(package_versions())),
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


def describe_tolerance(runs: Runs, checks: Sequence[Check]) -> str:
    """Return by how much resumed runs may differ, as far as it was measured."""
    if not any(check.name == "deterministic" and check.ok for check in checks):
        return "not measured"
    return (
        "none: bit for bit"
        if runs.control_tolerance.is_exact
        else f"4 x {runs.control_tolerance.largest:.2g} (relative)"
    )


def package_versions() -> list[str]:
    """Return ckptkit, Python and the installed packages of training, with their versions."""
    found = [f"ckptkit {__version__}", f"Python {platform.python_version()}"]
    for name in dict.fromkeys(("torch", *TRAINERS)):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # most environments have only some
            continue
    return found


def escape_table_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
