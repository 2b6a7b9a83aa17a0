"""Delete many objects of a bucket at once, and measure unfinished uploads by the store's clock.

https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import islice

from ckptkit.errors import IOFailure, Occupied
from ckptkit.io.claims import StoreClaim
from ckptkit.io.path import RemotePath, drop_cached_listing
from ckptkit.io.stores.s3 import MultipartUpload, S3Store
from ckptkit.io.stores.s3_errors import ABSENT, TAKEN, Tolerating, error_code_of, to_s3_error

_BATCH = 1000  # S3's maximum of objects per deletion request
_BUSY = ("InternalError", "ServiceUnavailable", "SlowDown")  # of single keys; the library only retries requests
_THREADS = 16  # for stores that need one request per object
_PAUSES = (0.2, 1.0, 3.0)  # seconds before each retry of busy keys
# codes of stores without batch deletion
_NO_BATCHES = ("405", "501", "MethodNotAllowed", "MissingContentMD5", "NotImplemented")
_ABSENT = ("404", "NoSuchKey")


class StoreRefused(Exception):
    """The store's error for one object of a batch request, in the form of an error for a single request."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message or code)
        self.code = code
        self.response = {"Error": {"Code": code, "Message": message}}


def measure_upload(bucket: S3Store, upload: MultipartUpload) -> MultipartUpload | None:
    """Return an upload with the size and the time of its parts; None if it no longer exists."""
    nbytes, active = 0, upload.active
    with Tolerating(ABSENT):
        for part in bucket.list_parts(upload.key, upload.upload):
            nbytes += int(part["Size"])
            active = max(active, part["LastModified"].timestamp())
        return replace(upload, active=active, nbytes=nbytes)
    return None


def delete_batch(bucket: S3Store, keys: Sequence[str]) -> None:
    """Delete up to 1,000 objects in one request, or one by one if the store lacks batch deletion.

    Raises `IOFailure` for the first object that the store does not delete. A missing object counts as deleted.
    """
    waiting = list(keys)
    for pause in (*_PAUSES, None):
        try:
            wanted = {"Objects": [{"Key": key} for key in waiting], "Quiet": True}
            answer = bucket.call_operation("delete_objects", Delete=wanted)
        except IOFailure as error:
            if error_code_of(error) not in _NO_BATCHES:
                raise
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(partial(bucket.call_operation, "delete_object"), waiting))
            return
        refused = {
            str(error["Key"]): StoreRefused(str(error.get("Code", "")), str(error.get("Message", "")))
            for error in answer.get("Errors", ())
        }
        waiting = [key for key in waiting if key in refused]
        if not waiting:
            return
        lasting = next((key for key in waiting if pause is None or refused[key].code not in _BUSY), None)
        if lasting is not None:
            raise to_s3_error(refused[lasting], bucket.root / lasting) from refused[lasting]
        time.sleep(pause or 0)


def find_claim_at(bucket: S3Store, key: str) -> StoreClaim | None:
    """Return the claim at a key, from the store and not from a cache; None if it does not exist."""
    content = bucket.find_object_content(key)
    return None if content is None else StoreClaim.parse(content)


def in_batches(keys: Sequence[str]) -> Iterator[list[str]]:
    rest = iter(keys)
    while batch := list(islice(rest, _BATCH)):
        yield batch


def read_store_or_local_clock(bucket: S3Store) -> float:
    """Return the time by the store's clock, in seconds since 1970."""
    answer = bucket.call_operation("list_objects_v2", MaxKeys=1)
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(date).timestamp() if date else time.time()


class S3SmallFiles:
    """Implements `SmallFiles` for the bucket of `root`."""

    def __init__(self, root: RemotePath) -> None:
        self._bucket = S3Store(str(root.store_root))

    def find_content_tag(self, path: RemotePath) -> str:
        with Tolerating(_ABSENT):
            return str(self._bucket.call_operation("head_object", path.key)["ETag"])
        return ""

    def put(self, path: RemotePath, content: bytes, *, replaced_tag: str | None = None) -> str:
        condition = {} if replaced_tag is None else {"IfMatch": replaced_tag} if replaced_tag else {"IfNoneMatch": "*"}
        try:
            response = self._bucket.call_operation("put_object", path.key, Body=content, **condition)
        except IOFailure as error:
            if error_code_of(error) not in (*TAKEN, *_ABSENT):
                raise
            tag = self.find_content_tag(path)
            # same content: our own object, if the response was lost and the library retried
            if not tag or self._bucket.read_object(path.key) != content:
                hint = "stop the other process, then run the same command again"
                raise Occupied("another process has written or deleted this object", path=path, hint=hint) from error
            return tag
        finally:
            drop_cached_listing(path)
        return str(response["ETag"])

    def delete(self, path: RemotePath) -> None:
        self._bucket.call_operation("delete_object", path.key)
        drop_cached_listing(path)
