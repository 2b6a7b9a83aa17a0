"""Read from S3 with s3fs. Knows why the store refuses, and the checksums that it keeps of objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptError
from ckptkit.io.stores import StoredSum
from ckptkit.io.stores.generic import FileSystem
from ckptkit.io.stores.s3_calls import SETTINGS, crc_of, hear_reason, is_of_parts, patient
from ckptkit.io.stores.s3_errors import find_code, refusal

_SUM = "Checksum"  # the beginning of the names of all checksums in an answer
_NOT_SUMS = ("Type", "Algorithm")


class S3Store(FileSystem):
    """The bucket that `url` means."""

    def __init__(self, url: str) -> None:
        super().__init__(url, **SETTINGS)
        patient(self._files)

    def refusal(self, error: Exception, path: Path) -> CkptError:
        """Return our error for one of s3fs or botocore."""
        return refusal(hear_reason(self._files, self._base, error), path)

    def stored_sum(self, key: str) -> StoredSum:
        """Return what the store knows of an object: a CRC-32 of the whole, or one of each part.

        https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
        """
        found = self._files.call_s3("head_object", Bucket=self._base, Key=key, ChecksumMode="ENABLED")
        sums = {name.removeprefix(_SUM): found[name] for name in found if name.startswith(_SUM)}
        kinds = tuple(
            f"{kind} of parts" if is_of_parts(found, text) else kind
            for kind, text in sums.items()
            if kind not in _NOT_SUMS
        )
        size, crc = int(found["ContentLength"]), crc_of(found)
        if crc is None and "CRC32 of parts" in kinds:
            return StoredSum(size, self._sums_of_parts(key), kinds)
        return StoredSum(size, () if crc is None else ((crc, size),), kinds)

    def _sums_of_parts(self, key: str) -> tuple[tuple[int, int], ...]:
        """Return the CRC-32 and the bytes of each part of an object; () if the store does not tell all of them."""
        sums: list[tuple[int, int]] = []
        while page := self._ask_for_parts(key, after=len(sums)):
            for part in page["Parts"]:
                crc = crc_of(part)
                if crc is None or int(part["PartNumber"]) != len(sums) + 1:
                    return ()
                sums.append((crc, int(part["Size"])))
            if not page.get("IsTruncated"):
                return tuple(sums)
        return ()

    def _ask_for_parts(self, key: str, after: int) -> Mapping[str, Any]:
        """Return a page of the parts of an object, {} if the store does not tell any."""
        asked = {"ObjectAttributes": ["ObjectParts"], "MaxParts": 1000, "PartNumberMarker": after}
        try:
            found = self._files.call_s3("get_object_attributes", Bucket=self._base, Key=key, **asked)
        except OSError:  # it takes a right of its own, s3:GetObjectAttributes; many stores do not know the operation
            return {}
        page: Mapping[str, Any] = found.get("ObjectParts", {})
        return page if page.get("Parts") else {}

    def _is_absent(self, error: FileNotFoundError) -> bool:
        return find_code(error) != "NoSuchBucket"
