"""Read from S3 with s3fs, call its operations on one bucket, and list what is in it.

Errors of the store become ckptkit's.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import SEEK_CUR, SEEK_END, SEEK_SET, IOBase
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptError, IOFailure
from ckptkit.io.path import to_uncached_path
from ckptkit.io.stores import StoredSum, StoreEntry
from ckptkit.io.stores.generic import FileSystem
from ckptkit.io.stores.s3_errors import ABSENT, Tolerating, error_code_of, lacks_error_detail, to_s3_error

# ckptkit sends checksums explicitly: those that botocore adds by default break stores that do not know them.
SETTINGS = {
    "config_kwargs": {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
}
# attempts of s3fs, each with five of botocore: a server that never responds fails within minutes
_TRIES = 2
_CHECKSUM_PREFIX = "Checksum"  # prefix of all checksum fields in a response
_NOT_CHECKSUMS = ("Type", "Algorithm")


class S3Store(FileSystem):
    """The bucket at `url`. Thread-safe."""

    def __init__(self, url: str) -> None:
        super().__init__(url, **SETTINGS)
        self._files.retries = _TRIES
        self.root = to_uncached_path(url)  # for the URLs in error messages

    def to_ckpt_error(self, error: Exception, path: Path) -> CkptError:
        return to_s3_error(fetch_error_detail(self._files, self._base, error), path)

    def read_stored_checksums(self, key: str) -> StoredSum:
        """Return the store's CRC-32 of an object: of the full object, or of each part.

        https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
        """
        response = self._files.call_s3("head_object", Bucket=self._base, Key=key, ChecksumMode="ENABLED")
        sums = {
            name.removeprefix(_CHECKSUM_PREFIX): response[name]
            for name in response
            if name.startswith(_CHECKSUM_PREFIX)
        }
        kinds = tuple(
            f"{kind} of parts" if is_checksum_of_parts(response, text) else kind
            for kind, text in sums.items()
            if kind not in _NOT_CHECKSUMS
        )
        size, crc = int(response["ContentLength"]), find_crc32_in(response)
        if crc is None and "CRC32 of parts" in kinds:
            return StoredSum(size, self._list_part_checksums(key), kinds)
        return StoredSum(size, () if crc is None else ((crc, size),), kinds)

    def _list_part_checksums(self, key: str) -> tuple[tuple[int, int], ...]:
        """Return the CRC-32 and the size of each part of an object; () if the store lacks any of them."""
        sums: list[tuple[int, int]] = []
        while True:
            asked = {"ObjectAttributes": ["ObjectParts"], "MaxParts": 1000, "PartNumberMarker": len(sums)}
            try:
                response = self._files.call_s3("get_object_attributes", Bucket=self._base, Key=key, **asked)
            except OSError:  # needs the permission s3:GetObjectAttributes; many stores lack the operation
                return ()
            page = response.get("ObjectParts", {})
            if not page.get("Parts"):
                return ()
            for part in page["Parts"]:
                crc = find_crc32_in(part)
                if crc is None or int(part["PartNumber"]) != len(sums) + 1:
                    return ()
                sums.append((crc, int(part["Size"])))
            if not page.get("IsTruncated"):
                return tuple(sums)

    def call_operation(self, operation: str, key: str = "", **arguments: Any) -> Mapping[str, Any]:
        """Return the response to an operation, such as `put_object`, on an object or on the bucket.

        Raises `IOFailure` or `NoRoom` with the URL of the object; `error_code_of` gives the store's error code.
        """
        if "Body" in arguments:
            arguments["Body"] = RequestBody(arguments["Body"])
        named = {"Bucket": self._base, "Key": key} if key else {"Bucket": self._base}
        try:
            response: Mapping[str, Any] = self._files.call_s3(operation, **named, **arguments)
        except Exception as error:  # every library has its own exceptions, and those of its dependencies
            raise self.to_ckpt_error(error, self.root / key) from error
        return response

    def read_object(self, key: str) -> bytes:
        """Return the content of a small object. Retries once if the connection breaks in the middle."""
        try:
            return self._read_object_once(key)
        except IOFailure as error:
            if error_code_of(error):
                raise  # the store refused: no retry
            return self._read_object_once(key)

    def _read_object_once(self, key: str) -> bytes:
        from fsspec.asyn import sync

        body = self.call_operation("get_object", key)["Body"]
        try:
            content: bytes = sync(self._files.loop, read_body, body)
        except Exception as error:
            raise self.to_ckpt_error(error, self.root / key) from error
        return content

    def find_object_content(self, key: str) -> bytes | None:
        with Tolerating(ABSENT):
            return self.read_object(key)
        return None

    def list_objects(self, prefix: str) -> dict[str, StoreEntry]:
        """Return the objects whose keys begin with `prefix`, by key."""
        objects: dict[str, StoreEntry] = {}
        more: dict[str, str] = {}
        while True:
            page = self.call_operation("list_objects_v2", Prefix=prefix, **more)
            for item in page.get("Contents", ()):
                name, changed = item["Key"].rpartition("/")[2], item["LastModified"].timestamp()
                objects[item["Key"]] = StoreEntry(name, False, int(item["Size"]), changed)
            if not page.get("IsTruncated"):
                return objects
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete_objects(self, keys: Iterable[str]) -> None:
        """Delete objects one by one, in order."""
        for key in keys:
            self.call_operation("delete_object", key)

    def list_uploads(self, prefix: str) -> list[MultipartUpload]:
        """Return the unfinished multipart uploads whose keys begin with `prefix`."""
        pending: list[MultipartUpload] = []
        more: dict[str, str] = {}
        while True:
            page = self.call_operation("list_multipart_uploads", Prefix=prefix, **more)
            for item in page.get("Uploads", ()):
                began = item["Initiated"].timestamp()
                pending.append(MultipartUpload(item["Key"], item["UploadId"], began, began))
            if not page.get("IsTruncated"):
                return pending
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def list_parts(self, key: str, upload: str) -> Iterator[Mapping[str, Any]]:
        """Yield the parts of an unfinished upload, as the store describes them."""
        after = 0
        while True:
            page = self.call_operation("list_parts", key, UploadId=upload, PartNumberMarker=after)
            for part in page.get("Parts", ()):
                after = int(part["PartNumber"])
                yield part
            if not page.get("IsTruncated"):
                return

    def abort_upload(self, key: str, upload: str) -> None:
        """Abort the upload with the id `upload`, if it still exists: the store deletes its parts."""
        with Tolerating(ABSENT):
            self.call_operation("abort_multipart_upload", key, UploadId=upload)

    def _means_missing_file(self, error: FileNotFoundError) -> bool:
        return error_code_of(error) != "NoSuchBucket"


@dataclass(frozen=True, slots=True)
class MultipartUpload:
    """A multipart upload of the object at `key`, and the times at which it began and last received a part.

    The times are by the store's clock. The store has `nbytes` of parts. A listing knows only the time it began.
    """

    key: str
    upload: str
    began: float
    active: float
    nbytes: int = 0


class RequestBody(IOBase):
    """A request body that is read in steps, so that it blocks no other request and is never copied as a whole."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        step = self._data[self._at :] if size < 0 else self._data[self._at : self._at + size]
        self._at += len(step)
        return bytes(step)

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self._at = offset + {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: len(self._data)}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


async def read_body(body: Any) -> bytes:
    """Return the content of a response, and always close its connection."""
    async with body:
        content: bytes = await body.read()
        return content


def fetch_error_detail(file_system: Any, bucket: str, error: Exception) -> Exception:
    """Return the error of s3fs, or a more specific one if it came from a HEAD request, which gives no reason.

    Sends a request that does return a reason.
    """
    if lacks_error_detail(error):
        try:
            file_system.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)
        except Exception as other:  # noqa: BLE001 - as many kinds as the first
            return error if lacks_error_detail(other) else other
    return error


def find_crc32_in(response: Mapping[str, Any]) -> int | None:
    """Return the CRC-32 of a part or a full object in a response; None if it has none."""
    text = response.get("ChecksumCRC32")
    return None if text is None or is_checksum_of_parts(response, text) else int.from_bytes(b64decode(text))


def is_checksum_of_parts(response: Mapping[str, Any], checksum: str) -> bool:
    """Return whether an object's checksum is a checksum of the checksums of its parts.

    Some stores neither return its type nor append the number of parts to it: then the ETag shows that there are parts.
    """
    kind = response.get("ChecksumType")
    return kind == "COMPOSITE" or "-" in checksum or (kind is None and "-" in response.get("ETag", ""))
