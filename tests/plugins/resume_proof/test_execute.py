"""A script runs in processes that all end with it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckptkit.plugins.resume_proof.execute import Execution, execute_command
from ckptkit.plugins.resume_proof.options import ScriptOptions
from tests.tiers import slow_but

HANGING = """
import subprocess, sys, time
print("loss 1.5")
print("loss 0.5", flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1] + "/child", "w").write(str(child.pid))
"""


def run(tmp_path: Path, code: str, **options: Any) -> Execution:
    """Run Python code as a script."""
    (tmp_path / "script.py").write_text(code)
    proof = ScriptOptions(f"{sys.executable} {tmp_path}/script.py {{run}}", **{"loss": "loss ([0-9.]+)", **options})
    return execute_command(proof, tmp_path / "run", tmp_path / "log.txt", 2)


def is_alive(number: int) -> bool:
    """Return whether a process has not ended."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", slow_but([""], ["", "time.sleep(600)"]))
def test_no_process_is_left(tmp_path: Path, end: str) -> None:
    done = run(tmp_path, HANGING + end, time_limit=2)
    child = int((tmp_path / "run" / "child").read_text())
    for _ in range(500):  # init has to collect it
        if not is_alive(child):
            break
        time.sleep(0.01)
    assert not is_alive(child)
    assert done.exit_code == (None if end else 0)
    assert done.losses == (1.5, 0.5)
    if end:
        hint = f"see where it hangs in {tmp_path}/log.txt, or raise --time-limit"
        assert f"still running after 2 s, last line `loss 0.5`: {hint}" in done.describe_failure()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ValueError('the lr is wrong')", "exit code 1: ValueError: the lr is wrong; output: "),
        ("raise RuntimeError('Found no NVIDIA driver on your system')", "the script needs a GPU, and this machine"),
        (
            "print('RuntimeError: of a rank\\nProcessExitedException: process 3 terminated'); raise SystemExit(1)",
            "exit code 1: RuntimeError: of a rank; output: ",
        ),
        ("import sys; sys.exit(3)", "exit code 3: no output; output: "),
    ],
)
def test_a_failure_is_one_line(tmp_path: Path, code: str, message: str) -> None:
    assert message in run(tmp_path, code).describe_failure()


def test_losses_come_from_lines_of_json(tmp_path: Path) -> None:
    code = "import sys; open(sys.argv[1] + '/m.jsonl', 'w').write('{\"loss\": 2}\\nnot json\\n{\"loss\": 1.5}\\n{}')"
    assert run(tmp_path, code, loss="m.jsonl:loss").losses == (2.0, 1.5)
