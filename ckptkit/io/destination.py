"""The destinations that ckptkit writes to: parse the user's path, and the protocol for atomic outputs in a store."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ckptkit.entry_points import import_object
from ckptkit.errors import CkptError, NotACheckpoint, Unsupported, Usage
from ckptkit.io.crc32 import combine_crc32, crc32
from ckptkit.io.file import destination_exists_error, names_in, require_kind_if_exists
from ckptkit.io.path import RemotePath, capabilities_at, drop_cached_listing, is_remote, to_uncached_path
from ckptkit.io.pieces import FilePiece, cut_into_pieces, new_piece_buffer
from ckptkit.io.stores import STORES

if TYPE_CHECKING:
    from concurrent.futures import Future

CLAIM = ".ckptkit-upload.json"  # the object that claims a directory (inside it) or a file (beside it)
NOTES = ".ckptkit-upload"  # the directory for notes of processes that share an upload, beside the claim
SENDERS = 4  # threads that send one file
_HUB = "hf"

Check = Callable[[], Iterable[str]]


class Destination(Protocol):
    """A destination at `path` in a store. Readers see all of its files, or none.

    claim -> put and put_small, in any order -> complete -> mark -> commit

    Constructor arguments: the `sizes` in bytes of its large files and of any other known files, by name; the names of
    its `marks`, which are written last and in this order, because no reader takes the rest for a checkpoint without
    them; a `plan`, a text that is equal only for uploads of the same files; and the names of `more_files` that are in
    neither. If `is_file`, the only file becomes the object at `path` itself. Several threads may put pieces at the same
    time. They begin the pieces of a file in order.

    `sent_bytes` counts the bytes that this process sent, `kept_bytes` the bytes that an earlier process had already
    sent.
    """

    path: RemotePath
    sent_bytes: int
    kept_bytes: int

    def claim(self, *, overwrite: bool, check: Check) -> None:
        """Claim the path for this upload, or resume an interrupted upload with the same plan.

        With `overwrite`, abandons an upload with another plan and deletes the files that its claim lists. Then `check`
        raises an error if the existing files may not be replaced, and returns the files to delete first, or all files
        of a checkpoint if other files stay. Raises `Occupied` if something is at the path,
        or another upload is in progress.
        """

    def join_upload(self) -> None:
        """Join an upload of the same plan that another process has claimed; `sizes` may list only this process's files.

        Each file is sent by one process. Waits for the other process to begin. Raises `Occupied` if there is no such
        upload, `Unsupported` if the store lets only one process write.
        """

    def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
        """Send a piece of a file, whose CRC-32 is `crc`, unless the store has it.

        May keep `data`, and may wait for earlier pieces if the store takes a file from start to end.
        """

    def stop(self, error: BaseException) -> None:
        """Stop the upload after an error. Raises the error in the threads that wait in `put`."""

    def put_small_file(self, name: str, content: bytes | bytearray | memoryview, crc32: int) -> None:
        """Send a complete file that is not a mark, unless the store has it."""

    def finish_file(self, name: str, crc32: int) -> None:
        """Finish a file after all its pieces; `crc32` is the file's CRC-32. Raises `IOFailure` if it differs."""

    def put_marker(self, name: str, content: bytes | bytearray | memoryview, crc32: int) -> None:
        """Send a complete file that is a mark. Raises `Occupied` if a different one exists."""

    def put_note(self, name: str, content: bytes) -> None:
        """Store a note for other processes of the same upload, until it is committed.

        Raises `Unsupported` if several processes cannot share an upload in this store.
        """

    def read_notes(self) -> Mapping[str, bytes]:
        """Return the notes of all processes, by name; none before the path is claimed.

        Raises `Unsupported` if several processes cannot share an upload in this store.
        """

    def commit(self) -> None:
        """Finish the upload: all files become visible, and the claim is removed."""

    def missing_feature_remarks(self) -> list[str]:
        """Return the features that the store turned out to lack, after the claim."""


@dataclass(frozen=True, slots=True)
class StorePieces:
    """The `PieceSink` of a destination in a store. `put_marker` sends the small files among the `marks`."""

    there: Destination
    marks: Collection[str]

    def try_read_back(self, piece: FilePiece, data: memoryview) -> bool:  # noqa: ARG002
        """Return False: files in a store are compared by checksum instead of being read back."""
        return False

    def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
        if piece.count > 1 or piece.name not in self.marks:
            self.there.put(piece, data, crc)

    def stop(self, error: BaseException) -> None:
        self.there.stop(error)


def to_destination(destination: str | os.PathLike[str]) -> Path:
    """Return the path that a user wants to write to: local, or in a store.

    Raises `Usage` for a URL that ckptkit cannot write to.
    """
    path = to_uncached_path(destination)
    if not is_remote(path):
        return path
    if not capabilities_at(path).destination:
        written = [name for name, known in STORES.items() if known.destination]
        schemes = dict.fromkeys(f"{name.partition('://')[0]}://" for name in written)
        places = "hf://org/name or hf://buckets/org/name/folder" if is_on_hub(path) else ", ".join(schemes)
        hint = f"write to a local directory, or to {places}"
        raise Usage(f"ckptkit does not write to `{destination}`", hint=hint)
    if path == path.store_root and not allows_other_files(path):
        raise Usage(f"`{destination}` is a whole bucket", hint=f"write it like {path}/run/ckpt-5")
    return path


