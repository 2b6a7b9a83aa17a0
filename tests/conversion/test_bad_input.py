"""Damaged and hostile checkpoints: one clear error that names the file, and nothing at the destination."""

from __future__ import annotations

import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit import consolidate
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError, Corrupt, NoRoom, NotACheckpoint, Unsafe
from ckptkit.formats import locate_all_chunks
from tests import producers
from tests.conftest import Produce

SHARD = "__1_0.distcp"


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def remove(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path may have a hundred bytes or so
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], object], type[CkptError], str]] = {
    "shard cut in half": (lambda p: truncate(p / SHARD, 10_000), Corrupt, "bytes (metadata), found"),
    "shard short of a byte": (lambda p: truncate(p / SHARD, -1), Corrupt, "bytes (metadata), found"),
    "shard empty": (lambda p: truncate(p / SHARD, 0), Corrupt, "bytes (metadata), found"),
    "shards missing": (
        lambda p: remove(p / "__1_0.distcp", p / "__2_0.distcp"),
        Corrupt,
        "2 of 3 files are missing: __1_0.distcp, __2_0.distcp",
    ),
    "shard all zeros": (
        lambda p: (p / SHARD).write_bytes(bytes(os.stat(p / SHARD).st_size)),
        Corrupt,
        "starts with zeros",
    ),
    "shard of another rank": (lambda p: shutil.copy(p / "__0_0.distcp", p / SHARD), Corrupt, ""),
    "shard a link": (lambda p: replace_by_link(p / SHARD), Unsafe, "symbolic link"),
    "shard a pipe": (lambda p: replace_by_pipe(p / SHARD), Unsafe, "not a regular file"),
    "shard a socket": (lambda p: replace_by_socket(p / SHARD), CkptError, ""),
    "shard a directory": (lambda p: replace_by_directory(p / SHARD), Unsafe, "not a regular file"),
    "metadata missing": (lambda p: (p / ".metadata").unlink(), Corrupt, "did not finish"),
    "metadata empty": (lambda p: truncate(p / ".metadata", 0), Corrupt, "the file is empty"),
    "metadata cut": (lambda p: truncate(p / ".metadata", 1000), Corrupt, "damaged or truncated"),
    "metadata short of a byte": (lambda p: truncate(p / ".metadata", -1), Corrupt, "damaged or truncated"),
    "metadata text": (lambda p: (p / ".metadata").write_text("version https://git-lfs\n"), Corrupt, "Git LFS pointer"),
    "metadata a number": (lambda p: (p / ".metadata").write_bytes(b"\x80\x04K\x05."), Corrupt, "expected DCP metadata"),
    "metadata a link": (lambda p: replace_by_link(p / ".metadata"), Unsafe, "symbolic link"),
    "everything missing": (lambda p: remove(*p.iterdir()), NotACheckpoint, "no checkpoint"),
}


@pytest.fixture
def checkpoint(produce: Produce, tmp_path: Path) -> Path:
    return Path(shutil.copytree(produce(producers.fsdp2).root, tmp_path / "in" / "checkpoint"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_leaves_nothing(damage: str, checkpoint: Path, tmp_path: Path) -> None:
    do, kind, words = DAMAGES[damage]
    do(checkpoint)
    out = tmp_path / "place" / "out"
    out.parent.mkdir()
    with pytest.raises(kind) as caught:
        consolidate(checkpoint, out)
    assert words in caught.value.message
    assert caught.value.path is not None
    assert checkpoint in (caught.value.path, *caught.value.path.parents)
    assert list(out.parent.iterdir()) == []


def test_damage_spares_what_was_there(checkpoint: Path, tmp_path: Path) -> None:
    consolidate(checkpoint, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    flip(checkpoint / places(checkpoint)[0][0], places(checkpoint)[0][1])
    with pytest.raises(Corrupt):
        consolidate(checkpoint, tmp_path / "out", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def places(checkpoint: Path) -> list[tuple[str, int, int, str]]:
    """File, offset, length and tensor of every chunk of the model."""
    layout = locate_all_chunks(open_layout(checkpoint))
    return [
        (chunk.path, chunk.offset, chunk.length, name)
        for name, tensor in layout.tensors.items()
        for chunk in tensor.chunks
        if chunk.box.numel and name.startswith("model.")
    ]


def flip(path: Path, offset: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def test_a_flipped_bit_in_any_chunk_is_an_error_that_names_it(checkpoint: Path, tmp_path: Path) -> None:
    for file, offset, length, name in places(checkpoint):
        at = offset + random.Random(offset).randrange(length)
        flip(checkpoint / file, at)
        with pytest.raises(Corrupt, match=f"bytes at byte {offset}.*these bytes are damaged") as caught:
            consolidate(checkpoint, tmp_path / "out")
        assert (caught.value.path, caught.value.tensor) == (checkpoint / file, name.removeprefix("model."))
        assert not (tmp_path / "out").exists()
        flip(checkpoint / file, at)


@pytest.mark.slow
def test_random_bit_flips_are_never_wrong_in_silence(checkpoint: Path, tmp_path: Path) -> None:
    consolidate(checkpoint, tmp_path / "sound")
    expected = (tmp_path / "sound" / "model.safetensors").read_bytes()
    chance = random.Random(0)
    caught = 0
    files = sorted(checkpoint.iterdir())
    for _ in range(150):
        path = chance.choice(files)
        at, mask = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
        flip(path, at, mask)
        try:
            consolidate(checkpoint, tmp_path / "out", overwrite=True, sync=False)
        except CkptError:
            caught += 1
        else:
            found = (tmp_path / "out" / "model.safetensors").read_bytes()
            assert found == expected, f"bit {mask} of byte {at} of {path.name}"
        flip(path, at, mask)
    assert caught > 20


@pytest.mark.parametrize("options", [{}, {"part": "1/2"}])
def test_no_room_is_said_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("ckptkit.io.allocation.find_free_bytes", lambda _: 1000)
    with pytest.raises(NoRoom, match="B are needed and 1 KB are free"):
        consolidate(checkpoint, tmp_path / "out", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_a_disk_that_fills_up_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for the disk: the kernel refuses, wherever the file has got to."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        with pytest.raises(CkptError) as caught:
            consolidate(checkpoint, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 4
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
