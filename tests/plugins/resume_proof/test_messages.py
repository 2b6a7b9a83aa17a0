"""A script that cannot be proved gets a message of its own, and no accusation."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.plugins.resume_proof.checks import check_runs_and_saves, hint_on_missing_checkpoint
from ckptkit.plugins.resume_proof.options import ScriptOptions
from ckptkit.plugins.resume_proof.prove import check_survives_kill, is_about_rank_state, kill_survival_checks
from ckptkit.plugins.resume_proof.runs import Runs
from ckptkit.training.smoke.run_check import CheckFailed
from tests.plugins.resume_proof.faults import NUMPY
from tests.training.test_commands import ckptkit as command

pytestmark = pytest.mark.slow

_MAIN = "main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))"
_RENAME = 'hidden_place.rename(run / f"step_{step}")'
_CUT = "(run / 'step_8' / 'model.safetensors').rename(run / 'step_8' / '__0_0.distcp')"
_SAVED = 'run / f"step_{step}"'


def write_script(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """Write the script in numpy with some statements changed."""
    text = NUMPY.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "train.py").write_text(text)
    return tmp_path / "train.py"


def prove(tmp_path: Path, *changes: tuple[str, str], **options: Any) -> dict[str, tuple[bool | None, str]]:
    """Prove the script in numpy with some statements changed; return each check's result and detail."""
    line = f"{sys.executable} {write_script(tmp_path, *changes)} {{run}} {{steps}} {{save_every}}"
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
        (_MAIN, "import time; time.sleep(60)", "run", "did not end: still running after 3 s: see where it hangs"),
        (_MAIN, "sys.exit(2)", "run", "the script failed: exit code 2"),
        ('if saved:', 'if saved and 1 / 0:', "resume", "does not resume from step_4: exit code 1: ZeroDivision"),
        (_MAIN, f"{_MAIN}; print('bye'); 'resumed' in sys.argv[1] and sys.exit(134)", "resume",
         "the script resumes from step_4, saves step 8, and then fails: exit code 134: "),
        (_RENAME, f"{_RENAME}; saved and step == 8 and {_CUT} and sys.exit(3)", "resume",
         "the script does not resume from step_4: exit code 3: "),
        ('"loss": float', '"error": float', "losses are finite", "no line with the key loss in {run}/metrics.jsonl"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path: Path, old: str, new: str, check: str, message: str) -> None:
    limit = {"time_limit": 3} if "sleep" in new else {}
    found = prove(tmp_path, (old, new), **limit)
    ok, detail = found[check]
    assert ok is False
    assert message in detail
    assert check == list(found)[-1]  # nothing else is tried


def test_a_pattern_that_matches_nothing_ends_the_proof(tmp_path: Path) -> None:
    prints = ("        if step % save_every == 0:", "        print('step', step)\n        if step % save_every == 0:")
    found = prove(tmp_path, prints, loss="error ([0-9.]+)")
    ok, detail = found["losses are finite"]
    assert ok is False
    assert "`error ([0-9.]+)` matches no line of the output, which ends with `step 6`, `step 7`, `step 8`" in detail
    assert "leave out --loss" in detail
    assert "deterministic" not in found


def runs_of(tmp_path: Path, *changes: tuple[str, str]) -> Runs:
    """Return the runs of the script in numpy with some statements changed; none is started yet."""
    line = f"{sys.executable} {write_script(tmp_path, *changes)} {{run}} {{steps}} {{save_every}}"
    return Runs(ScriptOptions(line), tmp_path / "run", tmp_path / "out", 1)


def test_a_script_that_deletes_before_it_saves_loses_everything_when_killed(tmp_path: Path) -> None:
    save = "            hidden_place.mkdir("
    delete = "import time; time.sleep(0.5); [shutil.rmtree(old) for old in run.glob('step_*')]"
    deletes = (save, f"            {delete}\n{save}")
    slow = ("            save_file(moments", "            time.sleep(1)\n            save_file(moments")
    runs = runs_of(tmp_path, deletes, slow)
    assert "the script deletes step_4, so ckptkit stopped a second run to get it" in check_runs_and_saves(runs)
    assert runs.middle_state.values["state.step"].value == 4
    with pytest.raises(CheckFailed, match="no complete checkpoint is left: delete older checkpoints only after"):
        check_survives_kill(runs, 1)


