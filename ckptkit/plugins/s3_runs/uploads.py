"""Find and abort unfinished uploads below an S3 prefix, from claims and from the store's list of multipart uploads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath

from ckptkit.io.claims import StoreClaim, UploadTarget, prefix_below
from ckptkit.io.destination import CLAIM, NOTES
from ckptkit.io.path import RemotePath, drop_cached_listing, map_in_parallel
from ckptkit.io.stores.s3 import S3Bucket
from ckptkit.io.stores.s3_objects import (
    MultipartUpload,
    StoredObject,
    abort_upload,
    list_objects,
    list_uploads,
)
from ckptkit.plugins.s3_runs.objects import (
    SentParts,
    delete_objects,
    find_claim_at,
    find_sent_parts,
    in_batches,
    read_store_or_local_clock,
)
from ckptkit.runs.uploads import OpenUpload

Measured = dict[MultipartUpload, SentParts]


@dataclass(frozen=True, slots=True)
class ClaimedPlace:
    """The directory or file that an upload has claimed, and its claim."""

    place: UploadTarget
    claim: StoreClaim

    def split_off_claim(self, objects: Mapping[str, StoredObject]) -> tuple[list[StoredObject], list[StoredObject]]:
        """Return the claim with its notes, and the other objects of the destination."""
        own, others = [], []
        base = self.place.object_key("")
        for key, stored in objects.items():
            if self.place.is_claim_or_note(key):
                own.append(stored)
            elif key == base if self.place.is_file else key.startswith(base):
                others.append(stored)
        return own, others


def find_uploads(root: RemotePath) -> list[OpenUpload]:
    """Return the unfinished uploads at or below a prefix; the most recently active come last."""
    bucket = S3Bucket(root.store_root)
    objects = {key: stored for key, stored in list_objects(bucket, root.key).items() if is_in_upload_of(key, root.key)}
    uploads = [upload for upload in list_uploads(bucket, root.key) if is_in_upload_of(upload.key, root.key)]
    parts = map_in_parallel(lambda upload: find_sent_parts(bucket, upload), uploads)
    measured = {upload: sent for upload, sent in zip(uploads, parts, strict=True) if sent is not None}
    places = list(claimed_destinations(bucket, objects))
    now = read_store_or_local_clock(bucket)
    named = {upload for place in places for upload in (place.claim.uploads or {}).values()}
    unclaimed = [upload for upload in measured if upload.upload not in named]
    every = [
        *(describe_upload(place, objects, measured, now) for place in places),
        *(describe_unclaimed_upload(bucket, upload, measured[upload], now) for upload in unclaimed),
    ]
    return sorted(every, key=lambda upload: (-upload.idle_seconds, str(upload.path)))


def claimed_destinations(bucket: S3Bucket, keys: Iterable[str]) -> Iterator[ClaimedPlace]:
    """Yield the destinations that uploads have claimed; claims of deletions are skipped."""
    for key in keys:
        if not key.endswith(CLAIM):
            continue
        claim = find_claim_at(bucket, key)
        if claim is not None and not claim.is_deletion:
            is_file = PurePosixPath(key).name != CLAIM
            path = RemotePath(*bucket.root.parts, key.removesuffix(CLAIM).removesuffix("" if is_file else "/"))
            yield ClaimedPlace(UploadTarget(path, is_file), claim)


def describe_upload(
    destination: ClaimedPlace, objects: Mapping[str, StoredObject], measured: Measured, now: float
) -> OpenUpload:
    """Return the upload of a claimed destination."""
    claim_objects, data_objects = destination.split_off_claim(objects)
    ids = set((destination.claim.uploads or {}).values())
    files = tuple(stored for stored in measured if stored.upload in ids)
    write_times = [
        *(stored.changed for stored in (*claim_objects, *data_objects)),
        *(last_write_time(stored, measured[stored]) for stored in files),
    ]
    return OpenUpload(
        destination.place.path,
        destination.claim.started,
        destination.claim.host,
        max(0.0, now - max(write_times)),
        files,
        sum(measured[stored].nbytes for stored in files),
        sum(stored.nbytes for stored in data_objects),
        destination.claim,
    )


def describe_unclaimed_upload(bucket: S3Bucket, upload: MultipartUpload, sent: SentParts, now: float) -> OpenUpload:
    """Return the multipart upload of an object without a claim: from another tool, or its claim was lost."""
    started = datetime.fromtimestamp(upload.began, UTC).isoformat(timespec="seconds")
    idle = max(0.0, now - last_write_time(upload, sent))
    return OpenUpload(RemotePath(*bucket.root.parts, upload.key), started, None, idle, (upload,), sent.nbytes)


def last_write_time(upload: MultipartUpload, sent: SentParts) -> float:
    return max(upload.began, sent.changed)


def abort_open_upload(upload: OpenUpload) -> bool:
    """Abort an upload: discard its parts, then delete its notes and its claim. Complete objects stay.

    Returns False, and changes nothing, if another upload has taken over the destination.
    """
    bucket = S3Bucket(upload.path.store_root)
    either = (UploadTarget(upload.path, is_file) for is_file in (False, True)) if upload.claim else ()
    own = next((place for place in either if find_claim_at(bucket, place.claim_key) == upload.claim), None)
    if upload.claim is not None and own is None:
        return False
    map_in_parallel(lambda one: abort_upload(bucket, one.key, one.upload), upload.files)
    if own is not None:
        notes = list(list_objects(bucket, own.notes_prefix))
        for batch in in_batches(notes):
            delete_objects(bucket, batch)
        bucket.call_operation("delete_object", own.claim_key)  # last: until then an interrupted abort can be repeated
    drop_cached_listing(upload.path)
    return True


def is_in_upload_of(key: str, root: str) -> bool:
    """Return whether a key is `root`, below it, or part of its upload; keys that only share a prefix are excluded."""
    return key in (root, f"{root}{CLAIM}") or key.startswith((prefix_below(root), f"{root}{NOTES}/"))
