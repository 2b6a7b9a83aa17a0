"""Conversions made by several processes, killed at any moment and gone on with: the bytes are those of a single one."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import average, consolidate, convert, finalize, reshard
from ckptkit.errors import Corrupt, NotACheckpoint, Occupied
from ckptkit.io.disk import staging_path
from ckptkit.io.staging import Stage, find_resume_key
from tests import command, producers
from tests.conftest import Produce
from tests.directories import files_in
from tests.producers import save_alone
from tests.test_matrix import load_dcp
from tests.tiers import nightly_but


def nth(number: int, count: int) -> str:
    return f"{number + 1}/{count}"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 64 MiB, in one process a work of four units."""
    root = tmp_path_factory.mktemp("large") / "ckpt"
    save_alone({"model": {f"w{i}": torch.full((1 << 20,), float(i)) for i in range(16)}}, root)
    return root


@pytest.mark.parametrize("count", [2, 5])
def test_parts_in_any_order_are_the_whole(produce: Produce, tmp_path: Path, count: int) -> None:
    source = produce(producers.tensor_parallel).root
    reshard(source, tmp_path / "whole", to=3)
    for number in reversed(range(count)):
        done = reshard(source, tmp_path / "parts", to=3, part=nth(number, count))
        assert not done.is_finished
        assert not (tmp_path / "parts").exists()
    done = finalize(tmp_path / "parts")
    assert done.is_finished
    assert done.checked_bytes > 0
    assert files_in(tmp_path / "parts") == files_in(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "whole"]


