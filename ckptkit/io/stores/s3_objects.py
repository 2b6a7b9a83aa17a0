"""List the objects and the multipart uploads of a bucket with their times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.io.stores.s3 import S3Bucket
from ckptkit.io.stores.s3_errors import ABSENT, Tolerating


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


def list_objects(bucket: S3Bucket, prefix: str) -> dict[str, StoredObject]:
    """Return each object whose key begins with `prefix`."""
    objects: dict[str, StoredObject] = {}
    more: dict[str, str] = {}
    while True:
        page = bucket.call_operation("list_objects_v2", Prefix=prefix, **more)
        for item in page.get("Contents", ()):
            objects[item["Key"]] = StoredObject(int(item["Size"]), item["LastModified"].timestamp())
        if not page.get("IsTruncated"):
            return objects
        more = {"ContinuationToken": page["NextContinuationToken"]}


def find_object_content(bucket: S3Bucket, key: str) -> bytes | None:
    """Return the content of a small object; None if it does not exist."""
    with Tolerating(ABSENT):
        return bucket.read_object(key)
    return None


def list_uploads(bucket: S3Bucket, prefix: str) -> list[MultipartUpload]:
    """Return the unfinished multipart uploads whose keys begin with `prefix`."""
    pending: list[MultipartUpload] = []
    more: dict[str, str] = {}
    while True:
        page = bucket.call_operation("list_multipart_uploads", Prefix=prefix, **more)
        uploads = page.get("Uploads", ())
        pending += [MultipartUpload(item["Key"], item["UploadId"], item["Initiated"].timestamp()) for item in uploads]
        if not page.get("IsTruncated"):
            return pending
        more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def list_parts(bucket: S3Bucket, key: str, upload: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of an unfinished upload, as the store describes them."""
    after = 0
    while True:
        page = bucket.call_operation("list_parts", key, UploadId=upload, PartNumberMarker=after)
        for part in page.get("Parts", ()):
            after = int(part["PartNumber"])
            yield part
        if not page.get("IsTruncated"):
            return


def abort_upload(bucket: S3Bucket, key: str, upload: str) -> None:
    """Abort the upload with the id `upload`, if it still exists: the store deletes its parts."""
    with Tolerating(ABSENT):
        bucket.call_operation("abort_multipart_upload", key, UploadId=upload)
