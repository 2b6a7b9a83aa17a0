"""Stream files to the Hub's storage.

It deduplicates chunks, and the files stay invisible until something refers to them.

A file is stored when its upload ends; a repository or bucket then refers to it by a hash of its content.
https://huggingface.co/docs/xet
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NoReturn

from huggingface_hub import constants

from ckptkit.errors import CkptError, Corrupt, IOFailure, Unsupported
from ckptkit.io.claims import StoreOutput
from ckptkit.io.crc32 import combine_crc32, crc32
from ckptkit.io.path import RemotePath
from ckptkit.io.pieces import FilePiece, OrderedWriter, is_sent_in_pieces
from ckptkit.io.stores.hub_errors import AGAIN, as_line_without_token
from ckptkit.plugins.hub_writing.calls import XetAccess


@dataclass(slots=True)
class XetDestination(StoreOutput, ABC):
    """A `Destination` on the Hub, without the steps that make its files visible."""

    _files: XetFiles = field(init=False, repr=False)
    _quiet: ExitStack = field(init=False, repr=False)  # silences the output of the libraries during the upload

    @property
    def sent_bytes(self) -> int:
        return self._files.sent_bytes

    @property
    def kept_bytes(self) -> int:
        """Return 0: the storage does not report which upload sent a chunk."""
        return 0

    def join_upload(self) -> NoReturn:
        """Raise `Unsupported`: only one process can make a commit, and a bucket cannot lock out other processes."""
        message = "several processes cannot write to hf:// together"
        hint = "drop --part and torchrun; or write to a local directory or to s3://, then `ckptkit cp` it there"
        raise Unsupported(message, path=self.path, hint=hint)

    def put_note(self, name: str, content: bytes) -> NoReturn:  # noqa: ARG002
        self.join_upload()

    def read_notes(self) -> NoReturn:
        self.join_upload()

    def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
        if piece.count > 1:
            self._files.put(piece, data)
        else:
            self.put_small_file(piece.name, data, crc)

    @abstractmethod
    def put_small_file(self, name: str, content: bytes | bytearray | memoryview, crc32: int) -> None:
        """Send a full file to the storage."""

    def finish_file(self, name: str, crc32: int) -> None:
        """Check that the CRC-32 of a large file equals the CRC-32 of the sent bytes."""
        if is_sent_in_pieces(self.sizes[name]):
            self._files.require_sent_crc32(name, crc32)

    def stop(self, error: BaseException) -> None:
        self._files.stop(error)
        self._quiet.close()


_NOT_OURS = "authorization"  # this header must only go to the Hub
_ADVICE = "run `pip install -U huggingface_hub hf_xet`"


@dataclass(frozen=True, slots=True)
class XetFile:
    """A file in the storage; a bucket refers to it by `hash`, a repository by `sha256`."""

    nbytes: int
    crc32: int
    hash: str
    sha256: str


@dataclass(slots=True)
class XetUpload:
    """An upload in progress: the number of bytes so far, and their CRC-32."""

    group: Any  # of hf_xet: a group of files that is registered together
    stream: Any
    nbytes: int = 0
    crc32: int = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.stream.write(bytes(data))  # hf_xet accepts only bytes
        self.crc32 = combine_crc32(self.crc32, crc32(data), len(data))
        self.nbytes += len(data)


@dataclass(slots=True)
class XetFiles:
    """Uploads to the storage from any number of threads, for a destination at `path`.

    `sent` are the completed files by name. `sent_bytes` leaves out bytes that the storage already had.
    """

    path: RemotePath
    access: XetAccess
    sent: dict[str, XetFile] = field(default_factory=dict)
    sent_bytes: int = 0
    _session: Any = field(init=False)
    _open: dict[str, XetUpload] = field(default_factory=dict)
    _ordered: OrderedWriter = field(init=False)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self._session = require_session_class()()
        self._ordered = OrderedWriter(self._write_piece)

    def put(self, piece: FilePiece, data: memoryview) -> None:
        self._ordered.put(piece, data)

    def put_small_file(self, name: str, content: bytes | bytearray | memoryview) -> None:
        with self._translate_upload_errors(name):
            upload = self._begin_upload(name)
            upload.write(content)
            self._end_upload(name, upload)

    def require_sent_crc32(self, name: str, crc: int) -> None:
        """Raise `Corrupt` unless the file was sent and has this CRC-32."""
        sent = self.sent.get(name)
        if sent is None or sent.crc32 != crc:
            found = "no such file" if sent is None else f"{sent.crc32:08x}"
            message = f"other bytes were sent than were read: expected CRC-32 {crc:08x}, found {found}"
            raise Corrupt(message, path=self.path / name, hint="run the same command again")

    def stop(self, error: BaseException) -> None:
        """Abort the incomplete uploads; the storage discards them."""
        self._ordered.stop(error)
        with self._lock:
            abandoned, self._open = self._open, {}
        for upload in abandoned.values():
            try:
                upload.group.abort()
            except (OSError, RuntimeError):  # the upload has already failed: nothing to abort
                continue

    def _write_piece(self, piece: FilePiece, data: memoryview) -> None:
        with self._translate_upload_errors(piece.name):
            upload = self._begin_upload(piece.name) if piece.number == 1 else self._open[piece.name]
            upload.write(data)
            if piece.number == piece.count:
                self._end_upload(piece.name, upload)

    def _begin_upload(self, name: str) -> XetUpload:
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

    def _end_upload(self, name: str, upload: XetUpload) -> None:
        """Complete an upload. The file then stays in the storage, also for a later attempt."""
        stored = upload.stream.finish().xet_info
        report = upload.group.wait_to_finish()
        if stored.file_size != upload.nbytes:
            message = f"expected {upload.nbytes} bytes in the Hub's storage, found {stored.file_size}"
            raise Corrupt(message, path=self.path / name, hint=AGAIN)
        with self._lock:
            self._open.pop(name, None)
            self.sent[name] = XetFile(upload.nbytes, upload.crc32, stored.hash, stored.sha256)
            self.sent_bytes += report.dedup_metrics.new_bytes

    @contextmanager
    def _translate_upload_errors(self, name: str) -> Iterator[None]:
        """Translate exceptions of hf_xet into a `CkptError`; hf_xet uses built-in exceptions for most errors."""
        try:
            yield
        except CkptError:
            raise
        except PermissionError as error:
            message = f"the Hub's storage refuses: {as_line_without_token(str(error))}"
            raise IOFailure(message, path=self.path / name, hint="the token needs the right to write there") from error
        except (OSError, RuntimeError, ValueError) as error:
            message = f"the Hub's storage did not take the file: {as_line_without_token(str(error))}"
            raise IOFailure(message, path=self.path / name, hint=AGAIN) from error


def require_session_class() -> Any:
    """Return the session class of hf_xet. Raises `Unsupported` if it is missing or disabled."""
    if constants.HF_HUB_DISABLE_XET:
        message = "ckptkit writes to the Hub through hf_xet, which HF_HUB_DISABLE_XET turns off"
        raise Unsupported(message, hint="unset HF_HUB_DISABLE_XET")
    try:
        from hf_xet import XetSession
    except ImportError as error:
        message = "ckptkit writes to the Hub through hf_xet, which is missing or too old"
        raise Unsupported(message, hint=_ADVICE) from error
    return XetSession