def test_a_checkpoint_that_is_deleted_at_once_is_told_from_one_that_is_not_saved(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, ("step % save_every == 0", "step % 8 == 0"))
    with pytest.raises(CheckFailed, match=r"save every \{save_every\} steps, and keep at least two checkpoints if"):
        check_runs_and_saves(runs)
    assert hint_on_missing_checkpoint(replace(runs, was_deleted=True)) == (
        "the script deletes the one of step 4: keep at least two checkpoints"
    )


def test_a_random_state_that_nothing_depends_on_is_no_failure(tmp_path: Path) -> None:
    no_dropout = (" * (rng.random((BATCH, WIDTH)) > 0.1)", "")
    draws = ('rng.bit_generator.state = state["rng"]', 'rng.bit_generator.state = state["rng"]; rng.random()')
    found = prove(tmp_path, no_dropout, draws)
    ok, detail = found["resume continues the run"]
    assert ok
    assert "only the random state differs (`state.rng.state.state`)" in detail
    assert not [name for name, (ok, _) in found.items() if ok is False]
    assert found["killed while saving 1"][0]


def test_a_script_that_restores_not_all_is_killed_too(tmp_path: Path) -> None:
    found = prove(tmp_path, ('step = state["step"]', 'step = state["step"] + 1'))
    assert found["resume continues the run"][0] is False
    assert "; the resumed run printed 3 losses, expected 4" in found["first loss"][1]
    assert "is complete and resumes" in found["killed while saving 1"][1]


@pytest.mark.parametrize(("files", "moments"), [(1, 1), (2, 2), (3, 3), (9, 3)])
def test_no_moment_of_a_save_is_tried_twice(tmp_path: Path, files: int, moments: int) -> None:
    runs = runs_of(tmp_path)
    runs.checkpoint_paths = {8: tmp_path / "step_8"}
    runs.checkpoint_paths[8].mkdir()
    for i in range(files):
        (runs.checkpoint_paths[8] / f"{i}.bin").touch()
    assert len(kill_survival_checks(runs)) == moments


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        ("RuntimeError: Missing key in checkpoint state_dict: rng_3.", True),
        ("FileNotFoundError: step_4/random_states_2.pkl", True),
        ("RuntimeError: Missing key in checkpoint state_dict: rng.", False),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x16)", False),
    ],
)
def test_a_state_of_a_rank_is_recognized_in_an_error(failure: str, expected: bool) -> None:
    names = ["rng_0", "rng_1", "random_states_0.torch_manual_seed", "rng.0"]
    assert is_about_rank_state(failure, names) is expected


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
    assert "computes optimizer options anew" in detail
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


@pytest.mark.nightly
def test_a_tracker_that_is_written_before_the_save_does_not_survive_a_kill(tmp_path: Path) -> None:
    early = (
        "            save_file(weights",
        '            (run / "latest").write_text(f"step_{step}")\n            save_file(weights',
    )
    slow = ("            save_file(moments", "            import time; time.sleep(0.5)\n            save_file(moments")
    found = prove(tmp_path, early, slow)
    assert found["resume continues the run"][0]
    expected = "killed at 1 of 4 files of step_8: `latest` names step_8, which does not exist: write it after the save"
    assert found["killed while saving 1"] == (False, expected)


def test_the_command_prints_a_table_and_a_card(tmp_path: Path) -> None:
    line = f"{sys.executable} {NUMPY} {{run}} {{steps}} {{save_every}}"
    done = command(tmp_path, "smoke", "--command", line, "--nproc", "1")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "restored: random state        ok" in done.stdout
    card = (tmp_path / "run" / "resume.md").read_text()
    assert "| verdict | all checks passed |" in card
    assert line in card
    assert "| ranks |" not in card  # the command has no {nproc}
    assert "8 steps, saved step_4, step_8" in done.stdout
    assert "the results are in run, the export is in out" in done.stderr
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
