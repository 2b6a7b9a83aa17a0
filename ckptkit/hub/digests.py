"""Digests: files by the sums that the Hub knows them by, SHA-256 and git's id, and whether both sides have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from ckptkit.engine.workers import Step, work
from ckptkit.errors import Corrupt
from ckptkit.files.file import opening, read_at
from ckptkit.hub.client import HubFile
from ckptkit.progress import Told

_BLOCK = 1 << 22  # bytes


def sha256_of(content: Path | bytes, told: Told | None = None) -> str:
    """SHA-256 of a file or of bytes, in hexadecimal."""
    digest = hashlib.sha256()
    for block in blocks_of(content, told):
        digest.update(block)
    return digest.hexdigest()


def git_oid_of(content: Path | bytes) -> str:
    """What git calls a file of this content."""
    digest = hashlib.sha1(b"blob %d\0" % size_of(content), usedforsecurity=False)
    for block in blocks_of(content):
        digest.update(block)
    return digest.hexdigest()


def size_of(content: Path | bytes) -> int:
    """Bytes in a file, or of bytes."""
    if isinstance(content, bytes):
        return len(content)
    with opening(content) as (_, size):
        return size


def blocks_of(content: Path | bytes, told: Told | None = None) -> Iterator[bytes]:
    """A file from end to end, or bytes, piece by piece."""
    if isinstance(content, bytes):
        yield content
        return
    with opening(content) as (fd, size):
        for start in range(0, size, _BLOCK):
            block = read_at(fd, min(_BLOCK, size - start), start, content)
            yield block
            if told:
                told(len(block))


def sum_all(contents: Mapping[str, Path | bytes], jobs: int | None, told: Told | None) -> dict[str, str]:
    """SHA-256 of each, by name."""
    sums: dict[str, str] = {}
    lock = Lock()

    def tell(nbytes: int) -> None:
        with lock:
            if told:
                told(nbytes)

    @contextmanager
    def summing() -> Iterator[Step[str]]:
        def step(name: str) -> None:
            sums[name] = sha256_of(contents[name], tell)

        yield step

    work(contents, summing, jobs)
    return sums


def difference(content: Path | bytes, sha256: str, remote: HubFile | None) -> str | None:
    """How a file here, of this SHA-256, and one on the Hub differ; None if they do not."""
    if remote is None:
        return "it is not on the Hub"
    if (here := size_of(content)) != remote.nbytes:
        return f"{here} bytes here, {remote.nbytes} on the Hub"
    if remote.sha256 is not None:
        return None if sha256 == remote.sha256 else f"its SHA-256 is {sha256} here, {remote.sha256} on the Hub"
    oid = git_oid_of(content)
    return None if oid == remote.oid else f"git's id of it is {oid} here, {remote.oid} on the Hub"


def require_same(
    contents: Mapping[str, Path | bytes], sums: Mapping[str, str], remote: Mapping[str, HubFile], hint: str
) -> None:
    """Raise `Corrupt` for the first file that is not the same here and on the Hub."""
    for name, content in contents.items():
        found = difference(content, sums[name], remote.get(name))
        if found is not None:
            raise Corrupt(found, path=name if isinstance(content, bytes) else content, hint=hint)
