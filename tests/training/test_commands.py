"""`ckptkit train` and `ckptkit smoke` as users start them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner, Result

from ckptkit.checkpoints.run import RunFolder
from ckptkit.cli.commands import app
from ckptkit.errors import CkptError, Occupied
from ckptkit.training.config import SETTINGS, train_settings
from ckptkit.training.saving.run import Run
from ckptkit.training.smoke.checks import CHECKS

TINY = ["--sequence-length", "32", "--device", "cpu"]


ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def ckptkit(room: Path, *words: str, launcher: Sequence[str] = (), **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the directory `room`."""
    command = [sys.executable, "-m", *launcher, "ckptkit", *words]
    return subprocess.run(command, cwd=room, env=ENVIRONMENT | env, capture_output=True, text=True, check=False)


def invoke(room: Path, *words: str) -> Result:
    """Run a command in the directory `room` in this process, whose ranks have a server that is warm."""
    with contextlib.chdir(room):
        return CliRunner().invoke(app, words)


@pytest.mark.slow
def test_train_under_torchrun_then_resume_on_processes_of_its_own(tmp_path: Path) -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    first = ckptkit(tmp_path, "train", "--steps", "2", *TINY, launcher=torchrun)
    assert first.returncode == 0, first.stderr
    assert [line.split()[1] for line in first.stdout.splitlines()] == ["1/2", "2/2"]
    second = invoke(tmp_path, "train", "--steps", "3", "--nproc", "1", "--resume", "auto", *TINY)
    assert second.exit_code == 0, second.stderr
    assert [line.split()[1] for line in second.stdout.splitlines()] == ["3/3"]
    assert "resuming on 1 rank: run is at step 2 of 3; changed: steps 2 -> 3" in second.stderr
    begun_with = (tmp_path / "run" / SETTINGS).read_text()
    assert [checkpoint.step for checkpoint in RunFolder(tmp_path / "run").checkpoints()] == [2, 3]
    third = invoke(tmp_path, "train", "--resume", "auto", "--nproc", "1", "--lr", "0.5")
    assert (third.exit_code, third.stdout) == (0, "")
    assert "nothing to do" in third.stderr
    assert (tmp_path / "run" / SETTINGS).read_text() == begun_with


@pytest.mark.slow
def test_train_refuses_with_the_exit_codes_of_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixtral.json").write_text('{"model_type": "mixtral"}')
    (tmp_path / "wrong.toml").write_text("stepps = 1")
    for words, code, said in [
        (["--lr", "-1"], 2, "found -1.0"),
        (["--strategy", "zero1"], 2, "full_shard"),
        (["--config", "wrong.toml"], 2, "unknown setting `stepps`"),
        (["--model", "huge", "--nproc", "1"], 2, "unknown model `huge`"),
        (["--resume", "absent", "--nproc", "1"], 3, "absent"),
        (["--model", "mixtral.json", "--nproc", "1"], 3, "built-in Llama has, found 'mixtral'"),
        (["--data", "absent.txt", "--nproc", "1"], 4, "absent.txt"),
    ]:
        answer = CliRunner().invoke(app, ["train", *TINY, *words])
        error = answer.exception
        assert code == (error.exit_code if isinstance(error, CkptError) else answer.exit_code), (words, error)
        assert said in f"{answer.output} {error} {vars(error)}", words
    done = ckptkit(tmp_path, "train", *TINY, *words)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_earlier_checkpoint_is_resumed_in_a_new_run_only(tmp_path: Path) -> None:
    done = invoke(tmp_path, "train", "c1", "--steps", "3", "--save-every", "1", "--nproc", "1", *TINY)
    assert done.exit_code == 0, done.stderr
    metrics = (tmp_path / "c1/metrics.jsonl").read_bytes()
    shutil.copytree(tmp_path / "c1", tmp_path / "c2")
    for run, said in {
        "c1": "c1: the run has checkpoints after ckpt-1: ckpt-2, ckpt-3",
        "c2": "c2: the run already has checkpoints, and c1/ckpt-1 is not one of them: ckpt-1, ckpt-2, ckpt-3",
    }.items():
        error = invoke(tmp_path, "train", run, "--resume", "c1/ckpt-1", "--steps", "4", "--nproc", "1").exception
        assert isinstance(error, Occupied)
        assert str(error).startswith(said)
        assert error.hint == "train into a new run: `ckptkit train NEW --resume c1/ckpt-1 --config c1/train.toml`"
        assert (tmp_path / run / "metrics.jsonl").read_bytes() == metrics
    new = invoke(tmp_path, "train", "NEW", "--resume", "c1/ckpt-1", "--config", "c1/train.toml", "--nproc", "1")
    assert [line.split()[1] for line in new.stdout.splitlines()] == ["2/3", "3/3"], new.stderr
    latest = invoke(tmp_path, "train", "c1", "--resume", "c1/ckpt-3", "--steps", "4", "--nproc", "1")
    assert [line.split()[1] for line in latest.stdout.splitlines()] == ["4/4"], latest.stderr


