"""Recognize the errors of S3, and translate them into ckptkit's."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ckptkit.errors import IOFailure
from ckptkit.io.stores.refusals import BAD_NAME, MUTE, NO_KEYS, OTHER, REFUSALS, UNREACHED, to_refused_error

# by the class names of the library's errors without a response
_BY_CLASSES = {
    "NoCredentialsError PartialCredentialsError CredentialRetrievalError": NO_KEYS,
    "ProfileNotFound": ("AWS_PROFILE names no profile", "correct AWS_PROFILE, or make the profile in ~/.aws/config"),
    "UnauthorizedSSOTokenError SSOTokenLoadError TokenRetrievalError": ("the login has expired", "run `aws sso login`"),
    "NoRegionError": ("the region is missing", "set AWS_DEFAULT_REGION to the region of the bucket"),
    "ParamValidationError": BAD_NAME,
    "SSLError": ("the store's certificate is not trusted", "check AWS_ENDPOINT_URL, or set AWS_CA_BUNDLE"),
    "ProxyConnectionError": ("the proxy cannot be reached", "check HTTPS_PROXY and NO_PROXY"),
    "EndpointConnectionError ConnectTimeoutError": UNREACHED,
}
_LIBRARY = {name: refusal for names, refusal in _BY_CLASSES.items() for name in names.split()}
ABSENT = ("404", "NoSuchKey", "NoSuchUpload")
TAKEN = ("412", "PreconditionFailed", "409", "ConditionalRequestConflict")
DENIED = ("403", "AccessDenied", "AllAccessDisabled")
_CODES_WITHOUT_REASON = ("403", "400")  # HEAD responses have no body that could give a reason


def to_s3_error(error: BaseException, path: Path) -> IOFailure:
    """Return ckptkit's error for an exception of s3fs or botocore for the object at `path`."""
    answer, code = response_of(error), error_code_of(error)
    if code:
        refusal = REFUSALS.get(code, OTHER)
    elif "Invalid endpoint" in str(error):
        refusal = ("AWS_ENDPOINT_URL is not a URL", "write it like https://host:port")
    else:
        names = (kind.__name__ for cause in error_chain(error) for kind in type(cause).__mro__)
        refusal = next((_LIBRARY[name] for name in names if name in _LIBRARY), MUTE)
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or answer.get("Error", {}).get("Region")
    words = {"region": region, "found_region": region} if region else {}
    reason = str(answer.get("Error", {}).get("Message") or "") or str(error).strip() or type(error).__name__
    return to_refused_error(refusal, reason, path, **words)


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
