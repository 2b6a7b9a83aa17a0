"""Damage: what disks, networks and people do to a checkpoint's files. Each function does it to a copy at `root`."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], object]

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
PAGE = 4096


def cut(name: str, keep: float) -> Damage:
    """Leave of file `name` the share `keep` of its bytes, or all but so many of them if that is a whole number."""

    def damage(root: Path) -> None:
        size = (root / name).stat().st_size
        os.truncate(root / name, int(size * keep) if isinstance(keep, float) else size - keep)

    return damage


def append(name: str, content: bytes) -> Damage:
    """Put bytes after the end of a file."""

    def damage(root: Path) -> None:
        with (root / name).open("ab") as file:
            file.write(content)

    return damage


def remove(*names: str) -> Damage:
    """Lose files."""

    def damage(root: Path) -> None:
        for name in names:
            (root / name).unlink()

    return damage


def empty(root: Path) -> None:
    """Lose everything in the directory."""
    for path in root.iterdir():
        path.unlink()


def write(name: str, content: bytes) -> Damage:
    """Let a file be something else."""
    return lambda root: (root / name).write_bytes(content)


def overwrite(name: str, offset: int, content: bytes) -> Damage:
    """Let some bytes of a file be something else; those at a negative offset are counted from its end."""

    def damage(root: Path) -> None:
        with (root / name).open("r+b") as file:
            file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
            file.write(content)

    return damage


def flip(name: str, offset: int, bit: int = 0) -> Damage:
    """Flip a bit of a file."""
    return lambda root: flip_bit(root / name, offset, bit)


def flip_bit(path: Path, offset: int, bit: int) -> None:
    """Flip a bit; once more, and the file is as it was."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def zero_page(name: str, page: int) -> Damage:
    """Let a page of a file be zeros, as a file system leaves it that did not get to writing it."""
    return overwrite(name, page * PAGE, bytes(PAGE))


def zero_all(name: str) -> Damage:
    """Let a file be zeros, of the same length."""
    return lambda root: (root / name).write_bytes(bytes((root / name).stat().st_size))


def take(source: Callable[[], Path], *names: str) -> Damage:
    """Let files of another checkpoint lie here, in place of those of their names."""

    def damage(root: Path) -> None:
        for name in names:
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source() / name, root / name)

    return damage


def become(source: Callable[[], Path]) -> Damage:
    """Be another checkpoint altogether."""

    def damage(root: Path) -> None:
        shutil.rmtree(root)
        shutil.copytree(source(), root)

    return damage


def become_file(root: Path) -> None:
    """Be a file of text where a directory should be."""
    shutil.rmtree(root)
    root.write_text("a checkpoint\n")


def link_to(name: str, target: str) -> Damage:
    """Let a file be a link: to itself, moved to `target`, if nothing is there yet."""

    def damage(root: Path) -> None:
        place = root / target
        if place.exists():
            (root / name).unlink()
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            (root / name).rename(place)
        (root / name).symlink_to(os.path.relpath(place, (root / name).parent))

    return damage


def pipe(name: str) -> Damage:
    """Let a file be a pipe that nobody writes to."""

    def damage(root: Path) -> None:
        (root / name).unlink()
        os.mkfifo(root / name)

    return damage


def listen(name: str) -> Damage:
    """Let a file be a socket."""

    def damage(root: Path) -> None:
        (root / name).unlink()
        here = Path.cwd()
        os.chdir(root)  # a socket's path may have a hundred bytes or so
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(name)
        finally:
            os.chdir(here)

    return damage


def directory(name: str) -> Damage:
    """Let a file be a directory."""

    def damage(root: Path) -> None:
        (root / name).unlink()
        (root / name).mkdir()

    return damage
