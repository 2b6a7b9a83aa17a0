"""A directory of a run that this user may not list: the commands go on with the other checkpoints, and name it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import producers
from tests.conftest import Produce

# root may list everything, unless it gives up these two
WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WITHOUT_PRIVILEGES) and not shutil.which("setpriv"), reason="root may list everything"),
]


@pytest.fixture
def run(produce: Produce, tmp_path: Path) -> Iterator[Path]:
    """A run of steps 1 to 4. Nobody may list step 2, a directory in step 3, and the one that disks have."""
    for step in range(1, 5):
        shutil.copytree(produce(producers.under_model).root, tmp_path / "run" / f"ckpt-{step}")
    closed = [tmp_path / "run" / name for name in ("ckpt-2", "ckpt-3/logs", "lost+found")]
    for path in closed:
        path.mkdir(exist_ok=True)
        path.chmod(0)
    yield tmp_path / "run"
    for path in (*(tmp_path / "run").iterdir(), tmp_path / "run" / "ckpt-3/logs"):
        path.chmod(0o700)  # so that pytest can delete it


def ckptkit(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Run a command with --json as a user without privileges; return its exit code and its output."""
    words = [*WITHOUT_PRIVILEGES, sys.executable, "-m", "ckptkit", *map(str, arguments), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout or done.stderr)


def test_ls_verify_and_prune_name_what_they_may_not_list(run: Path) -> None:
    code, listed = ckptkit("ls", run)
    problems = {Path(one["path"]).name: one["problem"] for one in listed["checkpoints"]}
    assert problems == {"ckpt-1": None, "ckpt-2": "permission denied", "ckpt-3": None, "ckpt-4": None}
    assert (code, listed["latest"]) == (0, str(run / "ckpt-4"))

    code, verified = ckptkit("verify", run)
    wrong = {(one["path"], one["code"], one["message"]) for one in verified["problems"]}
    assert wrong == {(str(run / name), "io", "permission denied") for name in ("ckpt-2", "ckpt-3/logs")}
    assert (code, len(verified["checkpoints"])) == (1, 4)

    code, pruned = ckptkit("prune", run, "--keep-last", 1, "--yes")
    reasons = {kind: {Path(one["path"]).name: one["reason"] for one in pruned[kind]} for kind in ("keep", "other")}
    assert reasons == {
        "keep": {"ckpt-4": "one of the last 1", "ckpt-3": "cannot be read: logs: permission denied"},
        "other": {"ckpt-2": "permission denied", "lost+found": "its name does not end with a step"},
    }
    assert (code, [one["path"] for one in pruned["delete"]]) == (0, [str(run / "ckpt-1")])


def test_the_newest_is_not_passed_over(run: Path) -> None:
    (run / "ckpt-4").chmod(0)
    code, listed = ckptkit("ls", run)
    assert (code, listed["latest"], len(listed["checkpoints"])) == (0, None, 4)
    assert ckptkit("inspect", run)[0] == 4
