"""Checkpoints go without a trace, and at no moment is half of one under its name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptkit.errors import IOFailure, Occupied
from ckptkit.io.disk import lock_path
from ckptkit.io.locks import acquire_lock, release_lock
from ckptkit.runs.deletion import delete_checkpoint, locked_for_deletion
from ckptkit.runs.run_backend import LocalKeeper

NAMES = ("ckpt-1", "checkpoint-1", "step-1", "global_step1", "iter_0000001")


def make(path: Path) -> None:
    (path / "training").mkdir(parents=True)
    (path / "training" / "data").touch()
    (path / "data").touch()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left(tmp_path: Path, name: str) -> None:
    make(tmp_path / name)
    with locked_for_deletion(tmp_path):
        delete_checkpoint(tmp_path / name)
        assert [path.name for path in tmp_path.iterdir()] == [".prune.ckptkit.lock"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_goes_out_of_sight_first_and_whoever_comes_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make(tmp_path / name)
    with monkeypatch.context() as patch:
        patch.setattr("ckptkit.runs.deletion.remove_path", interrupt)
        with pytest.raises(KeyboardInterrupt), locked_for_deletion(tmp_path):
            delete_checkpoint(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [f".{name}.leaving"]
    make(tmp_path / name)  # saved again meanwhile
    with locked_for_deletion(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {name, ".prune.ckptkit.lock"}
        delete_checkpoint(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_only_what_was_being_deleted_is_cleared_away(tmp_path: Path) -> None:
    make(tmp_path / "elsewhere")
    for name in ("ckpt-2", ".ckpt-3.leaving", ".logs.leaving", ".ckpt-4.ckptkit.tmp", "ckpt-5.leaving"):
        make(tmp_path / name)
    (tmp_path / ".ckpt-6.leaving").symlink_to(tmp_path / "elsewhere")
    with locked_for_deletion(tmp_path):
        pass
    left = {".ckpt-4.ckptkit.tmp", ".logs.leaving", "ckpt-2", "ckpt-5.leaving", "elsewhere"}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert len(list((tmp_path / "elsewhere").rglob("*"))) == 3


def test_one_deletes_at_a_time(tmp_path: Path) -> None:
    with locked_for_deletion(tmp_path):
        with pytest.raises(Occupied, match="another process is deleting") as raised, locked_for_deletion(tmp_path):
            pass
        assert raised.value.path == tmp_path
    with locked_for_deletion(tmp_path):
        pass


def test_a_file_that_cannot_be_removed_is_named_and_the_checkpoint_stays_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "ckpt-1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(IOFailure, match="permission denied") as raised:
            delete_checkpoint(tmp_path / "ckpt-1")
    assert raised.value.path is not None
    assert raised.value.path.name == "data"
    assert raised.value.path.is_relative_to(tmp_path / ".ckpt-1.leaving")
    assert [path.name for path in tmp_path.iterdir()] == [".ckpt-1.leaving"]


def refuse(path: Path, **_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(IOFailure) as raised:
        delete_checkpoint(tmp_path / "ckpt-1")
    assert raised.value.path == tmp_path / "ckpt-1"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(IOFailure), locked_for_deletion(tmp_path / "absent"):
        pass


def test_who_replaces_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    keeper = LocalKeeper(tmp_path)
    assert not keeper.find_other_process_work(tmp_path / "ckpt-1")
    lock = acquire_lock(lock_path(tmp_path / "ckpt-1"))
    assert keeper.find_other_process_work(tmp_path / "ckpt-1")
    assert not keeper.find_other_process_work(tmp_path / "ckpt-2")
    release_lock(lock, lock_path(tmp_path / "ckpt-1"))
    lock_path(tmp_path / "ckpt-1").touch()  # of a process that was ended
    assert not keeper.find_other_process_work(tmp_path / "ckpt-1")
