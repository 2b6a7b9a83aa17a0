import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptkit.errors import CkptError, Mismatch
from ckptkit.training.launch import RankPlace, Report, launch

IMPORT_WITHOUT_GPU = """
import importlib, torch
from ckptkit.training.launch import PRELOADED

def refuse(*_, **__):
    raise AssertionError("CUDA is looked at, and no process can use it after a fork")

for name in ("is_available", "device_count", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
for module in PRELOADED:
    importlib.import_module(module)
"""


def refuse_on_rank_1(place: RankPlace, report: Report) -> None:
    report("started")
    if place.rank == 1:
        raise Mismatch("two ranks do not fit", tensor="a.weight", hint="use one")
    time.sleep(600)


def die_on_rank_1(place: RankPlace, report: Report) -> None:
    report(os.getpid())
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def tell_surroundings(place: RankPlace, report: Report) -> None:
    # What a library prints, such as torch 2.10's gloo, goes to stderr.
    report(os.path.samestat(os.fstat(1), os.fstat(2)))
    report((os.environ["ASKED_FOR"], os.getcwd()))


def leave_early(place: RankPlace, report: Report) -> None:
    os._exit(7)


def test_an_error_of_a_rank_arrives_as_it_was() -> None:
    with pytest.raises(Mismatch, match="two ranks do not fit") as raised:
        launch(refuse_on_rank_1, 2, lambda _: None)
    assert (raised.value.tensor, raised.value.hint) == ("a.weight", "use one")


def test_a_dead_rank_ends_the_run_and_the_other_ranks() -> None:
    heard: list[int] = []
    with pytest.raises(CkptError, match="rank 1 was ended by SIGKILL"):
        launch(die_on_rank_1, 2, heard.append)
    for pid in heard:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_leaves_early_ends_the_run() -> None:
    with pytest.raises(CkptError, match="rank 0 failed with exit code 7"):
        launch(leave_early, 1, lambda _: None)


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import ckptkit\nckptkit.train('run', nproc=2, steps=1)\n")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    *_, last = done.stderr.splitlines()
    assert last.startswith("ckptkit.errors.Usage: each new process imports this script")
    assert last.endswith('(hint: put the call under `if __name__ == "__main__":`)')
    assert done.stderr.count("Traceback") == 1
    assert not list((tmp_path / "run").glob("ckpt-*"))


def test_a_rank_has_the_environment_of_now_and_prints_no_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for asked_for in ("one", "two"):
        monkeypatch.setenv("ASKED_FOR", asked_for)
        heard: list[object] = []
        launch(tell_surroundings, 1, heard.append)
        assert heard == [
            True,
            (asked_for, str(tmp_path)),
        ]


@pytest.mark.slow
def test_what_ranks_share_does_not_look_at_a_gpu() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_WITHOUT_GPU], check=True)
