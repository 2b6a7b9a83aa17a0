"""Write a directory of files, or one file, to Google Cloud Storage or Azure. The result is atomic.

The claim is an object that only one upload can create; a process that resumes an upload takes over its claim. A large
file is one stream, which becomes visible when it is complete. These stores do not verify a checksum that obstore could
send, so ckptkit compares sizes. Notes next to the claim record for a later attempt which large files are complete.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, NoReturn
from uuid import uuid4

from ckptkit.errors import IOFailure, Occupied, Unsupported
from ckptkit.io.claims import ClaimedOutput, StoreClaim
from ckptkit.io.crc32 import combine_crc32, crc32
from ckptkit.io.path import map_in_parallel
from ckptkit.io.pieces import FilePiece, OrderedWriter, is_sent_in_pieces, piece_size_for
from ckptkit.plugins.object_stores.calls import ObjectBucket, ObjectStream
from ckptkit.words import command_line

if TYPE_CHECKING:
    from obstore import UpdateVersion


@dataclass(frozen=True, slots=True)
class SentFile:
    """A large file that is complete in the store, with its ETag."""

    nbytes: int
    crc32: int
    tag: str


@dataclass(slots=True)
class ObjectDestination(ClaimedOutput[ObjectBucket]):
    """A prefix of a bucket or container, or a single key: a `Destination`.

    After `claim`, `whole` has the large files that are complete.
    """

    sent_bytes: int = 0
    kept_bytes: int = 0
    whole: dict[str, SentFile] = field(default_factory=dict)
    _bucket: ObjectBucket = field(init=False)
    _ordered: OrderedWriter = field(init=False)
    _owner: str = field(default_factory=lambda: uuid4().hex)
    _streams: dict[str, ObjectStream] = field(default_factory=dict)
    _sums: dict[str, int] = field(default_factory=dict)  # the CRC-32 of the bytes written to each stream
    _version: UpdateVersion | None = None  # of the claim, as it was last read
    _sent: dict[str, int] = field(default_factory=dict)  # expected size of each sent file
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self._bucket = ObjectBucket(str(self.path.store_root))
        self._ordered = OrderedWriter(self._write_piece)

    def join_upload(self) -> None:
        """Join an upload that another process has claimed, to send full files; see `Destination`."""
        begun = self._read_claim()
        if begun is None or begun.plan != self.plan:
            raise self._upload_target.no_claim_error()
        self._owner = begun.owner

    def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
        """Send a byte range of a large file after the ranges before it; send a small file at once."""
        if piece.count == 1:
            self.put_small_file(piece.name, data, crc)
        elif piece.name not in self.whole:
            self._ordered.put(piece, data)
        else:
            with self._lock:
                self.kept_bytes += len(data)

    def stop(self, error: BaseException) -> None:
        self._ordered.stop(error)
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.stop(error)

    def put_small_file(self, name: str, content: bytes | bytearray | memoryview, crc32: int) -> None:  # noqa: ARG002 - nobody compares it
        self._bucket.put_object(self._upload_target.object_key(name), content)
        self._add_sent_file(name, len(content), len(content))

    def finish_file(self, name: str, crc32: int) -> None:
        """Make a large marker file visible, unless the object exists; check the CRC-32 of the sent bytes."""
        if not is_sent_in_pieces(self.sizes[name]):
            return
        if name in self._streams:
            self._require_sizes()
            if self._bucket.find_object_meta(self._upload_target.object_key(name)) is not None:
                raise self._occupied_error(name)
            self._finish_stream(name)
        sent = self.whole[name]
        if sent.crc32 != crc32:
            self._bucket.delete_objects([self._note_key(name)])
            message = f"the file that was sent before differs: expected CRC-32 {crc32:08x}, found {sent.crc32:08x}"
            raise IOFailure(message, path=self.path / name, hint="run the same command again: it sends this file again")

    def put_marker(self, name: str, content: bytes | bytearray | memoryview, crc32: int) -> None:  # noqa: ARG002 - nobody compares it
        """Send a marker file, which makes the checkpoint visible.

        Raises `Occupied` if another process has taken over the destination.
        """
        self._require_sizes()
        self._require_claim()
        key = self._upload_target.object_key(name)
        if self._bucket.try_put_object(key, content):
            self._add_sent_file(name, len(content), len(content))
        elif (existing := self._bucket.find_content_and_version(key)) is None or existing[0] != content:
            raise self._occupied_error(name)

    def put_note(self, name: str, content: bytes) -> NoReturn:  # noqa: ARG002
        """Raise `Unsupported`: several processes cannot write one file in this store."""
        message = "several processes cannot write one file in this store"
        hint = "drop --part, or write the parts to a local directory and copy that with `ckptkit cp`"
        raise Unsupported(message, path=self.path, hint=hint)

    def read_notes(self) -> NoReturn:
        self.put_note("", b"")

    def commit(self) -> None:
        """Finish a complete upload, if it still has its claim."""
        self._require_claim()
        ClaimedOutput.commit(self)

    def missing_feature_remarks(self) -> list[str]:
        words = "this store does not compare checksums, so ckptkit compared only the sizes of the files"
        return [f"{words}: {command_line('verify', self.path)} reads every byte back"]

    def _create_claim(self) -> None:
        claim = StoreClaim.begin(self.plan, self._claimed, owner=self._owner)
        if not self._bucket.try_put_object(self._upload_target.claim_key, claim.to_bytes()):
            begun = self._read_claim()
            # our own claim may exist: the response to a first request was lost
            if begun is None or begun.owner != self._owner:
                raise self._upload_target.taken_meanwhile_error()

    def _try_resume(self, begun: StoreClaim) -> bool:
        """Resume an upload and take over its claim. A process that still works on it loses the claim."""
        ours = replace(StoreClaim.begin(self.plan, begun.files, owner=self._owner), started=begun.started)
        if not self._bucket.try_put_object(self._upload_target.claim_key, ours.to_bytes(), self._version):
            self._require_claim()
        existing = self._existing_files()
        noted = self._bucket.list_objects(self._upload_target.notes_prefix)
        large = [name for name, size in self.sizes.items() if name in existing and is_sent_in_pieces(size)]
        with_note = [name for name in large if self._note_key(name) in noted]
        read = map_in_parallel(self._bucket.find_content_and_version, map(self._note_key, with_note))
        for name, note in zip(with_note, read, strict=True):
            sent = None if note is None else parse_sent_file_note(note[0])
            if sent is not None and (existing[name].size, existing[name].tag) == (sent.nbytes, sent.tag):
                self.whole[name] = sent
                self._sent[name] = sent.nbytes
        # the other files are older, if the earlier attempt ended while it deleted them, or are sent again
        self._delete_claimed(begun.files, existing.keys() - self.whole.keys())
        return True

    def _write_piece(self, piece: FilePiece, data: memoryview) -> None:
        """Add the next byte range to the stream of its file. A marker stays invisible until `finish_file`."""
        name = piece.name
        if piece.number == 1:
            stream = ObjectStream(self._bucket, self._upload_target.object_key(name), piece_size_for(self.sizes[name]))
            with self._lock:
                self._streams[name] = stream
        self._sums[name] = combine_crc32(self._sums.get(name, 0), crc32(data), len(data))
        self._streams[name].write(data)
        self._add_sent_file(name, self.sizes[name], len(data))
        if piece.number == piece.count and name not in self.marks:
            self._finish_stream(name)

    def _finish_stream(self, name: str) -> None:
        """Complete the stream of a file, and write a note about it."""
        self._require_claim()
        result = self._streams[name].finish()
        with self._lock:
            del self._streams[name]
        meta = self._bucket.find_object_meta(self._upload_target.object_key(name))
        if meta is None or meta["size"] != self.sizes[name]:
            message = f"expected {self.sizes[name]} bytes, found {meta['size'] if meta else 'no object'}"
            raise IOFailure(message, path=self.path / name, hint="delete this object, then run the same command again")
        sent = SentFile(self.sizes[name], self._sums[name], (result["e_tag"] or "").strip('"'))
        self.whole[name] = sent
        self._bucket.put_object(self._note_key(name), json.dumps([sent.nbytes, sent.crc32, sent.tag]).encode())

    def _add_sent_file(self, name: str, size: int, sent: int) -> None:
        with self._lock:
            self._sent[name] = size
            self.sent_bytes += sent

    def _require_sizes(self) -> None:
        """Raise `IOFailure` unless the store has every sent file except markers, with the right size."""
        existing = self._existing_files()
        for name, size in self._sent.items():
            found = existing[name].size if name in existing else "no object"
            if name not in self.marks and found != size:
                message = f"expected {size} bytes, found {found}"
                hint = "something else writes here: run the same command again"
                raise IOFailure(message, path=self.path / name, hint=hint)

    def _occupied_error(self, name: str) -> Occupied:
        hint = "delete this object, then run the same command again"
        return Occupied("another object is there", path=self.path / name, hint=hint)

    def _read_claim(self) -> StoreClaim | None:
        content, self._version = self._bucket.find_content_and_version(self._upload_target.claim_key) or (b"", None)
        return self._upload_target.parse_claim(content) if self._version is not None else None

    def _note_key(self, name: str) -> str:
        return f"{self._upload_target.notes_prefix}{name}.json"


def parse_sent_file_note(text: bytes) -> SentFile | None:
    """Return the completed file that a note describes; None if the note cannot be read."""
    try:
        nbytes, crc, tag = json.loads(text)
    except (TypeError, ValueError):
        return None
    return SentFile(nbytes, crc, tag)
