"""Translate the errors of Google Cloud Storage and Azure, for reading and writing.

https://cloud.google.com/storage/docs/xml-api/reference-status
https://learn.microsoft.com/en-us/rest/api/storageservices/blob-service-error-codes
"""

from __future__ import annotations

import re
from pathlib import Path

from ckptkit.errors import IOFailure, NoRoom

_WORDS = {  # by URL scheme: words for the messages and hints
    "gs": {
        "bucket": "bucket",
        "keys": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
        "rights": "the account needs storage.objects.get and .list; to write also .create and .delete",
        "endpoint": "GOOGLE_BASE_URL",
        "http": "GOOGLE_ALLOW_HTTP",
    },
    "az": {
        "bucket": "container",
        "keys": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN; "
        "with AZURE_USE_AZURE_CLI=true the login of `az login` is used",
        "rights": "check the key; an account needs the role Storage Blob Data Reader, to write Storage Blob Data "
        "Contributor; a SAS token needs the permissions rl, to write racwdl",
        "endpoint": "AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_ENDPOINT",
        "http": "AZURE_ALLOW_HTTP",
    },
}
_AGAIN = "run the same command again"
_BUCKET = ("the {bucket} does not exist", "create the {bucket}, or correct the URL or {endpoint}")
_BAD_NAME = ("this cannot be the name of a {bucket}", "correct the URL")
_DENIED = ("access denied", "{rights}")
_EXPIRED = ("the credentials have expired", "log in again, or renew them: {keys}")
_NO_KEYS = ("there are no credentials for the store", "{keys}")
_BUSY = ("the store is too busy", "run the same command again later, or with a smaller --jobs")
_FAILED = ("the store failed", _AGAIN)
_FULL = ("the store has no room", "raise the quota of the project or account")
_KEPT = ("nobody may replace or delete this object", "look at its retention policy, or write elsewhere")
_UNREACHED = ("the store cannot be reached", "check the network and {endpoint}")
_MUTE = ("the store does not answer", "check the network and {endpoint}")
_CHANGED = ("the object was replaced meanwhile", _AGAIN)

REFUSALS = {  # error code or HTTP status of a response: message, hint
    "NoSuchBucket": _BUCKET,
    "ContainerNotFound": _BUCKET,
    "ContainerBeingDeleted": _BUCKET,
    "InvalidBucketName": _BAD_NAME,
    "InvalidResourceName": _BAD_NAME,
    "OutOfRangeInput": _BAD_NAME,
    "AuthenticationRequired": _NO_KEYS,
    "NoAuthenticationInformation": _NO_KEYS,
    "ExpiredToken": _EXPIRED,
    "InvalidAuthenticationInfo": _EXPIRED,
    "RequestTimeTooSkewed": ("the clock of this machine differs from that of the store", "set the clock"),
    "UserProjectMissing": ("the requester pays for this bucket", "ckptkit cannot name a project: copy it with gcloud"),
    "EntityTooLarge": ("the file is larger than the store allows", "write smaller files with --max-shard-size"),
    "RequestBodyTooLarge": ("the file is larger than the store allows", "write smaller files with --max-shard-size"),
    "BlobImmutableDueToPolicy": _KEPT,
    "RetentionPolicyNotMet": _KEPT,
    "ObjectUnderActiveHold": _KEPT,
    "InvalidBlockList": (
        "another process wrote this object meanwhile",
        "let only one process write here, and run it again",
    ),
    "SlowDown": _BUSY,
    "ServerBusy": _BUSY,
    "ServiceUnavailable": _BUSY,
    "QuotaExceeded": _FULL,
    "ConditionNotMet": _CHANGED,
    "PreconditionFailed": _CHANGED,
    "401": _NO_KEYS,
    "403": _DENIED,
    "412": _CHANGED,
    "429": _BUSY,
    "500": _FAILED,
    "502": _FAILED,
    "503": _BUSY,
    "504": _FAILED,
    "507": _FULL,
}
LIBRARY = (  # a part of obstore's message if there is no response: message, hint
    ("Error performing token request", _NO_KEYS),
    ("Account must be specified", _NO_KEYS),
    ("Invalid Access Key", ("AZURE_STORAGE_ACCOUNT_KEY is not a key", "copy the key from the account's access keys")),
    ("service account", ("the credentials cannot be read", "{keys}")),
    ("redential", ("the credentials cannot be read", "{keys}")),
    ("BadScheme", ("the endpoint does not begin with https://", "correct it, or set {http}=true")),
    ("kind: Connect", _UNREACHED),
)
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_NO_OBJECT = ("", "404", "NoSuchKey", "BlobNotFound", "ResourceNotFound")


def to_object_store_error(error: BaseException, path: Path) -> IOFailure:
    """Return the `CkptError` for an exception of obstore about the object at `path`.

    It is `NoRoom` if the store is full. The error names the bucket instead of the object if the bucket is the cause.
    """
    status = http_status_in(error)
    by_library = (answer for text, answer in LIBRARY if text in str(error))
    known = REFUSALS.get(error_code_in(error)) or next(by_library, None) or REFUSALS.get(status)
    message, hint = known or (("the store refuses", _AGAIN) if status else _MUTE)
    match = _MESSAGE.search(str(error))
    reason = next(iter((match[1] if match else str(error)).strip().splitlines()), "").rpartition(" - ")[2]
    words = _WORDS.get(path.parts[0].removesuffix(":"), _WORDS["gs"])
    kind = NoRoom if (message, hint) == _FULL else IOFailure
    is_of_bucket = (message, hint) in (_BUCKET, _BAD_NAME)
    where = type(path)(*path.parts[:2]) if is_of_bucket else path
    text = f"{message.format_map(words)}: {reason or type(error).__name__}"
    return kind(text, path=where, hint=hint.format_map(words))


def error_code_in(error: BaseException) -> str:
    """Return the error code in the store's response, such as `BlobNotFound`; "" if there is none."""
    match = _CODE.search(str(error))
    return match[1] if match else ""


def http_status_in(error: BaseException) -> str:
    """Return the HTTP status of the store's response, such as `404`; "" without a response."""
    match = _STATUS.search(str(error))
    return match[1] if match else ""


def has_no_error_code(error: BaseException) -> bool:
    """Return whether a store refused without an error code, as in every response to HEAD."""
    return bool(http_status_in(error)) and not error_code_in(error)


def is_missing_object_error(error: BaseException) -> bool:
    """Return whether an error says that the object does not exist, while its bucket exists."""
    return isinstance(error, FileNotFoundError) and error_code_in(error) in _NO_OBJECT
