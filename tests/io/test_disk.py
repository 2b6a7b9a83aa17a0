"""Calls that a signal interrupts are made to the end, and errors of an early sync are not lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptkit.errors import IOFailure
from ckptkit.io.disk import close_descriptor, retry_interrupted, sync_in_background


def interrupted(times: int) -> list[OSError | None]:
    return [*(OSError(errno.EINTR, "interrupted") for _ in range(times)), None]


def test_a_call_is_made_until_it_is_not_interrupted() -> None:
    waiting = interrupted(3)

    def call(value: int, *, plus: int) -> int:
        error = waiting.pop(0)
        if error is not None:
            raise error
        return value + plus

    assert retry_interrupted(call, 2, plus=3) == 5
    assert not waiting


def test_any_other_error_is_raised_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        retry_interrupted((tmp_path / "absent").rmdir)


def test_a_descriptor_is_closed_once(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    close_descriptor(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        close_descriptor(fd)


@pytest.fixture(autouse=True)
def _two_bytes_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.io.disk._ENOUGH", 2)


def wait_for_sync(pipe: Path) -> None:
    """Wait until the thread opens a pipe, which it cannot sync."""
    os.close(os.open(pipe, os.O_WRONLY))


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_an_error_on_the_way_is_raised_at_the_end(pipe: Path) -> None:
    with pytest.raises(IOFailure, match="fsync failed"), sync_in_background(pipe.parent, sync=True) as tell:
        tell("pipe", 2)
        wait_for_sync(pipe)


def test_an_error_of_the_work_comes_first(pipe: Path) -> None:
    with pytest.raises(ZeroDivisionError), sync_in_background(pipe.parent, sync=True) as tell:
        tell("pipe", 2)
        wait_for_sync(pipe)
        raise ZeroDivisionError


def test_files_are_synced_as_often_as_enough_was_written(tmp_path: Path, pipe: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(IOFailure) as caught, sync_in_background(tmp_path, sync=True) as tell:
        tell("file", 2)
        tell("pipe", 2)
        wait_for_sync(pipe)
    assert caught.value.path == pipe


@pytest.mark.parametrize(("sync", "nbytes"), [(False, 2), (True, 1)])
def test_little_is_left_to_the_end_and_so_is_all_that_is_not_to_be_synced(
    tmp_path: Path, *, sync: bool, nbytes: int
) -> None:
    with sync_in_background(tmp_path, sync=sync) as tell:
        tell("gone", nbytes)
