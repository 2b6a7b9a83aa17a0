"""The GitHub action: its steps, in the shell that GitHub runs them in."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml  # type: ignore[import-untyped] # its stubs are a package of their own

ACTION = Path(__file__).parents[1] / ".github/actions/verify/action.yml"


def run_step(word: str, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run the step with `word` in its command, with the inputs that it names in its environment."""
    steps: list[dict[str, Any]] = yaml.safe_load(ACTION.read_text())["runs"]["steps"]
    (step,) = (step for step in steps if word in step["run"])
    given = {name: inputs[value.removeprefix("${{ inputs.").removesuffix(" }}")] for name, value in step["env"].items()}
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(shell, check=False, env={**os.environ, **given}, capture_output=True, text=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("damaged", [False, True])
def test_checkpoints_are_verified(tmp_path: Path, damaged: bool) -> None:
    for name in ("step-1", "step-2"):
        dcp.save({"weight": torch.ones(64)}, checkpoint_id=str(tmp_path / name), no_dist=True)
    shard = tmp_path / "step-2/__0_0.distcp"
    if damaged:
        content = bytearray(shard.read_bytes())
        content[content.index(torch.ones(1).numpy().tobytes() * 8)] ^= 1
        shard.write_bytes(content)
    done = run_step("verify", checkpoints=f"{tmp_path}/step-1 {tmp_path}/step-2")
    assert (done.returncode, "CRC-32" in done.stdout) == (int(damaged), damaged), done.stdout + done.stderr


def test_a_training_command_reaches_the_proof_in_one_piece(tmp_path: Path) -> None:
    command = f"python 'my train.py' $(touch {tmp_path}/run-by-the-shell) {{run}} {{oops}}"
    done = run_step("smoke", command=command, options=f"--run {tmp_path}/run --steps 4 --save-every 2")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "{oops}" in done.stderr
    assert not (tmp_path / "run-by-the-shell").exists()
