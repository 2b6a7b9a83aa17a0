"""The storage of a Hub on loopback, as hf_xet fills a directory in its `local://` mode: what was sent, and whole.

hf_xet holds a lock on the directory as long as the process that writes to it lives, so what is read is a copy of it.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_RECORD = 48  # bytes; https://huggingface.co/docs/xet/shard
_HAS_PROOF, _HAS_SHA256 = 1 << 31, 1 << 30
_END = b"\xff" * 32


@dataclass(frozen=True, slots=True)
class Stored:
    """A file that the storage knows."""

    hash: str
    size: int
    sha256: str


@dataclass(slots=True)
class Storage:
    """The directory `root`."""

    root: Path
    taken: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True)

    @property
    def url(self) -> str:
        return f"local://{self.root}"

    def files(self) -> list[Stored]:
        """All files whose upload has ended."""
        return [found for path in self.root.glob("xet/xorbs/shards/*.mdb") for found in read_shard(path.read_bytes())]

    def find(self, digest: str) -> Stored | None:
        """A file by its hash or its SHA-256."""
        return next((one for one in self.files() if digest in (one.hash, one.sha256)), None)

    def content(self, stored: Stored) -> Path:
        """Where the content of a file lies."""
        if stored.hash not in self.taken:
            import hf_xet

            path = self.root.with_name("taken") / stored.hash
            path.parent.mkdir(exist_ok=True)
            with TemporaryDirectory() as room:
                shutil.copytree(self.root, f"{room}/copy")
                session: Any = hf_xet.XetSession()
                group = session.new_download_stream_group(endpoint=f"local://{room}/copy")
                with path.open("wb") as file:
                    for block in group.download_stream(hf_xet.XetFileInfo(stored.hash, stored.size)):
                        file.write(block)
            assert path.stat().st_size == stored.size
            assert not stored.size or hashlib.sha256(path.read_bytes()).hexdigest() == stored.sha256
            self.taken[stored.hash] = path
        return self.taken[stored.hash]


def read_shard(content: bytes) -> list[Stored]:
    """The files that a shard of the storage describes."""
    found, at = [], _RECORD
    while (name := content[at : at + 32]) != _END:
        flags, count = struct.unpack_from("<II", content, at + 32)
        pieces = range(at + _RECORD, at + _RECORD * (1 + count), _RECORD)
        size = sum(struct.unpack_from("<I", content, piece + 36)[0] for piece in pieces)
        at += _RECORD * (1 + count * (2 if flags & _HAS_PROOF else 1))
        sha256 = b""
        if flags & _HAS_SHA256:
            sha256, at = content[at : at + 32], at + _RECORD
        found.append(Stored(spell(name), size, spell(sha256) if sha256 else ""))
    return found


def spell(digest: bytes) -> str:
    """A hash as the storage writes it: four numbers."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", digest))
