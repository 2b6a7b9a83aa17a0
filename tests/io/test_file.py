"""Files that a stranger named: what is opened, and what is not."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ckptkit.errors import CkptError, Corrupt, IOFailure, Unsafe
from ckptkit.io.file import (
    OpenFiles,
    ReadAhead,
    file_size,
    find_missing_content_error,
    is_existing_path,
    read_at,
    read_small,
    require_plain_file_name,
)
from ckptkit.io.local_file import open_regular


@pytest.mark.parametrize("name", ["__0_0.distcp", "a b", "..a", "ü", "x" * 255, "-rf", "a:b"])
def test_a_plain_name_is_accepted(name: str) -> None:
    require_plain_file_name(name, Path())


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "/a", "a\\b", "a\0b", "a/"])
def test_a_name_that_leaves_its_directory_is_unsafe(name: str) -> None:
    with pytest.raises(Unsafe):
        require_plain_file_name(name, Path())


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    open_regular(tmp_path / "file").close()
    for name in ("link", "directory", "pipe"):
        with pytest.raises(Unsafe) as raised:
            open_regular(tmp_path / name)
        assert raised.value.path == tmp_path / name
    with pytest.raises(CkptError):
        open_regular(tmp_path / "socket")
    with pytest.raises(Unsafe):
        open_regular(Path("/dev/zero"))
    with pytest.raises(Corrupt, match="missing"):
        open_regular(tmp_path / "nothing")
    server.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_an_io_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0)
    with pytest.raises(IOFailure):
        open_regular(tmp_path / "file")


@pytest.mark.parametrize("name", ["x" * 300, "\ud800"])
def test_an_impossible_name_is_an_error_of_ours(tmp_path: Path, name: str) -> None:
    with pytest.raises(CkptError):
        file_size(tmp_path / name)


def test_absence_is_told_from_trouble(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nothing")
    assert is_existing_path(tmp_path / "file")
    assert is_existing_path(tmp_path / "link")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("nothing", "file/below", "nul\0", "long" * 100):
        assert not is_existing_path(tmp_path / name)
    with pytest.raises(IOFailure) as raised:
        is_existing_path(tmp_path / "loop" / "below")
    assert raised.value.path == tmp_path / "loop" / "below"


def test_reading_past_the_end_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    file = open_regular(path)
    assert read_at(file, 4, 6) == b"6789"
    assert read_at(file, 0, 99) == b""
    with pytest.raises(Corrupt, match="expected at least 11 bytes, found 10"):
        read_at(file, 5, 6)
    file.close()
    assert file_size(path) == 10
    assert read_small(path, 10) == b"0123456789"
    with pytest.raises(Corrupt):
        read_small(path, 9)


def test_few_files_are_open_at_once(tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / str(i)).write_bytes(str(i).encode())
    before = len(os.listdir("/proc/self/fd"))
    with OpenFiles(tmp_path, limit=3) as files:
        for _ in range(2):
            for i in range(10):
                assert read_at(files[str(i)], 1, 0) == str(i).encode()
                assert len(os.listdir("/proc/self/fd")) <= before + 3
    assert len(os.listdir("/proc/self/fd")) == before


def test_reading_ahead_gives_what_is_there(tmp_path: Path) -> None:
    data = {name: bytes(range(256)) * 50 for name in "ab"}
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)
    places = [
        (0, 10),
        (10, 4000),
        (4000, 200),
        (4096, 5000),
        (9000, 3800),
        (12790, 10),
        (0, 12800),
        (300, 0),
        (12800, 0),
    ]
    with OpenFiles(tmp_path) as files:
        ahead = ReadAhead(files)
        for offset, length in [*places, *reversed(places)]:
            for name, content in data.items():
                assert ahead.read(name, offset, length) == content[offset : offset + length]
                assert ahead.read(name, offset, length) == content[offset : offset + length]
        with pytest.raises(Corrupt, match="found 12800"):
            ahead.read("a", 12795, 10)


def test_writing_fills_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"." * 8)
    with OpenFiles(tmp_path, writable=True) as files:
        files["file"].write_at(memoryview(b"abc"), 2)
    assert (tmp_path / "file").read_bytes() == b"..abc..."


def test_known_impostors_are_recognized() -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    for head, words in ((pointer, "found a Git LFS pointer"), (bytes(64), "starts with zeros"), (b"", "is empty")):
        assert words in str(find_missing_content_error(head))
    assert find_missing_content_error(b"PK\x03\x04") is None