def open_destination(
    path: Path,
    sizes: Mapping[str, int],
    marker_names: Sequence[str],
    *,
    plan: str,
    is_file: bool = False,
    more_files: Collection[str] = (),
) -> Destination:
    """Return the destination at a path from `to_destination`; see `Destination` for the other arguments.

    Raises `Occupied` if an object has the name of the directory to write, or a directory has the name of the file.
    """
    if not allows_other_files(path):  # a repository checks this again in its commit
        with suppress(NotACheckpoint):  # the bucket does not exist yet
            require_kind_if_exists(path, is_file=is_file)
    kind = import_object(capabilities_at(path).destination)
    return cast(Destination, kind(path, sizes, marker_names, plan=plan, is_file=is_file, more_files=more_files))


def require_multi_process_store(path: Path) -> None:
    """Raise `Unsupported` for a store in which only one process can write to a destination."""
    if is_on_hub(path):
        message = "several processes cannot write to hf:// together"
        hint = "write to a local directory or to s3://, then `ckptkit cp` it there"
        raise Unsupported(message, path=path, hint=hint)


def require_absent(dst: Path, *, is_file: bool) -> None:
    """Raise `Occupied` if files exist at a destination in a store, unless an upload has claimed it."""
    drop_cached_listing(dst)
    claims = (dst / CLAIM, dst.parent / f"{dst.name}{CLAIM}")
    with suppress(NotACheckpoint):  # the bucket does not exist yet
        require_kind_if_exists(dst, is_file=is_file)
        if dst.exists() and (is_file or names_in(dst)) and not any(claim.exists() for claim in claims):
            raise destination_exists_error(dst)


def allows_other_files(path: Path) -> bool:
    """Return whether other files may stay beside a checkpoint, as in a repository with its history."""
    return capabilities_at(path) is STORES[_HUB]


def is_on_hub(path: Path | None) -> bool:
    return is_remote(path) and path.parts[0] == f"{_HUB}:"


@contextmanager
def errors_with_resume_hint(destination: Destination) -> Iterator[None]:
    """Add a hint to any error inside the block: the store keeps the data that was sent."""
    words = f"the store keeps the parts that were sent to {destination.path}: the same command continues the upload"
    try:
        yield
    except CkptError as error:
        destination.stop(error)
        error.hint = f"{error.hint}; {words}" if error.hint else words
        raise
    except BaseException as error:
        destination.stop(error)
        error.add_note(words)
        raise


def send_file(destination: Destination, name: str, nbytes: int, blocks: Iterable[bytes | memoryview]) -> None:
    """Send a complete file of `nbytes` bytes, whose `blocks` come in order, with `SENDERS` threads.

    A block is copied before the next one is asked for. One piece is filled while `SENDERS` others are sent. Raises
    `ValueError` for another number of bytes.
    """
    from concurrent.futures import ThreadPoolExecutor  # deferred: slow to import, and rarely needed

    def put(piece: FilePiece, data: memoryview) -> tuple[int, int]:
        crc = crc32(data)
        destination.put(piece, data, crc)
        return crc, piece.length

    total = 0  # the CRC-32 of the pieces that were sent
    sending: deque[Future[tuple[int, int]]] = deque()
    threads = ThreadPoolExecutor(SENDERS, thread_name_prefix="ckptkit-send")
    try:
        for piece, data in fill_pieces(name, nbytes, iter(blocks)):
            if len(sending) == SENDERS:
                total = combine_crc32(total, *sending.popleft().result())
            sending.append(threads.submit(put, piece, data))
        for sent in sending:
            total = combine_crc32(total, *sent.result())
        destination.finish_file(name, total)
    except BaseException as error:
        destination.stop(error)
        raise
    finally:
        threads.shutdown(cancel_futures=True)


def fill_pieces(name: str, nbytes: int, blocks: Iterator[bytes | memoryview]) -> Iterator[tuple[FilePiece, memoryview]]:
    """Yield the pieces of a file with their bytes. Takes all blocks to their end."""
    rest = memoryview(b"")
    for piece in cut_into_pieces(name, nbytes):
        data, filled = new_piece_buffer(piece.length), 0
        while filled < piece.length:
            rest = rest or next((memoryview(block) for block in blocks if block), rest)
            if not rest:
                raise ValueError(f"{name}: fewer bytes than were planned")
            length = min(len(rest), piece.length - filled)
            data[filled : filled + length] = rest[:length]
            filled, rest = filled + length, rest[length:]
        yield piece, data
    if rest or any(blocks):
        raise ValueError(f"{name}: more bytes than were planned")
