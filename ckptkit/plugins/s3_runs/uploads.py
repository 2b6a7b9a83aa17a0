"""Find and abort unfinished uploads below an S3 prefix, from claims and from the store's list of multipart uploads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import PurePosixPath

from ckptkit.io.claims import StoreClaim, UploadTarget, prefix_below
from ckptkit.io.destination import CLAIM, NOTES
from ckptkit.io.path import RemotePath, drop_cached_listing, map_in_parallel
from ckptkit.io.stores import StoreEntry
from ckptkit.io.stores.s3 import MultipartUpload, S3Store
from ckptkit.plugins.s3_runs.objects import (
    delete_batch,
    find_claim_at,
    in_batches,
    measure_upload,
    read_store_or_local_clock,
)
from ckptkit.runs.uploads import OpenUpload


def find_uploads(root: RemotePath) -> list[OpenUpload]:
    """Return the unfinished uploads at or below a prefix; the most recently active come last."""
    bucket = S3Store(str(root.store_root))
    objects = {key: stored for key, stored in bucket.list_objects(root.key).items() if is_in_upload_of(key, root.key)}
    uploads = [upload for upload in bucket.list_uploads(root.key) if is_in_upload_of(upload.key, root.key)]
    measured = [upload for upload in map_in_parallel(partial(measure_upload, bucket), uploads) if upload]
    claimed = list(claimed_destinations(bucket, objects))
    now = read_store_or_local_clock(bucket)
    every = [unfinished_upload_of(place, claim, objects, measured, now) for place, claim in claimed]
    named = {upload for _, claim in claimed for upload in (claim.uploads or {}).values()}
    for upload in measured:
        if upload.upload not in named:  # it is from another tool, or its claim was lost
            started = datetime.fromtimestamp(upload.began, UTC).isoformat(timespec="seconds")
            idle = max(0.0, now - upload.active)
            path = RemotePath(*bucket.root.parts, upload.key)
            every.append(OpenUpload(path, started, None, idle, (upload,), upload.nbytes))
    return sorted(every, key=lambda upload: (-upload.idle_seconds, str(upload.path)))


def claimed_destinations(bucket: S3Store, keys: Iterable[str]) -> Iterator[tuple[UploadTarget, StoreClaim]]:
    """Yield the destinations that uploads have claimed, with the claims; claims of deletions are skipped."""
    for key in keys:
        if not key.endswith(CLAIM):
            continue
        claim = find_claim_at(bucket, key)
        if claim is not None and not claim.is_deletion:
            is_file = PurePosixPath(key).name != CLAIM
            path = RemotePath(*bucket.root.parts, key.removesuffix(CLAIM).removesuffix("" if is_file else "/"))
            yield UploadTarget(path, is_file), claim


def unfinished_upload_of(
    target: UploadTarget,
    claim: StoreClaim,
    objects: Mapping[str, StoreEntry],
    uploads: Iterable[MultipartUpload],
    now: float,
) -> OpenUpload:
    """Return the upload of a claimed destination."""
    ids = set((claim.uploads or {}).values())
    files = tuple(upload for upload in uploads if upload.upload in ids)
    write_times = [upload.active for upload in files]
    base, finished_bytes = target.object_key(""), 0
    for key, stored in objects.items():
        if target.is_claim_or_note(key):
            write_times.append(stored.changed)
        elif key == base if target.is_file else key.startswith(base):
            write_times.append(stored.changed)
            finished_bytes += stored.size
    return OpenUpload(
        target.path,
        claim.started,
        claim.host,
        max(0.0, now - max(write_times)),
        files,
        sum(upload.nbytes for upload in files),
        finished_bytes,
        claim,
    )


def abort_open_upload(upload: OpenUpload) -> bool:
    """Abort an upload: discard its parts, then delete its notes and its claim. Complete objects stay.

    Returns False, and changes nothing, if another upload has taken over the destination.
    """
    bucket = S3Store(str(upload.path.store_root))
    either = (UploadTarget(upload.path, is_file) for is_file in (False, True)) if upload.claim else ()
    own = next((place for place in either if find_claim_at(bucket, place.claim_key) == upload.claim), None)
    if upload.claim is not None and own is None:
        return False
    map_in_parallel(lambda one: bucket.abort_upload(one.key, one.upload), upload.files)
    if own is not None:
        for batch in in_batches(list(bucket.list_objects(own.notes_prefix))):
            delete_batch(bucket, batch)
        bucket.call_operation("delete_object", own.claim_key)  # last: until then an interrupted abort can be repeated
    drop_cached_listing(upload.path)
    return True


def is_in_upload_of(key: str, root: str) -> bool:
    """Return whether a key is `root`, below it, or part of its upload; keys that only share a prefix are excluded."""
    return key in (root, f"{root}{CLAIM}") or key.startswith((prefix_below(root), f"{root}{NOTES}/"))
