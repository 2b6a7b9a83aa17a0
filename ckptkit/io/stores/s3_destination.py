"""Write a directory of files, or one file, to S3 atomically; an interrupted upload can be resumed.

The claim is an object that only one upload can create. The store compares every part and every object with the CRC-32
that ckptkit sends along. https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import md5
from threading import Lock
from typing import Any

from ckptkit.errors import IOFailure, Occupied
from ckptkit.io.claims import ClaimedOutput, StoreClaim
from ckptkit.io.crc32 import crc32
from ckptkit.io.path import map_in_parallel
from ckptkit.io.pieces import FilePiece, is_sent_in_pieces
from ckptkit.io.stores import StoreEntry
from ckptkit.io.stores.s3 import S3Store, find_crc32_in
from ckptkit.io.stores.s3_errors import ABSENT, TAKEN, Tolerating, error_code_of

_PATIENCE = 300  # seconds to wait until the process that claimed the upload begins it
_ONLY_NEW = {"IfNoneMatch": "*"}
_CONFLICT = ("409", "ConditionalRequestConflict")  # S3 asks the client to retry these
_TRIES = 3  # attempts of a request that conflicts with another one
_NO_LISTS = ("403", "AccessDenied", "405", "MethodNotAllowed", "501", "NotImplemented")
_NO_CHECKSUMS = ("400", "501", "InvalidArgument", "InvalidRequest", "NotImplemented", "SignatureDoesNotMatch")


@dataclass(frozen=True, slots=True)
class SentPart:
    """A part of an object that the store has. `crc32` is None if the store does not compute checksums."""

    etag: str
    nbytes: int
    crc32: int | None


@dataclass(slots=True)
class S3Destination(ClaimedOutput[S3Store]):
    """A `Destination` at a prefix of a bucket, or at a single key.

    After `claim`, `has_conditions` and `has_checksums` are the store's features, and `whole` has the CRC-32 of the
    complete large objects.
    """

    has_conditions: bool = True
    has_checksums: bool = True
    lists_uploads: bool = True
    sent_bytes: int = 0
    kept_bytes: int = 0
    whole: dict[str, int] = field(default_factory=dict)
    _bucket: S3Store = field(init=False)
    _uploads: dict[str, str] = field(default_factory=dict)
    _parts: dict[str, dict[int, SentPart]] = field(default_factory=dict)
    _there: Mapping[str, StoreEntry] = field(default_factory=dict)
    _tag: str = ""  # ETag of the claim as we wrote it
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self._bucket = S3Store(str(self.path.store_root))

    def join_upload(self) -> None:
        for _ in range(_PATIENCE):
            begun = self._read_claim()
            if begun is None or begun.plan != self.plan:
                raise self._upload_target.no_claim_error()
            if begun.uploads is not None:
                self._resume_from_claim(begun)
                return
            time.sleep(1)
        hint = "delete this object, then start all processes again"
        raise Occupied("no process began the upload that is claimed", path=self._upload_target.claim_path, hint=hint)

    def stop(self, error: BaseException) -> None:
        """Do nothing: no part waits for another, and the store keeps all of them."""

    def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
        """Send a part of a large file, or a small file, unless the store has it."""
        if piece.count == 1:
            self.put_small_file(piece.name, data, crc)
            return
        if piece.name in self.whole:
            self._add_to_counts(kept=len(data))
            return
        parts = self._parts.setdefault(piece.name, {})
        stored_part = parts.get(piece.number)
        if stored_part is not None and stored_part.nbytes == len(data) and is_same_part(stored_part, data, crc):
            parts[piece.number] = SentPart(stored_part.etag, len(data), crc)
            self._add_to_counts(kept=len(data))
            return
        more = {"UploadId": self._uploads[piece.name], "PartNumber": piece.number}
        response = self._call("upload_part", piece.name, Body=data, **more, **self._body_checksum_arguments(crc))
        parts[piece.number] = SentPart(response["ETag"], len(data), crc)
        self._add_to_counts(sent=len(data))

    def finish_file(self, name: str, crc32: int) -> None:
        """Combine the parts of a large file into one object, whose CRC-32 the store compares.

        A mark never replaces an existing object. Raises `Occupied` if a different object exists.
        """
        if not is_sent_in_pieces(self.sizes[name]):
            return
        if name not in self.whole:
            parts = sorted(self._parts[name].items())
            listed = [{"PartNumber": n, "ETag": part.etag, **self._checksum_argument(part.crc32)} for n, part in parts]
            kind = {"ChecksumType": "FULL_OBJECT"} if self.has_checksums else {}
            more = {"UploadId": self._uploads[name], "MultipartUpload": {"Parts": listed}}
            condition = _ONLY_NEW if name in self.marks else {}
            try:
                self._call(
                    "complete_multipart_upload", name, **more, **self._checksum_argument(crc32), **kind, **condition
                )
            except IOFailure as error:
                if error_code_of(error) not in (*ABSENT, *TAKEN):
                    raise
                self._require_same_object(name, self.sizes[name], crc32, error)
                return
        self._require_same_object(name, self.sizes[name], crc32)

    def put_small_file(self, name: str, content: bytes | bytearray | memoryview, crc32: int) -> None:
        """Send a complete file, unless the store has it.

        Raises `Occupied` if another upload has sent a different one or, before a mark, has taken over the prefix.
        """
        if name in self._there and self._find_crc(name, len(content)) == crc32:
            self._add_to_counts(kept=len(content))  # an earlier attempt has sent it
            return
        is_mark = name in self.marks
        if is_mark:
            self._require_claim()
        condition = _ONLY_NEW if is_mark or (self.has_conditions and name not in self._there) else {}
        try:
            retry_on_conflict(
                lambda: self._call(
                    "put_object", name, Body=content, **self._body_checksum_arguments(crc32), **condition
                )
            )
            self._add_to_counts(sent=len(content))
        except IOFailure as error:
            if error_code_of(error) not in TAKEN:
                raise
            self._require_same_object(name, len(content), crc32, error)

    put_marker = put_small_file

    def missing_feature_remarks(self) -> list[str]:
        can_not = [
            *([] if self.has_conditions else ["refuse to replace an object: two uploads could collide"]),
            *([] if self.has_checksums else ["compute CRC-32: it did not compare the bytes that it received"]),
            *([] if self.lists_uploads else ["list unfinished uploads: some may be left that ckptkit could not abort"]),
        ]
        return [f"this store does not {what}" for what in can_not]

    def put_note(self, name: str, content: bytes) -> None:
        key = f"{self._upload_target.notes_prefix}{name}"
        self._bucket.call_operation("put_object", key, Body=content, **self._body_checksum_arguments(crc32(content)))

    def read_notes(self) -> dict[str, bytes]:
        base = self._upload_target.notes_prefix
        return {key.removeprefix(base): self._bucket.read_object(key) for key in self._bucket.list_objects(base)}

    def commit(self) -> None:
        """Delete the notes and the claim: the upload is complete."""
        # abort uploads of our files that no claim names: the response with their ids was lost
        keys = {self._upload_target.object_key(name) for name, size in self.sizes.items() if is_sent_in_pieces(size)}
        try:
            uploads = self._bucket.list_uploads(self._upload_target.object_key("")) if keys else []
        except IOFailure as error:
            if error_code_of(error) not in _NO_LISTS:
                raise
            self.lists_uploads, uploads = False, []
        for upload in uploads:
            if upload.key in keys:
                self._bucket.abort_upload(upload.key, upload.upload)
        ClaimedOutput.commit(self)

    def _abandon(self, claim: StoreClaim) -> None:
        """Abort another upload, and delete its files and its claim."""
        self._uploads = dict(claim.uploads or {})
        self._abort_uploads()
        ClaimedOutput._abandon(self, claim)

    def _abort_uploads(self) -> None:
        for name, upload in self._uploads.items():
            self._bucket.abort_upload(self._upload_target.object_key(name), upload)
        self._uploads = {}

    def _add_to_counts(self, *, sent: int = 0, kept: int = 0) -> None:
        with self._lock:
            self.sent_bytes += sent
            self.kept_bytes += kept

    def _start_uploads(self) -> None:
        self._uploads = {}
        try:
            map_in_parallel(
                self._start_large_upload, [name for name, size in self.sizes.items() if is_sent_in_pieces(size)]
            )
            is_ours = self._write_upload_ids()
        except BaseException:
            with suppress(IOFailure):
                self._abort_uploads()  # the claim does not list them yet, so nobody else could abort them
            raise
        if not is_ours:  # another process of the same plan was faster: use its uploads
            self._abort_uploads()
            self.join_upload()

    def _write_upload_ids(self) -> bool:
        """Write the ids of our uploads into the claim. Returns False if another process was faster.

        The other process has the same plan.
        """
        condition = {"IfMatch": self._tag} if self.has_conditions else {}
        try:
            retry_on_conflict(lambda: self._put_claim(self._uploads, condition))
        except IOFailure as error:
            if error_code_of(error) not in TAKEN:
                raise
            begun = self._read_claim()
            if begun is None or begun.uploads is None:
                raise
            return begun.uploads == self._uploads  # equal if only the response to our first attempt was lost
        return True

    def _try_resume(self, begun: StoreClaim) -> bool:
        if begun.uploads is not None:
            self._resume_from_claim(begun)
        return begun.uploads is not None

    def _resume_from_claim(self, claim: StoreClaim) -> None:
        """Continue the upload that the claim describes, for our files."""
        self.has_conditions, self.has_checksums, self._claimed = claim.conditions, claim.checksums, claim.files
        self._uploads = dict(claim.uploads or {})
        self._there = self._existing_files()
        for name, upload in tuple(self._uploads.items()):
            if name not in self.sizes:
                continue
            try:
                self._parts[name] = {
                    int(part["PartNumber"]): SentPart(part["ETag"], int(part["Size"]), find_crc32_in(part))
                    for part in self._bucket.list_parts(self._upload_target.object_key(name), upload)
                }
            except IOFailure as error:
                if error_code_of(error) not in ABSENT:
                    raise
                crc = self._find_crc(name, self.sizes[name]) if name in self._there else None
                if crc is None:  # the store has dropped the earlier upload
                    self._start_large_upload(name)
                    self._put_claim(self._uploads, {})
                else:
                    self.whole[name] = crc

    def _start_large_upload(self, name: str) -> None:
        how = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"} if self.has_checksums else {}
        self._uploads[name] = str(self._call("create_multipart_upload", name, **how)["UploadId"])

    def _find_crc(self, name: str, nbytes: int) -> int | None:
        """Return the CRC-32 of an object of this size; None if it is missing or the store has no CRC-32."""
        with Tolerating(ABSENT):
            response = self._call("head_object", name, ChecksumMode="ENABLED")
            return find_crc32_in(response) if int(response["ContentLength"]) == nbytes else None
        return None

    def _require_same_object(self, name: str, nbytes: int, crc: int, refusal: IOFailure | None = None) -> None:
        """Raise `Occupied` unless the object has this size and CRC-32 (if the store has one).

        If the object does not exist, raises `refusal`, the store's error when creating it.
        """
        try:
            response = self._call("head_object", name, ChecksumMode="ENABLED")
        except IOFailure as error:
            raise refusal if refusal and error_code_of(error) in ABSENT else error from None
        size, known = int(response["ContentLength"]), find_crc32_in(response)
        if size != nbytes or known not in (None, crc):
            known_text = "no CRC-32" if known is None else f"CRC-32 {known:08x}"
            message = f"another object is there: expected {nbytes} bytes, CRC-32 {crc:08x}; found {size}, {known_text}"
            hint = "delete this object, then run the same command again"
            raise Occupied(message, path=self.path / name, hint=hint)

    def _create_claim(self) -> None:
        """Create the claim, unless a process of our plan has; then find out which features the store has."""
        if not self.resumed:
            self._put_new_claim()
        # the claim exists, so a store with conditional writes refuses another one
        with Tolerating(TAKEN):
            self._put_claim(None, _ONLY_NEW)
            self.has_conditions = False
        asked = self._bucket.call_operation("head_object", self._upload_target.claim_key, ChecksumMode="ENABLED")
        # some stores merely return every header that they received
        unasked = self._bucket.call_operation("head_object", self._upload_target.claim_key)
        self._tag = str(unasked["ETag"])
        self.has_checksums = self.has_checksums and find_crc32_in(asked) is not None and find_crc32_in(unasked) is None

    def _put_new_claim(self) -> None:
        try:
            retry_on_conflict(lambda: self._put_claim(None, _ONLY_NEW))
        except IOFailure as error:
            if error_code_of(error) in TAKEN:
                claim = self._read_claim()
                if claim is not None and claim.plan == self.plan:
                    return  # our own claim: the response was lost, and the library retried
                raise self._upload_target.taken_meanwhile_error() from error
            if error_code_of(error) not in _NO_CHECKSUMS:
                raise
            self.has_checksums = False
            self._put_claim(None, _ONLY_NEW)

    def _put_claim(self, uploads: Mapping[str, str] | None, condition: Mapping[str, str]) -> None:
        known = {"conditions": self.has_conditions, "checksums": self.has_checksums}
        data = StoreClaim.begin(self.plan, self._claimed, uploads=uploads, **known).to_bytes()
        key, compared = self._upload_target.claim_key, self._body_checksum_arguments(crc32(data))
        response = self._bucket.call_operation("put_object", key, Body=data, **compared, **condition)
        self._tag = str(response["ETag"])

    def _call(self, operation: str, name: str, **arguments: Any) -> Mapping[str, Any]:
        return self._bucket.call_operation(operation, self._upload_target.object_key(name), **arguments)

    def _body_checksum_arguments(self, crc: int) -> dict[str, str]:
        """Return the arguments that make the store compare a body with its CRC-32."""
        checksum = self._checksum_argument(crc)
        return {"ChecksumAlgorithm": "CRC32", **checksum} if checksum else {}

    def _checksum_argument(self, crc: int | None) -> dict[str, str]:
        if crc is None or not self.has_checksums:
            return {}
        return {"ChecksumCRC32": b64encode(crc.to_bytes(4)).decode()}


def is_same_part(part: SentPart, data: memoryview, crc: int) -> bool:
    """Return whether the store's part has these bytes, by its CRC-32, or else by the MD5 in its ETag."""
    if part.crc32 is not None:
        return part.crc32 == crc
    return part.etag.strip('"') == md5(data, usedforsecurity=False).hexdigest()


def retry_on_conflict(request: Callable[[], object]) -> None:
    """Make a conditional request, retrying a few times while other requests for the same object conflict."""
    for left in reversed(range(_TRIES)):
        try:
            request()
        except IOFailure as error:
            if not left or error_code_of(error) not in _CONFLICT:
                raise
        else:
            return
