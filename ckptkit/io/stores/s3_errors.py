"""Translate S3's errors into messages and hints: one table for reading and writing.

https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ckptkit.errors import IOFailure, NoRoom

_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL if not on AWS"
_RIGHTS = "the key needs s3:ListBucket and s3:GetObject; to write also s3:PutObject, s3:DeleteObject and "
_RIGHTS += "s3:AbortMultipartUpload"
_LOGIN = "log in again, or renew AWS_SESSION_TOKEN"
_SSO_LOGIN = ("the login has expired", "run `aws sso login`")
_REGION = "set AWS_DEFAULT_REGION to {region}"
_AGAIN = "run the same command again"
_NETWORK = "check the network, and AWS_ENDPOINT_URL if the store is not AWS"
_BUCKET = ("the bucket does not exist", "create the bucket, or correct the URL and AWS_ENDPOINT_URL")
_NO_BUCKET_NAME = ("this cannot be the name of a bucket", "correct the URL")
_ELSEWHERE = ("the bucket is in another region", _REGION)
_FULL = ("the store has no room", "free some space there, or raise the quota of the bucket")
_NO_RESPONSE = ("the store does not answer", _NETWORK)

# message and hint, by the store's error codes and HTTP statuses
_BY_CODES = {
    "NoSuchBucket": _BUCKET,
    "InvalidBucketName": _NO_BUCKET_NAME,
    "AccessDenied AllAccessDisabled 403": ("access denied", _RIGHTS),
    "InvalidAccessKeyId": ("the store does not know this access key", _KEYS),
    "SignatureDoesNotMatch": ("the store does not accept the secret key", _KEYS),
    "InvalidToken": ("the store does not accept the session token", _LOGIN),
    "ExpiredToken TokenRefreshRequired RequestExpired": ("the credentials have expired", _LOGIN),
    "RequestTimeTooSkewed": ("the clock of this machine differs from that of the store", "set the clock"),
    "PermanentRedirect TemporaryRedirect AuthorizationHeaderMalformed 301 307": _ELSEWHERE,
    "IllegalLocationConstraintException": _ELSEWHERE,
    "BadDigest XAmzContentSHA256Mismatch": ("the store received other bytes than were sent", _AGAIN),
    "EntityTooLarge": ("the file is larger than the store allows", "write smaller files with --max-shard-size"),
    "SlowDown ServiceUnavailable TooManyRequests 503 429": (
        "the store is too busy",
        "run the same command again later, or with a smaller --jobs",
    ),
    "InternalError 500 502 504": ("the store failed", _AGAIN),
    "ConditionalRequestConflict OperationAborted PreconditionFailed 409 412": (
        "another process changes this object at the same moment",
        _AGAIN,
    ),
    "QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded 507": _FULL,
}
_REFUSALS = {code: answer for codes, answer in _BY_CODES.items() for code in codes.split()}
# message and hint, by the class names of the library's errors without a response
_BY_CLASSES = {
    "NoCredentialsError PartialCredentialsError CredentialRetrievalError": (
        "there are no credentials for the store",
        _KEYS,
    ),
    "ProfileNotFound": ("AWS_PROFILE names no profile", "correct AWS_PROFILE, or make the profile in ~/.aws/config"),
    "UnauthorizedSSOTokenError SSOTokenLoadError TokenRetrievalError": _SSO_LOGIN,
    "NoRegionError": ("the region is missing", "set AWS_DEFAULT_REGION to the region of the bucket"),
    "ParamValidationError": _NO_BUCKET_NAME,
    "SSLError": ("the store's certificate is not trusted", "check AWS_ENDPOINT_URL, or set AWS_CA_BUNDLE"),
    "ProxyConnectionError": ("the proxy cannot be reached", "check HTTPS_PROXY and NO_PROXY"),
    "EndpointConnectionError ConnectTimeoutError": ("the store cannot be reached", _NETWORK),
}
_LIBRARY = {name: answer for names, answer in _BY_CLASSES.items() for name in names.split()}
ABSENT = ("404", "NoSuchKey", "NoSuchUpload")
TAKEN = ("412", "PreconditionFailed", "409", "ConditionalRequestConflict")
DENIED = ("403", "AccessDenied", "AllAccessDisabled")
_CODES_WITHOUT_REASON = ("403", "400")  # HEAD responses have no body that could give a reason


def to_s3_error(error: BaseException, path: Path) -> IOFailure:
    """Return ckptkit's error for an exception of s3fs or botocore for the object at `path`.

    Returns `NoRoom` if the store is full; names the bucket instead of the object if the bucket is at fault.
    """
    answer, code = response_of(error), error_code_of(error)
    message: str
    hint: str | None
    if code:
        message, hint = _REFUSALS.get(code, ("the store refuses", None))
    elif "Invalid endpoint" in str(error):
        message, hint = "AWS_ENDPOINT_URL is not a URL", "write it like https://host:port"
    else:
        names = (kind.__name__ for cause in error_chain(error) for kind in type(cause).__mro__)
        message, hint = next((_LIBRARY[name] for name in names if name in _LIBRARY), _NO_RESPONSE)
    kind = NoRoom if (message, hint) == _FULL else IOFailure
    where = type(path)(*path.parts[:2]) if (message, hint) in (_BUCKET, _ELSEWHERE) else path
    if (message, hint) == _ELSEWHERE:
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = headers.get("x-amz-bucket-region") or answer.get("Error", {}).get("Region")
        message = f"the bucket is in {region}" if region else message
        hint = _REGION.format(region=region or "the region of the bucket")
    reason = str(answer.get("Error", {}).get("Message") or "") or str(error)
    line = next(iter(reason.strip().splitlines()), "") or type(error).__name__
    return kind(f"{message}: {line}", path=where, hint=hint)


def error_code_of(error: BaseException | None) -> str:
    """Return the error code in the store's response, such as `NoSuchKey`; "" without a response."""
    return str(response_of(error).get("Error", {}).get("Code", ""))


class Tolerating(AbstractContextManager[None, bool]):
    """Leaves the block without an error at an `IOFailure` with one of these codes."""

    def __init__(self, codes: Collection[str]) -> None:
        self._codes = codes

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        return isinstance(error, IOFailure) and error_code_of(error) in self._codes


def lacks_error_detail(error: BaseException) -> bool:
    """Return whether a store refused without a message, as stores do for every HEAD request."""
    return error_code_of(error) in _CODES_WITHOUT_REASON


def response_of(error: BaseException | None) -> dict[str, Any]:
    """Return the store's response behind an error; {} without one."""
    return next(
        (response for cause in error_chain(error) if isinstance(response := getattr(cause, "response", None), dict)), {}
    )


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
