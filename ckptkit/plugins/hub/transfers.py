"""Transfer files from and to the Hub in parallel, and compare files with their checksums on the Hub.

Progress counts bytes that are sent again after a failure only once.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from ckptkit.engine.visit import process_units
from ckptkit.io.file import file_size, opening, read_at
from ckptkit.io.progress import BytesDone, Progress
from ckptkit.io.stores.hub_calls import HubFile

if TYPE_CHECKING:
    from hashlib import _Hash

Content = Path | bytes  # a file, or the content of a file

_BLOCK = 1 << 22  # bytes per read


def content_nbytes(content: Content) -> int:
    """Return the size of a file or its content in bytes."""
    return len(content) if isinstance(content, bytes) else file_size(content)


def hash_content(content: Content, algorithm: _Hash, follow: Follow = lambda _: None) -> str:
    """Return the digest of a file or its content, in hexadecimal."""
    if isinstance(content, bytes):
        algorithm.update(content)
        return algorithm.hexdigest()
    with opening(content) as file:
        size = file.size
        for start in range(0, size, _BLOCK):
            stop = min(start + _BLOCK, size)
            algorithm.update(read_at(file, stop - start, start))
            follow(stop)
    return algorithm.hexdigest()


def sha256_by_name(contents: Mapping[str, Content], jobs: int | None, advance: BytesDone | None) -> dict[str, str]:
    """Return the SHA-256 of each file by name, computed by `jobs` threads."""
    sums: dict[str, str] = {}

    def add(name: str, follow: Follow) -> None:
        sums[name] = hash_content(contents[name], hashlib.sha256(), follow)

    transfer_each_file({name: content_nbytes(content) for name, content in contents.items()}, add, jobs, advance)
    return sums


def differences_from_hub(
    contents: Mapping[str, Content], sums: Mapping[str, str], remote: Mapping[str, HubFile]
) -> dict[str, str]:
    """Return a description of each local file that differs from its copy on the Hub, by name."""
    differences: dict[str, str] = {}
    for name, content in contents.items():
        on_hub, sha256 = remote.get(name), sums[name]
        if on_hub is None:
            differences[name] = "expected the file on the Hub, found none"
        elif (nbytes := content_nbytes(content)) != on_hub.nbytes:
            differences[name] = f"expected {nbytes} bytes, found {on_hub.nbytes} on the Hub"
        elif on_hub.sha256 is not None:
            if sha256 != on_hub.sha256:
                differences[name] = f"expected SHA-256 {sha256}, found {on_hub.sha256} on the Hub"
        else:  # the Hub has no SHA-256 of small files (not in LFS), only git's blob id
            oid = hash_content(content, hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False))
            if oid != on_hub.oid:
                differences[name] = f"expected git id {oid}, found {on_hub.oid} on the Hub"
    return differences


Follow = Callable[[int], None]  # called with the position in a file that a transfer has reached
Bars = Callable[[str], AbstractContextManager[Progress]]  # opens the progress bar of a stage, given its name


def transfer_each_file(
    sizes: Mapping[str, int], do: Callable[[str, Follow], None], jobs: int | None, advance: BytesDone | None = None
) -> None:
    """Call `do(name, follow)` for each file in `sizes` (bytes by name), with `jobs` threads.

    `do` calls `follow` with the position in the file that it has reached. The first error stops all transfers.
    """
    lock, reached = Lock(), dict.fromkeys(sizes, 0)
    errors: list[BaseException] = []

    def reach(name: str, position: int) -> None:
        with lock:
            if errors:
                raise InterruptedError("another transfer has failed")
            more = position - reached[name]
            if more > 0:
                reached[name] = position
                if advance:
                    advance(more)

    def transfer(name: str) -> None:
        try:
            do(name, partial(reach, name))
            reach(name, sizes[name])
        except BaseException as error:
            with lock:
                errors.append(error)
            if error is errors[0]:  # the others fail because this one did
                raise

    process_units(sizes, lambda: nullcontext(transfer), jobs)


class FollowedReader(io.BufferedReader):
    """A file reader that reports the position after each read."""

    def __init__(self, path: Path, follow: Follow) -> None:
        super().__init__(io.FileIO(path))
        self._follow = follow

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to `size` bytes, and report the new position."""
        content = super().read(size)
        self._follow(self.tell())
        return content


@contextmanager
def no_progress(_verb: str) -> Iterator[Progress]:
    yield lambda _nbytes, _total: None
