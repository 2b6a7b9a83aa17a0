"""The loop of ten lines in docs/python.md, run as it stands there: it saves, ends anywhere, and goes on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit.checkpoints.run import RunFolder
from ckptkit.checks.verify import verify

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.slow
def test_the_loop_of_the_docs_runs_and_resumes(tmp_path: Path) -> None:
    (loop,) = re.findall(r"```python\n(import torch\n.*?run\.save.*?)```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in loop.splitlines() if line]) <= 16
    (tmp_path / "first.py").write_text(loop.replace("step < 2000", "step < 1000"))
    (tmp_path / "second.py").write_text(loop + "print(step)\n")
    subprocess.run([sys.executable, "first.py"], cwd=tmp_path, check=True)
    assert [found.step_in_name for found in RunFolder(tmp_path / "run").checkpoints()] == [500, 1000]
    done = subprocess.run([sys.executable, "second.py"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "2000\n"
    assert [found.step_in_name for found in RunFolder(tmp_path / "run").checkpoints()] == [1000, 1500, 2000]
    assert all(part.is_ok for part in verify(tmp_path / "run"))
