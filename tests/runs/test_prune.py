"""What prune keeps, deletes and leaves alone, on real checkpoints: whole, unfinished, damaged and foreign ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from glob import glob
from pathlib import Path

import pytest
from torch import nn

from ckptkit.errors import NotACheckpoint, Occupied, Usage
from ckptkit.io.disk import lock_path, staging_path
from ckptkit.io.locks import acquire_lock, release_lock
from ckptkit.io.staging import Stage
from ckptkit.runs.deletion import delete_checkpoint, locked_for_deletion, set_pin
from ckptkit.runs.prune import Pruned, prune
from ckptkit.runs.retention import dump_metrics
from ckptkit.trainers.ckptkit import METRICS
from ckptkit.training.saving.run import Run
from tests import producers
from tests.conftest import Produce

NAMES = ("ckpt-{}", "checkpoint-{}", "step-{}", "global_step{}", "iter_{:07}")


@pytest.fixture
def run(produce: Produce, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 5 to 25, named as five trainers name them, the newest the oldest by the clock."""
    for i, name in enumerate(NAMES, 1):
        path = tmp_path / "run" / name.format(5 * i)
        place(produce, path, {"loss": abs(10 - 5 * i)})
        for file in (*path.iterdir(), path):
            os.utime(file, (10**9 - i, 10**9 - i))
    return tmp_path / "run"


def place(produce: Produce, path: Path, metrics: Mapping[str, float] | None = None) -> None:
    shutil.copytree(produce(producers.under_model).root, path)
    if metrics is not None:
        (path / METRICS).write_bytes(dump_metrics(0, metrics))


def steps(entries: tuple[object, ...]) -> list[object]:
    return [getattr(entry, "step", None) for entry in entries]


def names(path: Path) -> set[str]:
    return {found.name for found in path.iterdir()}


def reasons(done: Pruned) -> dict[str, str]:
    return {entry.path.name: entry.reason for entry in done.other}


def test_nothing_is_deleted_without_a_yes(run: Path) -> None:
    before = sorted(run.rglob("*"))
    done = prune(run, keep_last=2, keep_every=15, keep_best="loss")
    assert sorted(run.rglob("*")) == before
    assert (steps(done.keep), steps(done.delete), done.other) == ([25, 20, 15, 10], [5], ())
    assert (done.deleted, done.freed_bytes) == (False, 0)
    assert [entry.reason for entry in done.keep][:3] == ["one of the last 2", "one of the last 2", "a multiple of 15"]


def test_only_what_nothing_keeps_is_deleted(run: Path) -> None:
    size = sum(file.stat().st_size for name in ("ckpt-5", "step-15") for file in (run / name).iterdir())
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.parent.name not in ("ckpt-5", "step-15", "run")}
    done = prune(run, keep_last=2, keep_best="loss:min:1", yes=True)
    assert (steps(done.keep), steps(done.delete)) == ([25, 20, 10], [15, 5])
    assert (done.deleted, done.freed_bytes) == (True, size)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == kept
    again = prune(run, keep_last=2, keep_best="loss:min:1", yes=True)
    assert (steps(again.keep), again.delete, again.freed_bytes) == ([25, 20, 10], (), 0)


def test_what_lies_in_a_deleted_checkpoint_is_named(run: Path) -> None:
    gone = prune(run, keep_last=1).delete[-1].path
    (gone / "eval").mkdir()
    (gone / "eval" / "results.json").write_text("{}")
    (gone / "notes.txt").touch()
    entry = prune(run, keep_last=1).delete[-1]
    assert entry.reason == "no rule keeps it; it also contains eval, notes.txt"


@pytest.mark.parametrize("rule", [{"keep_every": 1000}, {"keep_last": 1}])
def test_the_newest_by_its_step_always_stays(run: Path, rule: Mapping[str, object]) -> None:
    done = prune(run, **rule, yes=True)  # type: ignore[arg-type]
    assert steps(done.keep) == [25]
    assert names(run) == {"iter_0000025"}


