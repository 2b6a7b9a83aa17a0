"""The scripts of docs/slurm.md, run by bash and Python. Only two commands of Slurm are stood in for."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptkit.checks.diff import diff
from ckptkit.checks.verify import verify
from ckptkit.runs.ls import ls

PAGE = Path(__file__).parents[2] / "docs" / "slurm.md"
TRAIN, EXPORT, TORCHRUN = re.findall(r"^```bash\n(#!/bin/bash\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
(RAY,) = re.findall(r"^```python\n(import sys\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
(POD,) = re.findall(r"^ +- (ckptkit consolidate .*)$", PAGE.read_text(), re.MULTILINE)
TASKS = 2
SRUN = """#!/bin/bash
echo $$ >"$STAGE/srun"
while [[ "$1" == --* ]]; do shift; done
trap 'kill -TERM "${tasks[@]}"' TERM
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" &
    tasks+=($!)
done
worst=0
for task in "${tasks[@]}"; do
    while wait "$task"; code=$?; kill -0 "$task" 2>/dev/null; do :; done
    ((code > worst)) && worst=$code
done
exit $worst
"""
SCONTROL = """#!/bin/bash
echo "$@" >>"$STAGE/scontrol"
echo localhost
"""


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A directory with both scripts, and with the commands that they need first on the path."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(text)
        command.chmod(0o755)
    (tmp_path / "train.sbatch").write_text(TRAIN)
    (tmp_path / "export.sbatch").write_text(EXPORT)
    return tmp_path


def start(stage: Path, *words: str) -> subprocess.Popen[str]:
    """Start a script as Slurm does, with two tasks on one node."""
    slurm = {"JOB_ID": str(os.getpid()), "JOB_NODELIST": "n", "NTASKS": str(TASKS), "NTASKS_PER_NODE": str(TASKS)}
    path = f"{stage / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()} | {"STAGE": str(stage), "PATH": path}
    return subprocess.Popen(
        ["/bin/bash", *words], cwd=stage, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run_script(stage: Path, *words: str) -> str:
    """What a script prints that ends well."""
    with start(stage, *words) as running:
        assert running.stdout is not None
        printed = running.stdout.read()
    assert running.returncode == 0, printed
    return printed


def test_bash_understands_the_scripts(stage: Path) -> None:
    for name in ("train.sbatch", "export.sbatch"):
        subprocess.run(["/bin/bash", "-n", str(stage / name)], check=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    home = tmp_path_factory.mktemp("trained")
    run_here(home, sys.executable, "-m", "ckptkit", "train", "run", "--steps", "1", "--sequence-length", "32")
    return home / "run"


@pytest.fixture
def trained(tmp_path: Path, run: Path) -> Path:
    """A directory with a run of one step in `run`."""
    shutil.copytree(run, tmp_path / "run")
    return tmp_path


def run_here(home: Path, *command: str, **variables: str) -> None:
    """Run a command that ends well, in a directory and with the programs of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=home, env=os.environ | {"PATH": path} | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def assert_exported(home: Path) -> None:
    """Check that `model` is there, is undamaged, and has the weights of `run`."""
    (exported,) = verify(home / "model")
    assert exported.is_ok
    assert diff(home / "run", home / "model").is_equal


@pytest.mark.nightly
def test_torchrun_exports_a_model(trained: Path) -> None:
    (trained / "export.sh").write_text(TORCHRUN)
    run_here(trained, "/bin/bash", "export.sh", "run", "model")
    assert_exported(trained)


@pytest.mark.nightly
def test_the_pods_of_a_job_export_a_model(trained: Path) -> None:
    command = POD.replace("/shared", str(trained))
    for index in range(2):
        run_here(trained, "/bin/bash", "-c", command, JOB_COMPLETION_INDEX=str(index), PARTS="2")
    run_here(trained, sys.executable, "-m", "ckptkit", "finalize", "model")
    assert_exported(trained)


@pytest.mark.nightly
def test_ray_exports_a_model(trained: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    (trained / "export.py").write_text(RAY)
    run_here(trained, sys.executable, "export.py", str(trained / "run"), str(trained / "model"))
    assert_exported(trained)


@pytest.mark.slow
def test_a_job_trains_and_another_exports_its_model(stage: Path) -> None:
    run_script(stage, "train.sbatch", "run", "--steps", "4", "--save-every", "2")
    found = ls(stage / "run")
    assert [(one.step, one.world_size) for one in found.checkpoints] == [(2, TASKS), (4, TASKS)]
    printed = run_script(stage, "export.sbatch", "run", "out")
    assert "the same: 21 tensors" in printed
    (exported,) = verify(stage / "out")
    assert exported.is_ok


@pytest.mark.nightly
def test_a_job_that_ends_before_its_run_saves_and_is_put_back(stage: Path) -> None:
    with start(stage, "train.sbatch", "run", "--steps", "100000", "--save-every", "50000") as running:
        metrics = stage / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            assert running.poll() is None
            time.sleep(0.1)
        os.kill(int((stage / "srun").read_text()), signal.SIGTERM)
        assert running.stdout is not None
        printed = running.stdout.read()
    assert running.returncode == 143, printed
    assert (stage / "scontrol").read_text().splitlines()[-1] == f"requeue {os.getpid()}"
    (saved,) = ls(stage / "run").checkpoints
    assert saved.is_complete
    assert saved.step is not None
    run_script(stage, "train.sbatch", "run", "--steps", str(saved.step + 2), "--save-every", "50000")
    assert [one.step for one in ls(stage / "run").checkpoints] == [saved.step, saved.step + 2]
