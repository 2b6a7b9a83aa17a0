"""The messages and hints for what object stores refuse: one table for S3, Google Cloud Storage and Azure.

https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
https://cloud.google.com/storage/docs/xml-api/reference-status
https://learn.microsoft.com/en-us/rest/api/storageservices/blob-service-error-codes
"""

from __future__ import annotations

from pathlib import Path

from ckptkit.errors import IOFailure, NoRoom

Refusal = tuple[str, str]  # a message and a hint, with the words of a scheme in braces

_WORDS = {  # by URL scheme
    "s3": {
        "bucket": "bucket",
        "keys": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL if not on AWS",
        "token": "AWS_SESSION_TOKEN",
        "rights": "the key needs s3:ListBucket and s3:GetObject; to write also s3:PutObject, s3:DeleteObject and "
        "s3:AbortMultipartUpload",
        "endpoint": "AWS_ENDPOINT_URL",
        "quota": "quota of the bucket",
        "changed": "another process changes this object at the same moment",
        "region": "the region of the bucket",
        "found_region": "another region",
    },
    "gs": {
        "bucket": "bucket",
        "keys": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
        "token": "GOOGLE_APPLICATION_CREDENTIALS",
        "rights": "the account needs storage.objects.get and .list; to write also .create and .delete",
        "endpoint": "GOOGLE_BASE_URL",
        "http": "GOOGLE_ALLOW_HTTP",
        "quota": "quota of the project",
        "changed": "the object was replaced meanwhile",
    },
    "az": {
        "bucket": "container",
        "keys": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN; "
        "with AZURE_USE_AZURE_CLI=true the login of `az login` is used",
        "token": "AZURE_STORAGE_SAS_TOKEN",
        "rights": "check the key; an account needs the role Storage Blob Data Reader, to write Storage Blob Data "
        "Contributor; a SAS token needs the permissions rl, to write racwdl",
        "endpoint": "AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_ENDPOINT",
        "http": "AZURE_ALLOW_HTTP",
        "quota": "quota of the account",
        "changed": "the object was replaced meanwhile",
    },
}
_AGAIN = "run the same command again"
_LOGIN = "log in again, or renew {token}"
_NETWORK = "check the network and {endpoint}"
_BUCKET = ("the {bucket} does not exist", "create the {bucket}, or correct the URL or {endpoint}")
BAD_NAME = ("this cannot be the name of a {bucket}", "correct the URL")
_ELSEWHERE = ("the bucket is in {found_region}", "set AWS_DEFAULT_REGION to {region}")
_FULL = ("the store has no room", "free some space there, or raise the {quota}")
NO_KEYS = ("there are no credentials for the store", "{keys}")
UNREACHED = ("the store cannot be reached", _NETWORK)
MUTE = ("the store does not answer", _NETWORK)
OTHER = ("the store refuses", _AGAIN)

# error codes and HTTP statuses of a response
_BY_CODES: dict[str, Refusal] = {
    "NoSuchBucket ContainerNotFound ContainerBeingDeleted": _BUCKET,
    "InvalidBucketName InvalidResourceName OutOfRangeInput": BAD_NAME,
    "AccessDenied AllAccessDisabled 403": ("access denied", "{rights}"),
    "AuthenticationRequired NoAuthenticationInformation 401": NO_KEYS,
    "InvalidAccessKeyId": ("the store does not know this access key", "{keys}"),
    "SignatureDoesNotMatch": ("the store does not accept the secret key", "{keys}"),
    "InvalidToken": ("the store does not accept the session token", _LOGIN),
    "ExpiredToken TokenRefreshRequired RequestExpired InvalidAuthenticationInfo": (
        "the credentials have expired",
        _LOGIN,
    ),
    "RequestTimeTooSkewed": ("the clock of this machine differs from that of the store", "set the clock"),
    "UserProjectMissing": ("the requester pays for this bucket", "ckptkit cannot name a project: copy it with gcloud"),
    "PermanentRedirect TemporaryRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException 301 307": (
        _ELSEWHERE
    ),
    "BadDigest XAmzContentSHA256Mismatch": ("the store received other bytes than were sent", _AGAIN),
    "EntityTooLarge RequestBodyTooLarge": (
        "the file is larger than the store allows",
        "write smaller files with --max-shard-size",
    ),
    "BlobImmutableDueToPolicy RetentionPolicyNotMet ObjectUnderActiveHold": (
        "nobody may replace or delete this object",
        "look at its retention policy, or write elsewhere",
    ),
    "InvalidBlockList": (
        "another process wrote this object meanwhile",
        "let only one process write here, and run it again",
    ),
    "SlowDown ServerBusy ServiceUnavailable TooManyRequests 503 429": (
        "the store is too busy",
        "run the same command again later, or with a smaller --jobs",
    ),
    "InternalError 500 502 504": ("the store failed", _AGAIN),
    "ConditionalRequestConflict OperationAborted ConditionNotMet PreconditionFailed 409 412": ("{changed}", _AGAIN),
    "QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded 507": _FULL,
}
REFUSALS = {code: refusal for codes, refusal in _BY_CODES.items() for code in codes.split()}


def to_refused_error(refusal: Refusal, reason: str, path: Path, **words: str) -> IOFailure:
    """Return the error for a refusal at `path`, with the first line of the `reason`.

    It is `NoRoom` if the store is full. It names the bucket instead of the object if the bucket is the cause.
    """
    words = _WORDS.get(path.parts[0].removesuffix(":"), _WORDS["s3"]) | words
    message, hint = (text.format_map(words) for text in refusal)
    kind = NoRoom if refusal == _FULL else IOFailure
    where = type(path)(*path.parts[:2]) if refusal in (_BUCKET, BAD_NAME, _ELSEWHERE) else path
    return kind(f"{message}: {next(iter(reason.strip().splitlines()), '')}", path=where, hint=hint)
