"""Call the operations of S3 on one bucket, with the library that also reads it. Errors of the store become ours."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from io import SEEK_CUR, SEEK_END, SEEK_SET, IOBase
from pathlib import Path
from typing import Any

from ckptkit.errors import IOFailure, Usage
from ckptkit.io.stores.s3_errors import find_code, needs_reason, refusal

# Checksums are given where they are wanted: those that the library adds by itself break stores that do not know them.
SETTINGS = {
    "config_kwargs": {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
}
_TRIES = 2  # of s3fs, each with the five of botocore: a server that accepts and never answers is given up in minutes


class S3Bucket:
    """One bucket. Its methods may be called by several threads at the same time."""

    def __init__(self, root: Path) -> None:
        self.name = root.parts[1]
        self.root = root  # for errors to name what lies in it
        try:
            import fsspec

            self._files = patient(fsspec.filesystem("s3", **SETTINGS))
        except ImportError as error:
            hint = "run `pip install 'ckptkit-fsdp[s3]'`"
            raise Usage("writing to `s3://` needs a package that is not installed", hint=hint) from error

    def call(self, operation: str, key: str = "", **arguments: Any) -> Mapping[str, Any]:
        """Return the answer to an operation, such as `put_object`, on an object or on the bucket.

        Raises `IOFailure` or `NoRoom` with the URL of the object; `find_code` gives the store's own word for it.
        """
        if "Body" in arguments:
            arguments["Body"] = RequestBody(arguments["Body"])
        named = {"Bucket": self.name, "Key": key} if key else {"Bucket": self.name}
        try:
            answer: Mapping[str, Any] = self._files.call_s3(operation, **named, **arguments)
        except Exception as error:  # every library has its own, and those of what it is built on
            raise self._refusal(error, key) from error
        return answer

    def read(self, key: str) -> bytes:
        """Return the content of a small object. Asks once more if the connection breaks in the middle of it."""
        try:
            return self._read(key)
        except IOFailure as error:
            if find_code(error):
                raise
            return self._read(key)

    def _read(self, key: str) -> bytes:
        from fsspec.asyn import sync

        body = self.call("get_object", key)["Body"]
        try:
            content: bytes = sync(self._files.loop, read_all, body)
        except Exception as error:
            raise self._refusal(error, key) from error
        return content

    def _refusal(self, error: Exception, key: str) -> IOFailure:
        return refusal(hear_reason(self._files, self.name, error), self.root / key)


class RequestBody(IOBase):
    """Bytes that a request reads in steps: they block no other request, and are never copied as a whole."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes, or all that are left."""
        step = self._data[self._at :] if size < 0 else self._data[self._at : self._at + size]
        self._at += len(step)
        return bytes(step)

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Go to a byte, counted from the first, the next or the end of the data. Returns its number."""
        self._at = offset + {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: len(self._data)}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


async def read_all(body: Any) -> bytes:
    """Return the content of an answer, and close its connection whatever happens."""
    async with body:
        content: bytes = await body.read()
        return content


def patient(files: Any) -> Any:
    """Return the file system of s3fs, which makes a request a few times if the connection fails."""
    files.retries = _TRIES
    return files


def hear_reason(files: Any, bucket: str, error: Exception) -> Exception:
    """Return an error of s3fs, or for an answer to HEAD that says no reason the error of a request that does."""
    if needs_reason(error):
        try:
            files.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)
        except Exception as other:  # noqa: BLE001 - as many kinds as the first
            return error if needs_reason(other) else other
    return error


def crc_of(answer: Mapping[str, Any]) -> int | None:
    """Return the CRC-32 of a part or a whole object that an answer of the store has; None if it has none."""
    text = answer.get("ChecksumCRC32")
    return None if text is None or is_of_parts(answer, text) else int.from_bytes(b64decode(text))


def is_of_parts(answer: Mapping[str, Any], text: str) -> bool:
    """Return whether a checksum of an object is one of the checksums of its parts.

    Some stores neither say its type nor append the number of parts to it: then the ETag shows that there are parts.
    """
    kind = answer.get("ChecksumType")
    return kind == "COMPOSITE" or "-" in text or (kind is None and "-" in answer.get("ETag", ""))
