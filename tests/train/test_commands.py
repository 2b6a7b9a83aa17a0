"""`ckptkit train` and `ckptkit smoke` as users start them."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ckptkit.runs import Run
from ckptkit.train.smoke import CHECKS

TINY = ["--sequence-length", "32", "--device", "cpu"]


ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def ckptkit(room: Path, *words: str, launcher: Sequence[str] = (), **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the directory `room`."""
    command = [sys.executable, "-m", *launcher, "ckptkit", *words]
    return subprocess.run(command, cwd=room, env=ENVIRONMENT | env, capture_output=True, text=True, check=False)


def test_train_under_torchrun_then_resume_on_processes_of_its_own(tmp_path: Path) -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    first = ckptkit(tmp_path, "train", "--steps", "2", *TINY, launcher=torchrun)
    assert first.returncode == 0, first.stderr
    assert [line.split()[1] for line in first.stdout.splitlines()] == ["1/2", "2/2"]
    second = ckptkit(tmp_path, "train", "--steps", "3", "--nproc", "1", "--resume", *TINY)
    assert second.returncode == 0, second.stderr
    assert [line.split()[1] for line in second.stdout.splitlines()] == ["3/3"]
    assert "resuming from run/ckpt-2" in second.stderr
    assert [checkpoint.step for checkpoint in Run(tmp_path / "run").checkpoints()] == [2, 3]
    third = ckptkit(tmp_path, "train", "--steps", "3", "--resume", *TINY)
    assert (third.returncode, third.stdout) == (0, "")
    assert "nothing to do" in third.stderr


def test_train_refuses_with_the_exit_codes_of_the_contract(tmp_path: Path) -> None:
    (tmp_path / "mixtral.json").write_text('{"model_type": "mixtral"}')
    for words, code, said in [
        (["--lr", "-1"], 2, "lr is -1.0"),
        (["--model", "huge"], 2, "no model size `huge`"),
        (["--resume"], 3, "no complete checkpoint"),
        (["--model", "mixtral.json"], 3, "`model_type` is 'mixtral'"),
        (["--data", "absent.txt", "--nproc", "1"], 4, "absent.txt"),
    ]:
        done = ckptkit(tmp_path, "train", *TINY, *words)
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith("error: ")
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_an_interrupted_train_ends_its_ranks(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "ckptkit", "train", "--steps", "100000", "--nproc", "1", *TINY]
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: to all of them
        _, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_smoke_exits_with_1_when_a_check_fails(tmp_path: Path) -> None:
    ranked = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "1")
    done = ckptkit(tmp_path, "smoke", **ranked)  # as under torchrun, where smoke cannot start processes of its own
    assert done.returncode == 1, done.stderr
    rows = [line.split("  ")[0] for line in done.stdout.splitlines() if " FAILED " in line]
    assert rows == list(CHECKS)
    assert "`--nproc` under torchrun" in done.stdout
