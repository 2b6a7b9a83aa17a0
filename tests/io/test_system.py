"""Calls that a signal interrupts, made to the end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptkit.io.system import again, close


def interrupted(times: int) -> list[OSError | None]:
    return [*(OSError(errno.EINTR, "interrupted") for _ in range(times)), None]


def test_a_call_is_made_until_it_is_not_interrupted() -> None:
    waiting = interrupted(3)

    def call(value: int, *, plus: int) -> int:
        error = waiting.pop(0)
        if error is not None:
            raise error
        return value + plus

    assert again(call, 2, plus=3) == 5
    assert not waiting


def test_any_other_error_is_raised_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        again((tmp_path / "absent").rmdir)


def test_a_descriptor_is_closed_once(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        close(fd)
