"""Recognize obstore's errors of Google Cloud Storage and Azure, and translate them into ckptkit's."""

from __future__ import annotations

import re
from pathlib import Path

from ckptkit.errors import IOFailure
from ckptkit.io.stores.refusals import MUTE, NO_KEYS, OTHER, REFUSALS, UNREACHED, to_refused_error

_UNREADABLE = ("the credentials cannot be read", "{keys}")
_BY_LIBRARY = {  # by words of obstore's message if there is no response
    "Error performing token request": NO_KEYS,
    "Account must be specified": NO_KEYS,
    "Invalid Access Key": ("AZURE_STORAGE_ACCOUNT_KEY is not a key", "copy the key from the account's access keys"),
    "service account": _UNREADABLE,
    "redential": _UNREADABLE,
    "BadScheme": ("the endpoint does not begin with https://", "correct it, or set {http}=true"),
    "kind: Connect": UNREACHED,
}
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_NO_OBJECT = ("", "404", "NoSuchKey", "BlobNotFound", "ResourceNotFound")


def to_object_store_error(error: BaseException, path: Path) -> IOFailure:
    """Return the `CkptError` for an exception of obstore about the object at `path`."""
    status, text = http_status_in(error), str(error)
    by_library = (refusal for words, refusal in _BY_LIBRARY.items() if words in text)
    known = REFUSALS.get(error_code_in(error)) or next(by_library, None) or REFUSALS.get(status)
    match = _MESSAGE.search(text)
    reason = next(iter((match[1] if match else text).strip().splitlines()), "").rpartition(" - ")[2]
    return to_refused_error(known or (OTHER if status else MUTE), reason or type(error).__name__, path)


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
