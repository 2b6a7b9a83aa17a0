"""The right scripts pass, and every planted fault is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.training.smoke.run_check import Check
from tests.plugins.resume_proof.faults import FAULTS, FSDP2, IN_NUMPY, NUMPY, Fault

pytestmark = pytest.mark.slow


def prove(tmp_path: Path, script: Path) -> list[Check]:
    """Prove one of the two scripts, or a copy with a fault."""
    python = f"{sys.executable} {script}"
    options: dict[str, Any]
    if "torch" in script.read_text():
        line = f"{python} --run {{run}} --steps {{steps}} --save-every {{save_every}} --nproc {{nproc}}"
        options = {"loss": "loss ([0-9.]+)", "resume_with": "--resume {checkpoint}", "resume_nproc": 4}
    else:
        line = f"{python} {{run}} {{steps}} {{save_every}}"
        options = {"loss": "metrics.jsonl:loss", "nproc": 1}
    return ckptkit.smoke(tmp_path / "run", tmp_path / "out", command=line, **options)


@pytest.mark.parametrize("script", [NUMPY, pytest.param(FSDP2, marks=pytest.mark.nightly)])
def test_the_right_script_passes(tmp_path: Path, script: Path) -> None:
    checks = {check.name: check for check in prove(tmp_path, script)}
    assert not [check for check in checks.values() if check.ok is False]
    assert "bit for bit" in checks["resume continues the run"].detail
    if script == FSDP2:
        assert not [check for check in checks.values() if check.ok is None]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_fault_is_named(tmp_path: Path, fault: Fault) -> None:
    check_named(tmp_path, fault)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[pytest.mark.nightly] if i else []) for i, fault in enumerate(IN_NUMPY.values())],
    ids=list(IN_NUMPY),
)
def test_a_fault_in_numpy_is_named(tmp_path: Path, fault: Fault) -> None:
    check_named(tmp_path, fault)


def check_named(tmp_path: Path, fault: Fault) -> None:
    """Assert that the last check that fails, which is the verdict on the resumed run, names the state at fault."""
    failed = [check for check in prove(tmp_path, fault.plant(tmp_path / "train.py")) if check.ok is False]
    _, cause, named = failed[-1].detail.rpartition("cause: ")
    assert fault.named in named
    assert cause or failed[-1].name == "resume"
