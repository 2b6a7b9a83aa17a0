"""Prove a training script: make every check in order, and write the card."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ckptkit.errors import Unsupported
from ckptkit.plugins.resume_proof.card import write_card
from ckptkit.plugins.resume_proof.checks import CHECKS, NEEDED
from ckptkit.plugins.resume_proof.options import ScriptOptions
from ckptkit.plugins.resume_proof.others import last_checks
from ckptkit.plugins.resume_proof.restored import restored_checks
from ckptkit.plugins.resume_proof.runs import COPIES, LOGS, RUNS, Runs
from ckptkit.training.smoke.run_check import Check, CheckSkipped, run_check


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
        checks.append(run_check(name, partial(look if name in NEEDED else skipping_unsupported(look), runs)))
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


def skipping_unsupported(check: Callable[[Runs], str]) -> Callable[[Runs], str]:
    """Return a check that is skipped where ckptkit does not support what the script saves: that is no fault of it."""

    def excused(runs: Runs) -> str:
        try:
            return check(runs)
        except Unsupported as error:
            raise CheckSkipped(f"ckptkit cannot check it: {error.line}") from None

    return excused


def remove_directories(root: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(root / name, ignore_errors=True)
