"""Find the uploads to a prefix of S3 that have not ended, by claims and by what the store lists, and abort them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath

from ckptkit.destinations.claims import StoreClaim
from ckptkit.destinations.destination import CLAIM, NOTES
from ckptkit.errors import IOFailure
from ckptkit.files.path import RemotePath, at_once
from ckptkit.files.stores.s3_calls import S3Bucket
from ckptkit.files.stores.s3_errors import ABSENT, find_code
from ckptkit.files.stores.s3_objects import (
    MultipartUpload,
    SentParts,
    StoredObject,
    abort_upload,
    delete_objects,
    in_batches,
    list_objects,
    list_uploads,
    measure_parts,
    read_clock,
)

Measured = dict[MultipartUpload, SentParts]


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """An upload to `path` that has not ended: one that has a claim, or one of a single object without a claim of ours.

    It `started` at a time, from `host` if a claim says that. Nothing was sent for `idle_seconds`. Of its `files`, each
    a multipart upload, the store has `sent_bytes` in parts. `whole_bytes` are of objects at the path that are whole.
    """

    path: RemotePath
    started: str
    host: str | None
    idle_seconds: float
    files: tuple[MultipartUpload, ...]
    sent_bytes: int
    whole_bytes: int = 0
    claim: StoreClaim | None = None


@dataclass(frozen=True, slots=True)
class ClaimedPlace:
    """A place that an upload has claimed: the key of its directory or of its one file."""

    key: str
    is_file: bool
    claim: StoreClaim

    @property
    def claim_key(self) -> str:
        return claim_key(self.key, is_file=self.is_file)

    @property
    def notes_prefix(self) -> str:
        """Return how the keys of notes begin."""
        return f"{self.claim_key.removesuffix(CLAIM)}{NOTES}/"

    def split(self, objects: Mapping[str, StoredObject]) -> tuple[list[StoredObject], list[StoredObject]]:
        """Return the claim and its notes, and the other objects of the place."""
        own, others = [], []
        for key, one in objects.items():
            if key == self.claim_key or key.startswith(self.notes_prefix):
                own.append(one)
            elif key == self.key if self.is_file else key.startswith(beneath(self.key)):
                others.append(one)
        return own, others


def find_uploads(root: RemotePath) -> list[OpenUpload]:
    """Return the uploads that have not ended at or below a prefix, those that wrote last come last."""
    bucket = bucket_of(root)
    objects = {key: one for key, one in list_objects(bucket, root.key).items() if is_in(key, root.key)}
    uploads = [one for one in list_uploads(bucket, root.key) if is_in(one.key, root.key)]
    found = zip(uploads, at_once(lambda one: measure_parts(bucket, one), uploads), strict=True)
    measured = {upload: sent for upload, sent in found if sent is not None}
    places = list(claimed_places(bucket, objects))
    now = read_clock(bucket)
    named = {upload for place in places for upload in place.claim.uploads.values()}
    alone = [one for one in measured if one.upload not in named]
    every = [
        *(claimed_upload(bucket, place, objects, measured, now) for place in places),
        *(unclaimed_upload(bucket, one, measured[one], now) for one in alone),
    ]
    return sorted(every, key=lambda one: (-one.idle_seconds, str(one.path)))


def claimed_places(bucket: S3Bucket, keys: Iterable[str]) -> Iterator[ClaimedPlace]:
    """Yield the places that uploads have claimed; a deletion's claim is none of an upload."""
    for key in keys:
        if not key.endswith(CLAIM):
            continue
        claim = read_claim_at(bucket, key)
        if claim is not None and not claim.is_deletion:
            is_file = PurePosixPath(key).name != CLAIM
            yield ClaimedPlace(key.removesuffix(CLAIM) if is_file else key.removesuffix(CLAIM)[:-1], is_file, claim)


def claimed_upload(
    bucket: S3Bucket, place: ClaimedPlace, objects: Mapping[str, StoredObject], measured: Measured, now: float
) -> OpenUpload:
    """Return the upload that has claimed a place."""
    own, others = place.split(objects)
    ids = set(place.claim.uploads.values())
    files = tuple(one for one in measured if one.upload in ids)
    wrote = [*(one.changed for one in (*own, *others)), *(last_write(one, measured[one]) for one in files)]
    return OpenUpload(
        RemotePath(*bucket.root.parts, place.key),
        place.claim.started,
        place.claim.host,
        max(0.0, now - max(wrote)),
        files,
        sum(measured[one].nbytes for one in files),
        sum(one.nbytes for one in others),
        place.claim,
    )


def unclaimed_upload(bucket: S3Bucket, upload: MultipartUpload, sent: SentParts, now: float) -> OpenUpload:
    """Return the upload of one object that no claim names: of another tool, or of an upload that lost its claim."""
    started = datetime.fromtimestamp(upload.began, UTC).isoformat(timespec="seconds")
    idle = max(0.0, now - last_write(upload, sent))
    return OpenUpload(RemotePath(*bucket.root.parts, upload.key), started, None, idle, (upload,), sent.nbytes)


def last_write(upload: MultipartUpload, sent: SentParts) -> float:
    return max(upload.began, sent.changed)


def abort(upload: OpenUpload) -> bool:
    """Abort an upload: the store forgets its parts, then its notes and its claim are deleted. Whole objects stay.

    Return False, with nothing changed, if another upload has taken its place.
    """
    bucket = bucket_of(upload.path)
    own = next((key for key in claim_keys(upload.path) if is_claim(bucket, key, upload)), None)
    if upload.claim is not None and own is None:
        return False
    at_once(lambda one: abort_upload(bucket, one.key, one.upload), upload.files)
    if own is not None:
        notes = list(list_objects(bucket, f"{own.removesuffix(CLAIM)}{NOTES}/"))
        for batch in in_batches(notes):
            delete_objects(bucket, batch)
        bucket.call("delete_object", own)  # last: until then the upload is found again
    upload.path.store.forget()
    return True


def is_claim(bucket: S3Bucket, key: str, upload: OpenUpload) -> bool:
    """Return whether an object is the claim of an upload, unchanged."""
    return upload.claim is not None and read_claim_at(bucket, key) == upload.claim


def read_claim_at(bucket: S3Bucket, key: str) -> StoreClaim | None:
    """Ask for a claim; None if there is none any more."""
    try:
        return StoreClaim.parse(bucket.read(key))
    except IOFailure as error:
        if find_code(error) not in ABSENT:
            raise
        return None


def claim_keys(place: RemotePath) -> tuple[str, str]:
    """Return where the claim of an upload lies: in a directory, or beside a file."""
    return claim_key(place.key, is_file=False), claim_key(place.key, is_file=True)


def claim_key(key: str, *, is_file: bool) -> str:
    return f"{key}{CLAIM}" if is_file else f"{beneath(key)}{CLAIM}"


def beneath(key: str) -> str:
    """Return how the keys begin that lie below a key."""
    return f"{key}/" if key else ""


def is_in(key: str, root: str) -> bool:
    """Return whether a key is a place, lies below it, or belongs to its upload, and not to a neighbor named alike."""
    return key in (root, f"{root}{CLAIM}") or key.startswith((beneath(root), f"{root}{NOTES}/"))


def bucket_of(path: RemotePath) -> S3Bucket:
    return S3Bucket(path.parts[1], RemotePath(*path.parts[:2]))