@pytest.mark.slow
def test_settings_come_from_a_file_and_options_override_them(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text("steps = 2\nsequence_length = 32\ndevice = 'cpu'\nseed = 7\ncompile = true\n")
    words = ["train", "here", "--config", "train.toml", "--nproc", "1", "--steps", "1", "--no-compile"]
    done = invoke(tmp_path, *words)
    assert done.exit_code == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["1/1"]
    kept = tomllib.loads((tmp_path / "here/train.toml").read_text())
    assert (kept["seed"], kept["steps"], kept["sequence_length"], kept["compile"]) == (7, 1, 32, False)


def test_every_setting_is_an_option_of_train(tmp_path: Path) -> None:
    shown = ckptkit(tmp_path, "train", "--help").stdout
    for name in train_settings():
        assert f"--{name.replace('_', '-')}" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly)]
)
def test_a_train_that_is_asked_to_end_saves_first(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "ckptkit", "train", "--steps", "100000", "--nproc", "2", *TINY]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as Ctrl-C does: to all of them
        else:
            process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert ("saving after this step; press Ctrl-C again" in errors) == (number == signal.SIGINT)
    assert "stopped on request, after a save: continue with --resume auto" in errors
    assert len(RunFolder(tmp_path / "run").checkpoints()) == 1


@pytest.mark.slow
def test_an_interruption_while_the_ranks_start_prints_no_traceback(tmp_path: Path) -> None:
    """It comes while the server imports torch, which takes it seconds: it has no rank yet."""
    command = [sys.executable, "-m", "ckptkit", "train", "--steps", "100000", "--nproc", "2", *TINY]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        while process.poll() is None and not any(imports_torch(child) for child in children_of(process.pid)):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        said, errors = process.communicate()  # to the end of the server too, which has the same stderr
    assert (process.returncode, said) == (130, "")
    assert errors.splitlines()[1:] == ["interrupted"]
    assert not (tmp_path / "run").exists()


def imports_torch(pid: int) -> bool:
    """Return whether a process has mapped one of torch's libraries."""
    with contextlib.suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return False


@pytest.mark.slow
def test_a_second_interruption_ends_a_train_without_a_save(tmp_path: Path) -> None:
    """The ranks are stopped meanwhile, so that the first one cannot have ended them."""
    command = [sys.executable, "-m", "ckptkit", "train", "--steps", "100000", "--nproc", "2", *TINY]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        for server in children_of(process.pid):
            for rank in children_of(server):
                os.kill(rank, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        said = [process.stderr.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert said[-1] == "saving after this step; press Ctrl-C again to stop without a save\n"
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert RunFolder(tmp_path / "run").checkpoints() == []


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_train_and_smoke_refuse_before_torch_is_imported(tmp_path: Path) -> None:
    Run(tmp_path / "run").save(1, nn.Linear(2, 2))
    for words in (
        ["train", "run", "--steps", "1"],
        ["train", "other", "--model", "huge"],
        ["train", "other", "--data", "absent.txt"],
        ["train", "other", "--resume", "absent"],
        ["train", "other", "--keep-best", "acc"],
        ["smoke", "--run", "run"],
        ["train"],
    ):
        code = f"import sys; sys.argv[1:] = {words}; sys.modules['torch'] = None; from ckptkit.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        assert done.returncode in (2, 3, 4, 5), done.stderr
        assert done.stderr.startswith(("error: ", "Usage: ")), done.stderr
        assert "torch" not in done.stderr.partition("\n")[0]


@pytest.mark.nightly
def test_smoke_exits_with_1_when_a_check_fails(tmp_path: Path) -> None:
    ranked = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "1")
    done = ckptkit(tmp_path, "smoke", **ranked)  # as under torchrun, where smoke cannot start processes of its own
    assert done.returncode == 1, done.stderr
    rows = [line.split("  ")[0] for line in done.stdout.splitlines() if " FAILED " in line]
    assert rows == list(CHECKS)
    assert "--nproc cannot be used under torchrun" in done.stdout
