"""A script that cannot be proved gets a message of its own, and no accusation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from tests.plugins.resume_proof.faults import NUMPY
from tests.training.test_commands import ckptkit as command

pytestmark = pytest.mark.slow

_MAIN = "main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))"
_SAVED = 'run / f"step_{step}"'


def prove(tmp_path: Path, *changes: tuple[str, str], **options: Any) -> dict[str, tuple[bool | None, str]]:
    """Prove the script in numpy with some statements changed; return each check's result and detail."""
    text = NUMPY.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "train.py").write_text(text)
    line = f"{sys.executable} {tmp_path}/train.py {{run}} {{steps}} {{save_every}}"
    asked = {"command": line, "loss": "metrics.jsonl:loss", "nproc": 1, **options}
    checks = ckptkit.smoke(tmp_path / "run", tmp_path / "out", **asked)
    return {check.name: (check.ok, check.detail) for check in checks}


@pytest.mark.parametrize(
    ("old", "new", "check", "message"),
    [
        (_MAIN, "main(Path(sys.argv[1]), 12, 4)", "run", "expected a last checkpoint at step 8, found one at 12"),
        (_MAIN, "main(Path(sys.argv[1]), 8, 8)", "run", "expected checkpoints at steps 4, 8, found 8"),
        (_MAIN, "pass", "run", "the script saved nothing in {run}"),
        (_SAVED, 'run / ("latest" if step == 8 else "before")', "run", "no checkpoint is named by its step"),
        (_MAIN, "import time; time.sleep(60)", "run", "still running after 3 s"),
        ('if saved:', 'if saved and 1 / 0:', "resume", "does not resume from step_4: exit code 1: ZeroDivision"),
        ('"loss": float', '"error": float', "losses are finite", "expected a loss for each of 8 steps, found 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path: Path, old: str, new: str, check: str, message: str) -> None:
    limit = {"time_limit": 3} if "sleep" in new else {}
    ok, detail = prove(tmp_path, (old, new), **limit)[check]
    assert ok is False
    assert message in detail


@pytest.mark.nightly
def test_losses_that_are_not_one_a_step_are_not_compared(tmp_path: Path) -> None:
    evaluation = f"{_MAIN}; (Path(sys.argv[1]) / 'metrics.jsonl').open('a').write('{{\"loss\": 1}}')"
    forgotten = ('rng.bit_generator.state = state["rng"]', "pass")
    found = prove(tmp_path, (_MAIN, evaluation), forgotten, steps=4, save_every=2)
    ok, detail = found["losses are finite"]
    assert ok is None
    assert "expected a loss for each of 4 steps, found 5" in detail
    assert found["first loss"][0] is None
    assert "random state in the checkpoint not restored" in found["resume continues the run"][1]


@pytest.mark.nightly
def test_a_dtype_that_ckptkit_does_not_change_is_not_accused(tmp_path: Path) -> None:
    complex_numbers = ("save_file(ema,", "save_file({name: ema[name].astype(np.complex64) for name in ema},")
    real = (
        'load_file(saved[-1] / "ema.safetensors")',
        '{k: v.real for k, v in load_file(saved[-1] / "ema.safetensors").items()}',
    )
    found = prove(tmp_path, complex_numbers, real)
    ok, detail = found["restored: EMA"]
    assert ok is None
    assert "ckptkit does not change elements of complex64" in detail
    assert not [name for name, (ok, _) in found.items() if ok is False]


@pytest.mark.nightly
def test_a_random_script_is_measured_and_not_accused(tmp_path: Path) -> None:
    noise = ("rng = np.random.default_rng(0)", "rng = np.random.default_rng(0)\n    noise = np.random.default_rng()")
    noisy = ("gradients = [", "hidden = hidden * (1 + 1e-6 * noise.standard_normal())\n        gradients = [")
    found = prove(tmp_path, noise, noisy)
    assert "a second run differs by" in found["deterministic"][1]
    assert found["resume continues the run"][0]
    assert not [name for name, (ok, _) in found.items() if ok is False]


@pytest.mark.nightly
def test_a_learning_rate_that_is_computed_anew_is_not_accused(tmp_path: Path) -> None:
    anew = ("taken, step = taken + 1", 'group["lr"] = LR / (1 + 0.3 * step)\n        taken, step = taken + 1')
    found = prove(tmp_path, anew)
    ok, detail = found["restored: optimizer options"]
    assert ok is None
    assert "not read" in detail
    assert not [name for name, (ok, _) in found.items() if ok is False]


@pytest.mark.nightly
def test_a_save_in_place_does_not_survive_a_kill(tmp_path: Path) -> None:
    in_place = ('hidden_place = run / f".saving-{step}"', 'hidden_place = run / f"step_{step}"')
    at_once = ('hidden_place.rename(run / f"step_{step}")', "pass")
    kept = ('shutil.rmtree(run / f"step_{step}", ignore_errors=True)', "pass")
    slow = ("            save_file(moments", "            import time; time.sleep(0.5)\n            save_file(moments")
    found = prove(tmp_path, in_place, at_once, kept, slow)
    assert found["resume continues the run"][0]
    ok, detail = found["killed while saving 1"]
    assert ok is False
    assert "killed at 1 of 4 files: step_8 looks complete, and the script does not resume from it: save to a" in detail


def test_the_command_prints_a_table_and_a_card(tmp_path: Path) -> None:
    line = f"{sys.executable} {NUMPY} {{run}} {{steps}} {{save_every}}"
    done = command(tmp_path, "smoke", "--command", line, "--nproc", "1")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "restored: random state        ok" in done.stdout
    card = (tmp_path / "run" / "resume.md").read_text()
    assert "| verdict | all checks passed |" in card
    assert line in card
    assert not (tmp_path / "run" / "runs").exists()
    again = command(tmp_path, "smoke", "--command", line)
    assert again.returncode == 5
    assert "exists" in again.stderr


@pytest.mark.nightly
def test_what_an_earlier_proof_kept_is_replaced(tmp_path: Path) -> None:
    assert prove(tmp_path, keep=True)["run"][0]
    assert (tmp_path / "run" / "runs" / "whole" / "step_8").is_dir()
    ok, detail = prove(tmp_path, (_MAIN, "pass"), overwrite=True)["run"]
    assert ok is False
    assert "the script saved nothing" in detail