def test_what_is_not_whole_neither_counts_nor_goes(produce: Produce, run: Path, tmp_path: Path) -> None:
    for step in (3, 30, 31, 32, 33):
        place(produce, run / f"ckpt-{step}")
    (run / "ckpt-3" / ".metadata").unlink()
    (run / "ckpt-30" / ".metadata").unlink()
    (shard,) = (run / "ckpt-31").glob("*.distcp")
    os.truncate(shard, shard.stat().st_size - 1)
    (run / "ckpt-32" / ".metadata").write_bytes(b"")
    (run / "ckpt-33" / METRICS).write_bytes(b"{")
    (run / "ckpt-34").mkdir()
    (run / "logs").mkdir()
    place(produce, run / "epoch-40")
    place(produce, run / "final")
    place(produce, tmp_path / "elsewhere" / "ckpt-50")
    (run / "ckpt-50").symlink_to(tmp_path / "elsewhere" / "ckpt-50")
    (run / "ckpt-60").write_bytes(b"a file")
    before = {path: path.lstat().st_ino for path in run.rglob("*")}
    done = prune(run, keep_last=1, yes=True)
    assert (steps(done.keep), steps(done.delete)) == ([25], [20, 15, 10, 5])
    found = reasons(done)
    assert found.keys() == {
        *("ckpt-3", "ckpt-30", "ckpt-31", "ckpt-32", "ckpt-33", "ckpt-34", "logs", "epoch-40", "final", "ckpt-50")
    }
    assert "did not finish" in found["ckpt-30"]
    assert shard.name in found["ckpt-31"]
    assert ".metadata" in found["ckpt-32"]
    assert METRICS in found["ckpt-33"]
    assert found["ckpt-34"] == "no checkpoint in any known format"
    assert found["ckpt-50"] == "a symbolic link"
    gone = {path for path in before if set(path.parts) & {"ckpt-5", "checkpoint-10", "step-15", "global_step20"}}
    assert {path: path.lstat().st_ino for path in run.rglob("*")} == {p: n for p, n in before.items() if p not in gone}


