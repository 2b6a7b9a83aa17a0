"""Send files to the Hub's storage while their bytes are made. It keeps no chunk twice, and shows no file to anybody.

A file is there once its upload has ended; a repository or a bucket then refers to it by a hash of its content.
https://huggingface.co/docs/xet
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NoReturn

from huggingface_hub import constants

from ckptkit.errors import CkptError, Corrupt, IOFailure, Unsupported
from ckptkit.io.crc32 import combine, crc32
from ckptkit.io.path import RemotePath
from ckptkit.io.pieces import FilePiece, OrderedWriter
from ckptkit.io.stores.hub_calls import XetAccess
from ckptkit.io.stores.hub_errors import AGAIN, redact


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


_NOT_OURS = "authorization"  # a header for the Hub alone
_ADVICE = "run `pip install -U huggingface_hub hf_xet`"


@dataclass(frozen=True, slots=True)
class XetFile:
    """A file that storage has: by `hash` in a bucket, by `sha256` in a repository."""

    nbytes: int
    crc32: int
    hash: str
    sha256: str


@dataclass(slots=True)
class XetUpload:
    """A file that is being sent: the bytes so far, and their CRC-32."""

    group: Any  # of hf_xet: what becomes known to the storage at once
    stream: Any
    nbytes: int = 0
    crc32: int = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.stream.write(bytes(data))  # it takes nothing else
        self.crc32 = combine(self.crc32, crc32(data), len(data))
        self.nbytes += len(data)


@dataclass(slots=True)
class XetFiles:
    """Files on their way to storage from any number of threads, for a destination at `path`.

    `sent` has those that are there, by name. `sent_bytes` are without what the storage had already.
    """

    path: RemotePath
    access: XetAccess
    sent: dict[str, XetFile] = field(default_factory=dict)
    sent_bytes: int = 0
    _session: Any = field(init=False)
    _open: dict[str, XetUpload] = field(default_factory=dict)
    _turns: OrderedWriter = field(init=False)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self._session = find_session()()
        self._turns = OrderedWriter(self._write)

    def put(self, piece: FilePiece, data: memoryview) -> None:
        """Send a piece of a file, once the pieces before it are sent."""
        self._turns.put(piece, data)

    def put_small(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Send a whole file."""
        with self._sending(name):
            upload = self._begin(name)
            upload.write(data)
            self._end(name, upload)

    def require_same(self, name: str, crc: int) -> None:
        """Raise `Corrupt` unless a file was sent whose CRC-32 is `crc`."""
        found = self.sent.get(name)
        if found is None or found.crc32 != crc:
            there = "no such file" if found is None else f"{found.crc32:08x}"
            message = f"other bytes were sent than were read: expected CRC-32 {crc:08x}, found {there}"
            raise Corrupt(message, path=self.path / name, hint="run the same command again")

    def stop(self, error: BaseException) -> None:
        """Give up the files that are not whole; storage forgets them."""
        self._turns.stop(error)
        with self._lock:
            abandoned, self._open = self._open, {}
        for upload in abandoned.values():
            try:
                upload.group.abort()
            except (OSError, RuntimeError):  # it has failed already
                continue

    def _write(self, piece: FilePiece, data: memoryview) -> None:
        with self._sending(piece.name):
            upload = self._begin(piece.name) if piece.number == 1 else self._open[piece.name]
            upload.write(data)
            if piece.number == piece.count:
                self._end(piece.name, upload)

    def _begin(self, name: str) -> XetUpload:
        access = self.access
        group = self._session.new_upload_commit(
            endpoint=access.endpoint,
            token=access.token,
            token_expiry_unix_secs=access.expires,
            token_refresh_url=access.refresh_url,
            token_refresh_headers=dict(access.headers),
            custom_headers={key: value for key, value in access.headers.items() if key.lower() != _NOT_OURS},
        )
        upload = XetUpload(group, group.start_upload_stream(name=name))
        with self._lock:
            self._open[name] = upload
        return upload

    def _end(self, name: str, upload: XetUpload) -> None:
        """Let storage know the file, from which on it is there for good, also for a later attempt."""
        found = upload.stream.finish().xet_info
        report = upload.group.wait_to_finish()
        if found.file_size != upload.nbytes:
            message = f"expected {upload.nbytes} bytes in the Hub's storage, found {found.file_size}"
            raise Corrupt(message, path=self.path / name, hint=AGAIN)
        with self._lock:
            self._open.pop(name, None)
            self.sent[name] = XetFile(upload.nbytes, upload.crc32, found.hash, found.sha256)
            self.sent_bytes += report.dedup_metrics.new_bytes

    @contextmanager
    def _sending(self, name: str) -> Iterator[None]:
        """Turn what hf_xet raises inside the block into one of ours; it has no errors of its own for most."""
        try:
            yield
        except CkptError:
            raise
        except PermissionError as error:
            message = f"the Hub's storage refuses: {redact(str(error))}"
            raise IOFailure(message, path=self.path / name, hint="the token needs the right to write there") from error
        except (OSError, RuntimeError, ValueError) as error:
            message = f"the Hub's storage did not take the file: {redact(str(error))}"
            raise IOFailure(message, path=self.path / name, hint=AGAIN) from error


def find_session() -> Any:
    """Return the class of a session of hf_xet. Raises `Unsupported` if there is none, or it is turned off."""
    if constants.HF_HUB_DISABLE_XET:
        message = "ckptkit writes to the Hub through hf_xet, which HF_HUB_DISABLE_XET turns off"
        raise Unsupported(message, hint="unset HF_HUB_DISABLE_XET")
    try:
        from hf_xet import XetSession
    except ImportError as error:
        message = "ckptkit writes to the Hub through hf_xet, which is missing or too old"
        raise Unsupported(message, hint=_ADVICE) from error
    return XetSession
