"""`ckptkit train s3://...` as users type it: killed, resumed on other ranks, exported, proved, copied and opened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import ckptkit
from ckptkit.errors import IOFailure, Occupied, Usage
from ckptkit.io.destination import to_destination
from ckptkit.io.path import to_path
from ckptkit.io.small_files import open_line_writer, require_writable_store
from ckptkit.training.metrics import METRICS
from ckptkit.training.models.config import ModelConfig
from ckptkit.training.models.llama import Llama
from ckptkit.training.saving.run import Run
from tests.command import ckptkit as ckptkit_here
from tests.s3 import CLAIM, S3, Place, forget, make_place
from tests.training.test_commands import invoke

SIZE = ["--model", "3m", "--sequence-length", "32", "--batch-size", "6", "--warmup", "2", "--device", "cpu"]
TINY = ["--model", "tiny", "--sequence-length", "32", "--batch-size", "4", "--device", "cpu", "--nproc", "2"]
STEPS, EVERY, KILLED = 6, 2, 4


@dataclass(frozen=True, slots=True)
class User:
    """Who types commands in a directory of their own, with a bucket that is empty at first."""

    home: Path
    place: Place

    @property
    def run(self) -> str:
        return f"s3://{self.place.name}/run"

    def command(self, *words: str, launcher: Sequence[str] = ()) -> list[str]:
        return [sys.executable, "-m", *launcher, "ckptkit", *words]

    def type(self, *words: str, launcher: Sequence[str] = (), code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command, which ends with this exit code."""
        if launcher:
            command = self.command(*words, launcher=launcher)
            done = subprocess.run(command, cwd=self.home, capture_output=True, text=True, check=False)
        elif words[0] == "train" and code == 0:  # in this process, whose ranks have a server that is warm
            forget()
            trained = invoke(self.home, *words)
            done = subprocess.CompletedProcess(words, trained.exit_code, trained.stdout, trained.stderr)
        else:
            done = ckptkit_here(*words, cwd=self.home)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    @contextmanager
    def starting(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Start a command and its processes, which are one group; kill those that are left at the end."""
        pipe = subprocess.PIPE
        with subprocess.Popen(
            self.command(*words), cwd=self.home, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        ) as process:
            try:
                yield process
            finally:
                kill(process)

    def read(self, name: str) -> bytes:
        """The content of an object of the run."""
        self.place.files.invalidate_cache()
        found: bytes = self.place.files.cat_file(f"{self.place.name}/run/{name}")
        return found

    def names(self) -> set[str]:
        base = f"{self.place.name}/run/"
        return {key.removeprefix(base) for key in self.place.files.find(base, refresh=True)}

    def listed(self) -> dict[int, bool]:
        """Which steps `ls` shows, and whether they are complete."""
        found = json.loads(self.type("ls", self.run, "--json").stdout)
        return {one["step"]: one["complete"] for one in found["checkpoints"]}

    def looked_up(self) -> dict[int, bool]:
        """The same without a command."""
        forget()
        return {one.step: one.is_complete for one in ckptkit.ls(self.run).checkpoints if one.step is not None}

    def left_here(self) -> set[str]:
        """The names of the files that commands left on the disk."""
        return {path.name for path in self.home.rglob("*") if path.is_file()}


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a command and all processes that it started, as the end of a container does."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def user(moto: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[User]:
    place = make_place(moto, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home/cache"))
    (tmp_path / "home").mkdir()
    yield User(tmp_path / "home", place)
    forget()


def steps_in(lines: str | bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


@pytest.mark.slow
def test_a_run_that_was_killed_in_a_save_goes_on_elsewhere_and_is_exported(user: User, tmp_path: Path) -> None:
    train = ["train", user.run, *SIZE, "--steps", str(STEPS), "--save-every", str(EVERY)]
    user.type("train", str(tmp_path / "whole"), *train[2:], "--nproc", "2")
    expected = steps_in((tmp_path / "whole" / METRICS).read_text())

    with user.starting(*train, "--nproc", "2") as process:
        where = rf"PUT .*ckpt-{KILLED}/__1_0.distcp.*partNumber=2"
        user.place.server.fail(where, first=lambda: kill(process), status=500)
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    assert f"ckpt-{KILLED}/{CLAIM}" in user.names()
    assert f"ckpt-{KILLED}/.metadata" not in user.names()
    assert user.listed() == {EVERY: True, KILLED: False}
    assert [one["step"] for one in steps_in(user.read(METRICS))] == [1, 2]

    done = user.type("train", user.run, "--resume", "auto", "--nproc", "3", "--keep-last", "2")
    assert f"resuming on 3 ranks: {user.run} is at step {EVERY} of {STEPS}" in done.stderr
    assert "warning" not in done.stderr.lower()
    assert [line.split()[1] for line in done.stdout.splitlines()] == [f"{step}/{STEPS}" for step in (3, 4, 5, 6)]
    found = steps_in(user.read(METRICS))
    assert [one["step"] for one in found] == [one["step"] for one in expected]
    assert [one["tokens"] for one in found] == [one["tokens"] for one in expected]
    assert found[EVERY]["loss"] == pytest.approx(expected[EVERY]["loss"], rel=1e-5)
    assert [one["loss"] for one in found] == pytest.approx([one["loss"] for one in expected], rel=1e-4)
    assert user.listed() == {KILLED: True, STEPS: True}
    own = {name.partition("/")[0] for name in user.names()}
    assert own == {f"ckpt-{KILLED}", f"ckpt-{STEPS}", "config.json", METRICS, "train.toml"}
    assert user.left_here() == {"tokens.bin", "tokens.json"}

    exported = f"s3://{user.place.name}/exported"
    user.type("consolidate", user.run, exported)
    forget()
    user.place.server.requests.clear()
    proved = user.type("verify", "--fast", exported)
    assert "verified 2 files, 11.9 MB, by the store's CRC-32" in proved.stderr
    server = user.place.server
    asked = [one for one in server.requests if re.search(r"model\.safetensors($|\?)", one.what)]
    assert [one.what.partition(" ")[0] for one in asked] == ["GET", "HEAD"]
    assert asked[0].start == 0  # its header
    assert server.nbytes < 100_000
    user.type("cp", exported, "out")
    require_same_model(user, user.home / "out")

    shared = f"s3://{user.place.name}/shared"
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    user.type("consolidate", user.run, shared, launcher=torchrun)
    user.type("cp", shared, "again")
    assert files_in(user.home / "again") == files_in(user.home / "out")


def files_in(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir() if path.name != "ckptkit.json"}


def require_same_model(user: User, out: Path) -> None:
    """Require the weights and logits of the last checkpoint, as torch itself reads it, of what transformers opens."""
    transformers = pytest.importorskip("transformers")
    ours = Llama(ModelConfig.from_config_json(out / "config.json"))
    state = {"model": dict.fromkeys(ours.state_dict(), torch.empty(0)) | ours.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch speaks of a single process
        dcp.load(state, storage_reader=FsspecReader(f"{user.run}/ckpt-{STEPS}"))
    ours.load_state_dict(state["model"])
    weights = load_file(out / "model.safetensors")
    assert {name for name, tensor in weights.items() if not torch.equal(tensor, state["model"][name])} == set()
    assert state["model"].keys() - weights.keys() <= {"lm_head.weight"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(2 * 32).reshape(2, 32)
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours(ids))


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_sent_and_saves_when_asked_to_end(user: User) -> None:
    seen = threading.Event()
    user.place.server.fail(r"PUT .*ckpt-3/__0_0.distcp", first=lambda: seen.wait(120), times=100)
    with user.starting("train", user.run, *TINY, "--steps", "100000", "--save-every", "3", "--background") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split()[1] for _ in range(4)]
        assert "ckpt-3/.metadata" not in user.names()
        process.send_signal(signal.SIGTERM)
        seen.set()
        _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert [line.partition("/")[0] for line in lines] == ["1", "2", "3", "4"]
    found = user.looked_up()
    assert found[3]
    assert all(found.values())
    assert len(steps_in(user.read(METRICS))) == max(found)


@pytest.mark.nightly
def test_a_store_that_fails_ends_the_training_and_keeps_what_is_there(user: User) -> None:
    user.place.server.fail(r"PUT .*ckpt-2/__1_0.distcp", status=403, code="AccessDenied", times=100)
    command = ["train", user.run, *TINY, "--steps", "3", "--save-every", "1", "--background"]
    done = user.type(*command, code=4)
    assert f"error: {user.run}/ckpt-2/__1_0.distcp: rank 1 could not save it: access denied" in done.stderr
    assert "s3:PutObject" in done.stderr
    assert user.looked_up() == {1: True, 2: False}
    assert all(part.is_ok for part in ckptkit.verify(f"{user.run}/ckpt-1"))
    user.place.server.faults.clear()
    user.type(*command, "--resume", "auto")
    assert user.looked_up() == {1: True, 2: True, 3: True}
    assert [one["step"] for one in steps_in(user.read(METRICS))] == [1, 2, 3]


@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_found_before_the_first_step(user: User) -> None:
    user.place.server.fail("PUT .*probe", status=403, code="AccessDenied", times=100)
    denied = user.type("train", *TINY, "--steps", "1", user.run, code=4)
    assert denied.stdout == ""
    assert f"error: {user.run}/.ckptkit-probe: access denied" in denied.stderr
    assert user.left_here() == set()
    user.place.server.faults.clear()
    with pytest.raises(IOFailure, match="the bucket does not exist") as raised:
        require_writable_store(to_destination("s3://absent-bucket/run"))
    assert str(raised.value.path) == "s3://absent-bucket"
    require_writable_store(to_destination(user.run))
    assert user.names() == set()
    user.place.server.fail("DELETE .*probe", status=403, code="AccessDenied", times=100)
    with pytest.raises(IOFailure, match="access denied"):
        require_writable_store(to_destination(user.run))


@pytest.mark.nightly
def test_a_second_training_of_the_run_ends_the_first_and_leaves_whole_checkpoints(user: User) -> None:
    """The first is frozen in the middle of a save; what it had sent arrives when the second has ended."""
    frozen, go_on = threading.Event(), threading.Event()

    def freeze() -> None:
        os.killpg(first.pid, signal.SIGSTOP)
        frozen.set()
        go_on.wait(300)

    with user.starting("train", user.run, *TINY, "--steps", "2", "--save-every", "1") as first:
        user.place.server.fail(r"PUT .*ckpt-2/__0_0.distcp", first=freeze)
        assert frozen.wait(300)
        user.type("train", user.run, "--nproc", "1", "--steps", "3", "--resume", "auto")
        go_on.set()
        os.killpg(first.pid, signal.SIGCONT)
        _, errors = first.communicate()
    assert first.returncode == 5, errors
    assert "Traceback" not in errors
    assert user.looked_up() == {1: True, 2: True, 3: True}
    found = {problem.message for part in ckptkit.verify(f"{user.run}/ckpt-2") for problem in part.problems}
    assert found <= {"the manifest does not list this file"}  # a shard of a rank that the second training does not have
    assert [one["step"] for one in steps_in(user.read(METRICS))] == [1, 2, 3]


def test_lines_of_two_writers_are_not_mixed(user: User) -> None:
    path = to_destination(user.run) / METRICS
    ours, theirs = open_line_writer(path), open_line_writer(path)
    user.place.server.fail("PUT .*metrics", after=0)  # the answer is lost, and the library asks again
    ours.add_line(b"1\n")
    ours.flush_lines()
    ours.add_line(b"2\n")
    ours.flush_lines()
    theirs.add_line(b"x\n")
    with pytest.raises(Occupied, match="another process has written") as raised:
        theirs.flush_lines()
    assert raised.value.path == path
    assert user.read(METRICS) == b"1\n2\n"
    again = open_line_writer(path)
    again.add_line(b"3\n")
    again.flush_lines()
    assert user.read(METRICS) == b"1\n2\n3\n"


@pytest.mark.nightly
def test_a_damaged_checkpoint_is_replaced_when_its_step_is_saved_again(user: User) -> None:
    user.type("train", user.run, *TINY, "--steps", "2", "--save-every", "1")
    damaged = bytearray(user.read("ckpt-2/__1_0.distcp"))
    damaged[len(damaged) // 2] ^= 4
    user.place.files.pipe_file(f"{user.place.name}/run/ckpt-2/__1_0.distcp", bytes(damaged))
    done = user.type("train", user.run, "--resume", "auto", "--nproc", "1")
    assert f"warning: {user.run}/ckpt-2 cannot be loaded: " in done.stderr
    assert f"resuming from {user.run}/ckpt-1, ckpt-2 is replaced when its step is saved again" in done.stderr
    assert user.looked_up() == {1: True, 2: True}
    found = {problem.message for part in ckptkit.verify(f"{user.run}/ckpt-2") for problem in part.problems}
    assert found <= {"the manifest does not list this file"}  # a shard of a rank that the second training does not have
    assert [one["step"] for one in steps_in(user.read(METRICS))] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"state_dict": "full"}, "state dict `full` cannot go straight to a store"),
        ({"state_dict": "hf"}, "state dict `hf` cannot go straight to a store"),
        ({"tensorboard": True}, "TensorBoard appends to its files"),
        ({"data": to_path("s3://bucket/text")}, "ckptkit trains on local data only"),
    ],
)
def test_what_cannot_lie_in_a_store_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(Usage, match=said) as raised:
        ckptkit.train("s3://bucket/run", **settings)
    assert raised.value.hint


@pytest.mark.nightly
def test_settings_weights_and_checkpoints_come_from_the_store(user: User, tmp_path: Path) -> None:
    user.type("train", user.run, *TINY, "--steps", "2", "--save-every", "1")
    settings = ["--config", f"{user.run}/train.toml", "--nproc", "1"]
    user.type("train", "resumed", *settings, "--resume", f"{user.run}/ckpt-1")
    here = steps_in((user.home / "resumed" / METRICS).read_text())
    there = steps_in(user.read(METRICS))
    assert [one["step"] for one in here] == [2]
    assert here[0]["loss"] == pytest.approx(there[1]["loss"], rel=1e-5)
    adapters = f"s3://{user.place.name}/adapters"
    user.type("train", adapters, *settings, "--weights", user.run, "--lora-rank", "2", "--state-dict", "adapter")
    forget()
    latest = Run(adapters).latest()
    assert latest is not None
    assert latest.step == 2
    with pytest.raises(Usage, match="remote"):
        ckptkit.smoke(user.run, tmp_path / "out")
