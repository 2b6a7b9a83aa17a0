"""Compare files with what the Hub says of them: size, and SHA-256 or git's id."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.hub.transfers import Follow, for_each
from ckptkit.io.file import file_size, opening, read_at
from ckptkit.io.progress import Told
from ckptkit.io.stores.hub_calls import HubFile

if TYPE_CHECKING:
    from hashlib import _Hash

Content = Path | bytes  # of a file, or to be one

_BLOCK = 1 << 22  # bytes


def size_of(content: Content) -> int:
    """Return the bytes in a file, or of bytes."""
    return len(content) if isinstance(content, bytes) else file_size(content)


def digest(content: Content, algorithm: _Hash, follow: Follow = lambda _: None) -> str:
    """Return the digest of a file or of bytes, in hexadecimal."""
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


def sum_all(contents: Mapping[str, Content], jobs: int | None, told: Told | None) -> dict[str, str]:
    """Return the SHA-256 of each by name, computed by `jobs` threads."""
    sums: dict[str, str] = {}

    def add(name: str, follow: Follow) -> None:
        sums[name] = digest(contents[name], hashlib.sha256(), follow)

    for_each({name: size_of(content) for name, content in contents.items()}, add, jobs, told)
    return sums


def difference(content: Content, sha256: str, remote: HubFile | None) -> str | None:
    """Say how a file here, of this SHA-256, and one on the Hub differ; None if they do not."""
    if remote is None:
        return "expected the file on the Hub, found none"
    if (here := size_of(content)) != remote.nbytes:
        return f"expected {here} bytes, found {remote.nbytes} on the Hub"
    if remote.sha256 is not None:
        return None if sha256 == remote.sha256 else f"expected SHA-256 {sha256}, found {remote.sha256} on the Hub"
    oid = digest(content, hashlib.sha1(b"blob %d\0" % here, usedforsecurity=False))  # as git computes it
    return None if oid == remote.oid else f"expected git id {oid}, found {remote.oid} on the Hub"


def differences(
    contents: Mapping[str, Content], sums: Mapping[str, str], remote: Mapping[str, HubFile]
) -> dict[str, str]:
    """Say of each file that is not the same here and on the Hub how it differs, by name."""
    found = {name: difference(content, sums[name], remote.get(name)) for name, content in contents.items()}
    return {name: words for name, words in found.items() if words is not None}