@pytest.mark.parametrize("part", ["optimizer_0", "pytorch_model_fsdp_0"])
def test_one_damaged_part_is_enough(produce: Produce, tmp_path: Path, part: str) -> None:
    for step in (1, 2, 3):
        shutil.copytree(produce(producers.accelerate).root, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-3" / part / "__1_0.distcp").unlink()
    done = prune(tmp_path, keep_last=1)
    assert (steps(done.keep), steps(done.delete)) == ([2], [1])
    assert reasons(done)["checkpoint-3"].startswith(f"incomplete or damaged: {part}")


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_a_shard_of_another_step_is_noticed(tmp_path: Path, form: str) -> None:
    """By the manifest that was saved with it, so the one before counts as the newest. Safetensors have no checksums."""
    for step in (1, 2, 3):
        Run(tmp_path, state_dict=form).save(step, nn.Linear(2, 2), metrics={"loss": step})
    data = min(path for path in (tmp_path / "ckpt-3").glob("*") if path.suffix in (".distcp", ".pt"))  # of tensors
    shutil.copyfile(tmp_path / "ckpt-1" / data.name, data)
    done = prune(tmp_path, keep_last=1)
    assert (steps(done.keep), steps(done.delete)) == ([2], [1])
    assert data.name in reasons(done)["ckpt-3"]


def test_what_is_being_replaced_stays(run: Path) -> None:
    lock = acquire_lock(lock_path(run / "step-15"))
    done = prune(run, keep_last=1, yes=True)
    assert {entry.step: entry.reason for entry in done.keep} == {25: "one of the last 1", 15: "being written"}
    release_lock(lock, lock_path(run / "step-15"))
    assert names(run) == {"iter_0000025", "step-15"}


def test_what_is_pinned_or_meant_by_a_tracker_stays(run: Path) -> None:
    set_pin(run / "ckpt-5")
    (run / "latest").write_text("global_step20\n")
    (run / "latest_checkpointed_iteration.txt").write_text("15")
    (run / "best").symlink_to("checkpoint-10/.metadata")
    done = prune(run, keep_every=5, yes=True)
    assert {entry.step: entry.reason for entry in done.keep} == {
        25: "the newest, a multiple of 5",
        20: "`latest` names it, a multiple of 5",
        15: "`latest_checkpointed_iteration.txt` names it, a multiple of 5",
        10: "`best` names it, a multiple of 5",
        5: "pinned, a multiple of 5",
    }
    assert steps(prune(run, keep_last=1, yes=True).keep) == [25, 20, 15, 10, 5]


def test_what_is_pinned_while_others_are_deleted_stays(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete_and_pin(path: Path) -> None:
        delete_checkpoint(path)
        set_pin(run / "step-15")
        (run / "latest").write_text("checkpoint-10")

    monkeypatch.setattr("ckptkit.runs.run_backend.delete_checkpoint", delete_and_pin)
    done = prune(run, keep_last=1, yes=True)
    assert [(entry.step, entry.reason) for entry in done.keep] == [
        (25, "one of the last 1"),
        (15, "pinned"),
        (10, "`latest` names it"),
    ]
    assert steps(done.delete) == [20, 5]
    assert done.freed_bytes == sum(entry.nbytes for entry in done.delete)
    assert names(run) == {".pins", "latest", "checkpoint-10", "step-15", "iter_0000025"}


def test_names_of_epochs_and_batches(produce: Produce, tmp_path: Path) -> None:
    for name in ("epoch_3", "epoch=4.ckpt", "ep1-ba2", "epoch=1-step=3.ckpt", "epoch_1_step_4"):
        place(produce, tmp_path / name)
    done = prune(tmp_path, keep_last=1, yes=True)
    assert (steps(done.keep), steps(done.delete)) == ([4], [3, 2])
    assert reasons(done) == dict.fromkeys(("epoch_3", "epoch=4.ckpt"), "its name does not end with a step")


def test_a_metric_that_no_checkpoint_has_is_a_slip(produce: Produce, tmp_path: Path) -> None:
    for step in (1, 2):
        place(produce, tmp_path / f"ckpt-{step}", {"loss": step})
    with pytest.raises(Usage, match="no checkpoint has a finite metric `los`") as raised:
        prune(tmp_path, keep_best="los:min", yes=True)
    assert raised.value.hint == "use loss"
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt-1", "ckpt-2"}


def test_the_best_by_what_a_trainer_of_transformers_logged(produce: Produce, tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 9.0)):
        place(produce, tmp_path / f"checkpoint-{step}")
        state = {"global_step": step, "log_history": [{"step": step, "eval_loss": loss}]}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    done = prune(tmp_path, keep_best="eval_loss")
    assert {entry.step: entry.reason for entry in done.keep} == {4: "the newest", 2: "eval_loss 1 is among the best"}


def test_what_dead_runs_have_left_goes_too(run: Path) -> None:
    staging_path(run / "ckpt-99").mkdir()
    alive = Stage(run / "ckpt-30").open()
    prune(run, keep_last=1)
    assert staging_path(run / "ckpt-99").exists()
    prune(run, keep_last=1, yes=True)
    assert names(run) == {"iter_0000025", alive.path.name, lock_path(alive.dst).name}
    alive.discard()


def test_two_at_once(run: Path) -> None:
    with locked_for_deletion(run):
        with pytest.raises(Occupied):
            prune(run, keep_last=1, yes=True)
        assert steps(prune(run, keep_last=1).delete) == [20, 15, 10, 5]  # to look is always possible
    assert len(names(run)) == 5


def test_requests_that_make_no_sense(run: Path, tmp_path: Path) -> None:
    with pytest.raises(Usage, match="no rule says what to keep"):
        prune(run, yes=True)
    with pytest.raises(Usage, match="keep_last: expected 1 or more, found 0"):
        prune(run, keep_last=0, yes=True)
    with pytest.raises(Usage, match="expected METRIC"):
        prune(run, keep_best="loss:low", yes=True)
    with pytest.raises(Usage, match="the lowest or the highest `accuracy` is best, found `accuracy:2`") as raised:
        prune(run, keep_best="accuracy:2", yes=True)
    assert raised.value.hint == "write `accuracy:max` or `accuracy:min`"
    assert len(names(run)) == 5
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "absent", tmp_path / "empty", run / "ckpt-5"):
        with pytest.raises(NotACheckpoint):
            prune(path, keep_last=1, yes=True)
    with pytest.raises(NotACheckpoint, match="this is a checkpoint, not a run") as caught:
        prune(run / "ckpt-5", keep_last=1, yes=True)
    assert caught.value.hint == f"pass the run, `{run}`"
    assert names(tmp_path / "empty") == set()


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_no_half_checkpoint(produce: Produce, tmp_path: Path) -> None:
    """Killed when it has removed some files, five times; each run goes on where the one before was ended."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "ckptkit", "prune", str(run), "--keep-last", "1", "--yes"]
    cut_short = 0
    for _ in range(50):
        for step in (1, 2, 3):
            if not (run / f"ckpt-{step}").exists():
                place_large(produce, run / f"ckpt-{step}")
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
            before = hidden_files(run)
            while running.poll() is None and hidden_files(run) in (before, 0):
                os.sched_yield()
            running.send_signal(signal.SIGKILL)
        cut_short += hidden_files(run) > 0
        assert {len(list(path.iterdir())) for path in run.glob("ckpt-*")} == {len(list((run / "ckpt-3").iterdir()))}
        if cut_short == 5:
            break
    assert cut_short == 5
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert names(run) == {"ckpt-3"}


def place_large(produce: Produce, path: Path) -> None:
    """A checkpoint that takes a while to delete."""
    place(produce, path)
    for i in range(400):
        (path / f"file-{i}").touch()


def hidden_files(run: Path) -> int:
    """Files of checkpoints that are being deleted; pathlib's own glob fails where a directory goes meanwhile."""
    return len(glob(".ckpt-*.leaving/*", root_dir=run, include_hidden=True))
