"""The proof on real loops: what it says of trainers used as their documentation shows them."""

from __future__ import annotations

import sys
from pathlib import Path

import accelerate  # noqa: F401 - train_accelerate.py needs it
import deepspeed  # noqa: F401 - train_deepspeed.py needs it
import lightning  # noqa: F401 - train_lightning.py needs it
import pytest
import transformers  # noqa: F401 - train_trainer.py needs it

import ckptkit
from ckptkit.training.smoke.run_check import Check

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def prove(
    tmp_path: Path, name: str, resume_with: str, loss: str, save_every: int, more: str = "", nproc: int = 1
) -> dict[str, Check]:
    """Prove a script beside this file."""
    script = Path(__file__).with_name(f"train_{name}.py")
    options = (
        "--output_dir {run} --max_steps {steps} --save_steps {save_every}"
        if name == "trainer"
        else "--run {run} --steps {steps} --save-every {save_every}"
    )
    checks = ckptkit.smoke(
        tmp_path / "run",
        tmp_path / "out",
        nproc=nproc,
        command=f"{sys.executable} {script} {options} {more}",
        resume_with=resume_with,
        loss=loss,
        steps=2 * save_every,
        save_every=save_every,
    )
    return {check.name: check for check in checks}


@pytest.mark.parametrize("saves_random_state", [True, False])
def test_one_file_that_each_save_replaces(tmp_path: Path, saves_random_state: bool) -> None:
    script = Path(__file__).with_name("train_one_file.py")
    options = "--out_dir {run} --max_iters {steps} --eval_interval {save_every}"
    checks = {
        check.name: check
        for check in ckptkit.smoke(
            tmp_path / "run",
            tmp_path / "out",
            nproc=1,
            command=f"{sys.executable} {script} {options} {'--saves-random-state' if saves_random_state else ''}",
            resume_with="--resume",
            loss="loss ([0-9.]+)",
        )
    }
    continues = checks["resume continues the run"]
    assert continues.ok is saves_random_state, continues
    assert saves_random_state or "the checkpoint contains no random state" in continues.detail
    assert checks["killed while saving 1"].ok is None


def test_accelerate_passes_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    checks = prove(tmp_path, "accelerate", "--resume {checkpoint}", "loss ([0-9.]+)", 3)
    assert not [check for check in checks.values() if check.ok is False]
    assert checks["resume continues the run"].ok


def test_accelerate_draws_another_random_number_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    checks = prove(tmp_path, "accelerate", "--resume {checkpoint}", "loss ([0-9.]+)", 4)
    assert "cause: random state" in checks["resume continues the run"].detail
    assert checks["restored: random state"].ok


def test_lightning_saves_no_random_state(tmp_path: Path) -> None:
    checks = prove(tmp_path, "lightning", "--resume {checkpoint}", "loss ([0-9.]+)", 4)
    assert "the checkpoint contains no random state" in checks["resume continues the run"].detail
    assert checks["loaded into its place"].ok


def test_files_of_ranks_written_under_a_name_that_a_rename_replaces(tmp_path: Path) -> None:
    checks = prove(
        tmp_path, "rank_files", "--resume {checkpoint}", "loss ([0-9.]+)", 4, more="--nproc {nproc}", nproc=2
    )
    assert not [check for check in checks.values() if check.ok is False]
    assert checks["resume continues the run"].detail.endswith("equal, bit for bit")
    assert "of 6 files of global_step_8: global_step_4 is complete" in checks["killed while saving 1"].detail


@pytest.mark.parametrize("fault", ["", "--forgets-scheduler"])
def test_deepspeed(tmp_path: Path, fault: str) -> None:
    checks = prove(tmp_path, "deepspeed", "--resume {checkpoint}", "loss ([0-9.]+)", 4, more=fault)
    failed = {check.name: check.detail for check in checks.values() if check.ok is False}
    if not fault:  # DeepSpeed writes `latest` in place: a kill may strike while it is empty
        emptied = "`latest` names no checkpoint: write it to another file, and rename that file"
        assert not [detail for detail in failed.values() if not detail.endswith(emptied)]
    else:
        assert "scheduler" in failed["resume continues the run"]
        assert "restored: scheduler" in failed


def test_transformers_trainer(tmp_path: Path) -> None:
    checks = prove(tmp_path, "trainer", "--resume_from_checkpoint {checkpoint}", "'loss': '?([0-9.]+)", 4)
    assert checks["resume continues the run"].ok
