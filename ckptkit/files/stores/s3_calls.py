"""Call the operations of S3 on one bucket, with the library that also reads it. Errors of the store become ours."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from ckptkit.errors import IOFailure, NoRoom, Usage

_ACCOUNT = "s3fs takes AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL for other than AWS"
_RIGHTS = "the key needs the rights to list, get, put and delete objects here, and to abort multipart uploads"
_LOGIN = "log in again, or renew the token"
_REGION = "set AWS_DEFAULT_REGION to the region of the bucket"
_REFUSALS = {  # what a store says, as its error code: our message, and a hint
    "NoSuchBucket": ("there is no such bucket", "create the bucket, or correct the URL and AWS_ENDPOINT_URL"),
    "AccessDenied": ("access denied", _RIGHTS),
    "AllAccessDisabled": ("access denied", _RIGHTS),
    "403": ("access denied", _RIGHTS),
    "InvalidAccessKeyId": ("the store does not know this access key", _ACCOUNT),
    "SignatureDoesNotMatch": ("the store does not accept the secret key", _ACCOUNT),
    "ExpiredToken": ("the credentials have expired", _LOGIN),
    "TokenRefreshRequired": ("the credentials have expired", _LOGIN),
    "RequestTimeTooSkewed": ("the clock of this machine differs from that of the store", "set the clock"),
    "PermanentRedirect": ("the bucket is in another region", _REGION),
    "AuthorizationHeaderMalformed": ("the bucket is in another region", _REGION),
    "301": ("the bucket is in another region", _REGION),
    "BadDigest": ("the store received other bytes than were sent", "run the same command again"),
}
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "507"})
# Checksums are given where they are wanted: those that the library adds by itself break stores that do not know them.
_SETTINGS = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}


class S3Bucket:
    """One bucket. Its methods may be called by several threads at the same time."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root  # as a path, for errors to name what lies in it
        try:
            import fsspec

            self._files = fsspec.filesystem("s3", config_kwargs=_SETTINGS)
        except ImportError as error:
            hint = "pip install 'ckptkit-fsdp[s3]'"
            raise Usage("writing to `s3://` takes a package that is not installed", hint=hint) from error

    def call(self, operation: str, key: str = "", **arguments: Any) -> Mapping[str, Any]:
        """Return the answer to an operation, such as `put_object`, on an object or on the bucket.

        Raises `IOFailure` or `NoRoom` with the URL of the object; `refusal` gives the store's own word for it.
        """
        if "Body" in arguments:
            arguments["Body"] = BytesIO(arguments["Body"])  # sent in steps, not in one that blocks others
        named = {"Bucket": self.name, "Key": key} if key else {"Bucket": self.name}
        try:
            answer: Mapping[str, Any] = self._files.call_s3(operation, **named, **arguments)
        except Exception as error:  # every library has its own, and those of what it is built on
            raise self._translate(error, key) from error
        return answer

    def list(self, prefix: str) -> dict[str, int]:
        """Return the size of each object whose key begins with `prefix`."""
        found: dict[str, int] = {}
        more: dict[str, str] = {}
        while True:
            page = self.call("list_objects_v2", Prefix=prefix, **more)
            found |= {one["Key"]: int(one["Size"]) for one in page.get("Contents", ())}
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def read(self, key: str) -> bytes:
        """Return the content of a small object."""
        from fsspec.asyn import sync

        body = self.call("get_object", key)["Body"]
        try:
            content: bytes = sync(self._files.loop, body.read)
        except Exception as error:
            raise self._translate(error, key) from error
        return content

    def _translate(self, error: Exception, key: str) -> IOFailure:
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        code = find_code(error)
        path = self.root if code == "NoSuchBucket" else self.root / key
        if code in _FULL:
            return NoRoom(f"the store has no room: {reason}", path=path, hint="free some space there")
        if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
            return IOFailure("there are no credentials for the store", path=path, hint=_ACCOUNT)
        silent = ("the store does not answer", _ACCOUNT)
        message, hint = _REFUSALS.get(code, ("the store refuses", None) if code else silent)
        return IOFailure(f"{message}: {reason}", path=path, hint=hint)


def find_code(error: BaseException | None) -> str:
    """Return the code of the answer with which a store refused, such as `NoSuchKey`; "" if it did not answer."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""
