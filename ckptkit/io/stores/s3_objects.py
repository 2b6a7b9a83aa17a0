"""List the objects and the multipart uploads of a bucket with their times, and delete many objects at once.

https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import islice

from ckptkit.errors import IOFailure
from ckptkit.io.stores.s3 import S3Bucket
from ckptkit.io.stores.s3_errors import ABSENT, StoreRefused, find_code, refusal

BATCH = 1000  # S3's maximum of objects per deletion request
_BUSY = ("InternalError", "ServiceUnavailable", "SlowDown")  # of single keys; the library only retries requests
_THREADS = 16  # for stores that need one request per object
_PAUSES = (0.2, 1.0, 3.0)  # seconds before each retry of busy keys
_NO_BATCHES = (
    "405",
    "501",
    "MethodNotAllowed",
    "MissingContentMD5",
    "NotImplemented",
)  # codes of stores without batch deletion


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object: its size in bytes, and its modification time in seconds since 1970, by the store's clock."""

    nbytes: int
    changed: float


@dataclass(frozen=True, slots=True)
class MultipartUpload:
    """A multipart upload of the object at `key`, and the time it began, by the store's clock."""

    key: str
    upload: str
    began: float


@dataclass(frozen=True, slots=True)
class SentParts:
    """The bytes of the parts that a store has, and the time of the latest part; 0 if there are none."""

    nbytes: int
    changed: float


def list_objects(bucket: S3Bucket, prefix: str) -> dict[str, StoredObject]:
    """Return each object whose key begins with `prefix`."""
    objects: dict[str, StoredObject] = {}
    more: dict[str, str] = {}
    while True:
        page = bucket.call("list_objects_v2", Prefix=prefix, **more)
        for item in page.get("Contents", ()):
            objects[item["Key"]] = StoredObject(int(item["Size"]), to_seconds(item["LastModified"]))
        if not page.get("IsTruncated"):
            return objects
        more = {"ContinuationToken": page["NextContinuationToken"]}


def read_object(bucket: S3Bucket, key: str) -> bytes | None:
    """Return the content of a small object; None if it does not exist."""
    try:
        return bucket.read(key)
    except IOFailure as error:
        if find_code(error) not in ABSENT:
            raise
        return None


def list_uploads(bucket: S3Bucket, prefix: str) -> list[MultipartUpload]:
    """Return the unfinished multipart uploads whose keys begin with `prefix`."""
    pending: list[MultipartUpload] = []
    more: dict[str, str] = {}
    while True:
        page = bucket.call("list_multipart_uploads", Prefix=prefix, **more)
        uploads = page.get("Uploads", ())
        pending += [MultipartUpload(item["Key"], item["UploadId"], to_seconds(item["Initiated"])) for item in uploads]
        if not page.get("IsTruncated"):
            return pending
        more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def measure_parts(bucket: S3Bucket, upload: MultipartUpload) -> SentParts | None:
    """Return the size and time of an upload's parts; None if the upload no longer exists."""
    after, nbytes, changed = 0, 0, 0.0
    while True:
        try:
            page = bucket.call("list_parts", upload.key, UploadId=upload.upload, PartNumberMarker=after)
        except IOFailure as error:
            if find_code(error) not in ABSENT:
                raise
            return None
        for part in page.get("Parts", ()):
            after = int(part["PartNumber"])
            nbytes += int(part["Size"])
            changed = max(changed, to_seconds(part["LastModified"]))
        if not page.get("IsTruncated"):
            return SentParts(nbytes, changed)


def abort_upload(bucket: S3Bucket, key: str, upload: str) -> None:
    """Abort the upload with the id `upload`, if it still exists: the store deletes its parts."""
    try:
        bucket.call("abort_multipart_upload", key, UploadId=upload)
    except IOFailure as error:
        if find_code(error) not in ABSENT:
            raise


def delete_objects(bucket: S3Bucket, keys: Sequence[str]) -> None:
    """Delete up to 1,000 objects in one request, or one by one if the store lacks batch deletion.

    Raises `IOFailure` for the first object that the store does not delete. A missing object counts as deleted.
    """
    waiting = list(keys)
    for pause in (*_PAUSES, None):
        try:
            refused = ask_to_delete(bucket, waiting)
        except IOFailure as error:
            if find_code(error) not in _NO_BATCHES:
                raise
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(partial(bucket.call, "delete_object"), waiting))
            return
        waiting = [key for key in waiting if key in refused]
        if not waiting:
            return
        lasting = next((key for key in waiting if pause is None or refused[key].code not in _BUSY), None)
        if lasting is not None:
            raise refusal(refused[lasting], bucket.root / lasting) from refused[lasting]
        time.sleep(pause or 0)


def ask_to_delete(bucket: S3Bucket, keys: Sequence[str]) -> dict[str, StoreRefused]:
    """Send one deletion request; return the objects that the store did not delete, each with its reason."""
    answer = bucket.call("delete_objects", Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True})
    return {
        str(error["Key"]): StoreRefused(str(error.get("Code", "")), str(error.get("Message", "")))
        for error in answer.get("Errors", ())
    }


def in_batches(keys: Sequence[str]) -> Iterator[list[str]]:
    """Yield keys in lists of at most `BATCH`."""
    rest = iter(keys)
    while batch := list(islice(rest, BATCH)):
        yield batch


def read_clock(bucket: S3Bucket) -> float:
    """Return the time by the store's clock, in seconds since 1970."""
    answer = bucket.call("list_objects_v2", MaxKeys=1)
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(date).timestamp() if date else time.time()


def to_seconds(time_of: datetime) -> float:
    return time_of.timestamp()