def test_a_checkpoint_of_two_parts_and_other_files(produce: Produce, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-3"
    shutil.copytree(produce(producers.accelerate).root, source)
    (source / "scheduler.bin").write_bytes(b"kept")
    convert(source, tmp_path / "whole", to="pt")
    for number in (1, 0, 2):
        convert(source, tmp_path / "parts", to="pt", part=nth(number, 3))
    finalize(tmp_path / "parts")
    assert files_in(tmp_path / "parts") == files_in(tmp_path / "whole")
    assert files_in(tmp_path / "parts")["scheduler.bin"] == b"kept"


def test_a_mean_is_made_in_parts(large: Path, tmp_path: Path) -> None:
    """With a tensor of integers, of which each part sees a piece, and what is said of it at the end."""
    for i in range(2):
        state = {"w": torch.full((3 << 20,), float(i)), "seen": torch.arange(5 << 20) + i}
        save_alone({"model": state}, tmp_path / f"src{i}")
    sources = [tmp_path / "src0", tmp_path / "src1"]
    whole = average(sources, tmp_path / "whole", weights=[3, 1], to="dcp")
    for number in (2, 0, 1):
        done = average(sources, tmp_path / "parts", weights=[3, 1], to="dcp", part=nth(number, 3))
        assert not done.is_finished
    with pytest.raises(Occupied, match=r"other options: weights: expected 0.75, 0.25, found 0.5, 0.5"):
        average(sources, tmp_path / "parts", weights=[1, 1], to="dcp", part=nth(0, 3))
    made = finalize(tmp_path / "parts")
    assert files_in(tmp_path / "parts") == files_in(tmp_path / "whole")
    assert (made.weights, made.sources, made.checked_bytes) == (whole.weights, whole.sources, whole.checked_bytes)
    assert any("differ come from" in note and "seen" in note for note in made.notes)
    assert torch.equal(load_dcp(tmp_path / "whole")["model"]["w"], torch.full((3 << 20,), 0.25))


def test_a_conversion_that_goes_on_says_so(large: Path, tmp_path: Path) -> None:
    arguments = ["consolidate", str(large), str(tmp_path / "out")]
    run_and_die(2, "SIGKILL", arguments)
    shown = command.ckptkit(*arguments)
    assert "resumed: an earlier call had written 33.6 MB\n" in shown.stdout


@pytest.mark.slow
def test_what_goes_on_is_counted(large: Path, tmp_path: Path) -> None:
    assert consolidate(large, tmp_path / "whole").resumed_bytes == 0
    for words in (["consolidate", str(large)], ["average", str(large), str(large)]):
        run_and_die(2, "SIGKILL", [*words, str(tmp_path / words[0])])
    assert consolidate(large, tmp_path / "consolidate").resumed_bytes == 32 << 20
    assert average([large, large], tmp_path / "average").resumed_bytes == 32 << 20
    run_and_die(1, "SIGKILL", ["consolidate", str(large), str(tmp_path / "parts"), "--part", "1/2"])
    part = consolidate(large, tmp_path / "parts", part="1/2")
    assert not part.is_finished
    assert 0 < part.resumed_bytes < 32 << 20


@pytest.mark.nightly
def test_a_mean_that_was_killed_goes_on(large: Path, tmp_path: Path) -> None:
    arguments = ["average", str(large), str(large), str(tmp_path / "out")]
    assert run_and_die(2, "SIGKILL", arguments).returncode == -9
    assert bytes_written(arguments) == 32 << 20
    average([large, large], tmp_path / "whole")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")


def test_the_plan_is_the_same_for_all(large: Path, tmp_path: Path) -> None:
    plans = {consolidate(large, tmp_path / "out", part=nth(number, 2)).plan for number in (0, 1)}
    assert len(plans) == 1
    assert finalize(tmp_path / "out").plan in plans
    other = consolidate(large, tmp_path / "other", dtype="bf16", dry_run=True)
    assert other.plan not in plans


def test_a_missing_part_is_named(large: Path, tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        finalize(tmp_path / "out")
    for number in (0, 3):
        consolidate(large, tmp_path / "out", part=nth(number, 4))
    with pytest.raises(Occupied, match="2 of 4 parts are not done: 2/4, 3/4"):
        finalize(tmp_path / "out")
    for number in (1, 2, 1):
        consolidate(large, tmp_path / "out", part=nth(number, 4))
    assert finalize(tmp_path / "out").is_finished


def test_a_changed_source_is_begun_anew(large: Path, tmp_path: Path) -> None:
    """Parts of two sources never meet in one output."""
    source = tmp_path / "ckpt"
    shutil.copytree(large, source)
    consolidate(source, tmp_path / "out", part=nth(0, 2))
    os.utime(source / "__0_0.distcp", (0, 0))
    consolidate(source, tmp_path / "out", part=nth(1, 2))
    with pytest.raises(Occupied, match="1 of 2 parts are not done: 1/2"):
        finalize(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"dtype": "bf16", "part": "2/2"},
            "parts 1/2 of an unfinished output have other options: dtype: expected none, found bf16",
        ),
        ({"part": "2/3"}, "parts 1/2 of an unfinished output have other options: part: expected I/2, found I/3"),
        ({}, "parts 1/2 of an unfinished output have other options: part: expected I/2, found none"),
    ],
)
def test_parts_are_not_discarded_for_other_options(
    large: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    consolidate(large, tmp_path / "out", part="1/2")
    with pytest.raises(Occupied, match=re.escape(said)):
        consolidate(large, tmp_path / "out", **options)
    consolidate(large, tmp_path / "out", part="2/2")
    assert finalize(tmp_path / "out").is_finished


def test_damage_in_any_part_is_found(large: Path, tmp_path: Path) -> None:
    source = tmp_path / "ckpt"
    shutil.copytree(large, source)
    data = bytearray((source / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (source / "__0_0.distcp").write_bytes(data)
    with pytest.raises(Corrupt):
        for number in range(7):  # that cut through tensors
            consolidate(source, tmp_path / "out", part=nth(number, 7))
        finalize(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("left", [None, 0, 1000])
def test_what_is_gone_of_a_part_is_missed(large: Path, tmp_path: Path, left: int | None) -> None:
    """A scratch disk is tidied by age; the journals are younger than what they speak of."""
    out = tmp_path / "out"
    for number in range(2):
        consolidate(large, out, part=nth(number, 2))
    made = staging_path(out) / "model.safetensors"
    if left is None:
        made.unlink()
    else:
        os.truncate(made, left)
    with pytest.raises(Corrupt, match=f"expected [0-9]+ bytes, .*found {left or 0}") as raised:
        finalize(out)
    assert raised.value.hint is not None
    assert str(staging_path(out)) in raised.value.hint
    assert not out.exists()


def run_and_die(after: int, how: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """`ckptkit` with these arguments in a process that gets a signal when it has finished `after` units."""
    code = (
        "import os, signal, sys\n"
        "from ckptkit.engine.ledger import Journal\n"
        "from ckptkit.cli import main\n"
        "note, left = Journal.record_unit, [int(sys.argv.pop(1))]\n"
        "number = signal.Signals[sys.argv.pop(1)]\n"
        "def note_and_die(self, unit, ledger):\n"
        "    note(self, unit, ledger)\n"
        "    left[0] -= 1\n"
        "    if not left[0]:\n"
        "        os.kill(os.getpid(), number)\n"
        "Journal.record_unit = note_and_die\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, str(after), how, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"), nightly_but([("SIGKILL", -9)], [("SIGKILL", -9), ("SIGINT", 130), ("SIGTERM", 143)])
)
def test_the_same_command_goes_on(large: Path, tmp_path: Path, how: str, code: int) -> None:
    out = tmp_path / "out"
    ended = run_and_die(2, how, ["consolidate", str(large), str(out)])
    assert ended.returncode == code, ended.stderr
    assert not out.exists()
    assert how == "SIGKILL" or "the same command continues" in ended.stderr
    copied = bytes_written(["consolidate", str(large), str(out)])
    assert copied == 32 << 20
    consolidate(large, tmp_path / "whole")
    assert files_in(out) == files_in(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def bytes_written(arguments: Sequence[str]) -> int:
    """Bytes of tensors that `ckptkit` with these arguments writes."""
    code = (
        "import sys\n"
        "from ckptkit.engine import copy\n"
        "from ckptkit.cli.commands import app\n"
        "written, write_block = [], copy.write_block\n"
        "def count(worker, block, output):\n"
        "    written.append(block.nbytes)\n"
        "    return write_block(worker, block, output)\n"
        "copy.write_block = count\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "print(sum(written))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


@pytest.mark.slow
def test_a_part_that_was_killed_goes_on(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["consolidate", str(large), str(out), "--part"]
    assert run_and_die(2, "SIGKILL", [*arguments, "2/2"]).returncode == -9
    consolidate(large, out, part=nth(0, 2))
    with pytest.raises(Occupied, match="2/2"):
        finalize(out)
    assert 0 < bytes_written([*arguments, "2/2"]) < 32 << 20
    finalize(out)
    consolidate(large, tmp_path / "whole")
    assert files_in(out) == files_in(tmp_path / "whole")


@pytest.mark.slow
def test_another_command_does_not_go_on_with_it(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_and_die(2, "SIGKILL", ["consolidate", str(large), str(out)])
    assert bytes_written(["consolidate", str(large), str(out), "--dtype", "bf16"]) == 32 << 20
    consolidate(large, tmp_path / "whole", dtype="bf16")
    assert files_in(out) == files_in(tmp_path / "whole")


def reshard_by_ranks(large: Path, out: Path, **env: str) -> dict[str, Any]:
    """What three ranks of torchrun say that they made."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [*torchrun, "-m", "ckptkit", "reshard", str(large), str(out), "--to", "5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})
    assert done.returncode == 0, done.stdout + done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


@pytest.mark.slow
def test_ranks_of_torchrun_share_the_work(large: Path, tmp_path: Path) -> None:
    assert reshard_by_ranks(large, tmp_path / "out")["finished"]
    reshard(large, tmp_path / "whole", to=5)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.nightly
def test_the_first_rank_waits_for_one_that_has_nothing_to_do(large: Path, tmp_path: Path) -> None:
    """An earlier job did every share, and died. Who is late must not find that all is over."""
    for number in range(3):
        reshard(large, tmp_path / "out", to=5, part=nth(number, 3))
    (tmp_path / "late").mkdir()
    (tmp_path / "late/sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('RANK') == '1':\n    time.sleep(4)\n"
    )
    assert reshard_by_ranks(large, tmp_path / "out", PYTHONPATH=str(tmp_path / "late"))["finished"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["late", "out"]


def do_part(start: float, source: Path, out: Path, number: int, count: int) -> None:
    time.sleep(max(0.0, start - time.monotonic()))
    reshard(source, out, to=3, part=nth(number, count))


@pytest.mark.slow
def test_parts_begun_at_once_are_the_whole(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.tensor_parallel).root
    reshard(source, tmp_path / "whole", to=3)
    context = multiprocessing.get_context("fork")
    for attempt in range(8):
        out = tmp_path / f"out{attempt}"
        start = time.monotonic() + 0.05
        parts = [context.Process(target=do_part, args=(start, source, out, number, 4)) for number in range(4)]
        for process in parts:
            process.start()
        for process in parts:
            process.join()
        assert [process.exitcode for process in parts] == [0] * 4
        finalize(out)
        assert files_in(out) == files_in(tmp_path / "whole")


def test_one_part_at_a_time_makes_the_files(large: Path, tmp_path: Path) -> None:
    """What others have written is not cut off, nor a file planned with that another is just making."""
    out, hidden = tmp_path / "out", staging_path(tmp_path / "out")
    consolidate(large, out, part=nth(0, 2))
    first = Stage(out, key=find_resume_key(hidden), is_part=True).open()
    (hidden / "model.safetensors").unlink()
    with ThreadPoolExecutor() as pool:
        second = pool.submit(consolidate, large, out, part=nth(1, 2))
        with pytest.raises(TimeoutError):
            second.result(timeout=0.5)
        assert not (hidden / "model.safetensors").exists()
        first.unlock_for_other_parts()
        assert not second.result().is_finished
    assert (hidden / "model.safetensors").exists()
    first.unlock_for_resume()


def test_a_command_that_a_rank_starts_is_alone(large: Path, tmp_path: Path) -> None:
    """It inherits the environment of torchrun, but has nobody to wait for."""
    command = [str(Path(sys.executable).with_name("ckptkit")), "consolidate", str(large), str(tmp_path / "out")]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}
    subprocess.run(command, env={**os.environ, **ranks}, capture_output=True, check=True, timeout=60)
    assert (tmp_path / "out/model.safetensors").exists()


def test_parts_at_work_are_not_taken_away(large: Path, tmp_path: Path) -> None:
    """While a part is being made nobody finishes, nor begins something else in its place."""
    out = tmp_path / "out"
    tried: list[Occupied] = []

    def meddle(_done: int, _total: int) -> None:
        if not tried:
            with pytest.raises(Occupied) as finishing:
                finalize(out)
            with pytest.raises(Occupied) as beginning:
                consolidate(large, out, dtype="bf16")
            tried.extend([finishing.value, beginning.value])

    consolidate(large, out, part=nth(0, 2), progress=meddle)
    assert all("still being made" in error.message for error in tried)
    assert staging_path(out).exists()
