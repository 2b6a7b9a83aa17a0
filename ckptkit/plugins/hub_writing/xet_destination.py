"""Share what repositories and buckets of the Hub do alike: one process sends files to a storage that shows none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NoReturn

from ckptkit.errors import Unsupported
from ckptkit.io.path import RemotePath
from ckptkit.io.pieces import FilePiece
from ckptkit.plugins.hub_writing.xet import XetFiles


@dataclass(slots=True)
class XetDestination(ABC):
    """A `Destination` on the Hub, but for the steps that make its files visible."""

    path: RemotePath
    sizes: Mapping[str, int]
    marks: Sequence[str]
    plan: str
    is_file: bool = False
    _files: XetFiles = field(init=False, repr=False)
    _quiet: ExitStack = field(init=False, repr=False)  # what keeps the libraries silent as long as the upload lasts

    @property
    def kept_bytes(self) -> int:
        """Return 0: the storage does not say which upload sent a chunk."""
        return 0

    def join(self) -> NoReturn:
        """Raise `Unsupported`: one process makes a commit, and nothing keeps processes apart in a bucket."""
        message = "several processes cannot write to hf:// together"
        hint = "drop --part and torchrun; or write to a local directory or to s3://, then `ckptkit cp` it there"
        raise Unsupported(message, path=self.path, hint=hint)

    def note(self, name: str, data: bytes) -> NoReturn:  # noqa: ARG002
        """Raise `Unsupported`, as `join` does."""
        self.join()

    def notes(self) -> NoReturn:
        """Raise `Unsupported`, as `join` does."""
        self.join()

    def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
        """Send a piece of a file."""
        if piece.count > 1:
            self._files.put(piece, data)
        else:
            self.put_small(piece.name, data, crc)

    @abstractmethod
    def put_small(self, name: str, data: bytes | bytearray | memoryview, crc: int) -> None:
        """Send a whole file to the storage."""

    def stop(self, error: BaseException) -> None:
        """Give up the files that are not whole."""
        self._files.stop(error)
        self._quiet.close()
