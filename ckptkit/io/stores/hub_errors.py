"""Translate the errors of the Hub and of its libraries into ckptkit's: one table for reading and writing.

Messages never contain a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    BucketNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ckptkit.errors import CkptError, IOFailure, NoRoom, NotACheckpoint, Occupied, Usage, translate_os_errors

MAIN = "main"
AGAIN = "run the same command again"
_TOKEN = re.compile(r"hf_\w+")
_LOGIN = "run `hf auth login` or set HF_TOKEN"
_QUOTA = re.compile(r"storage|quota|exceed", re.IGNORECASE)  # words in the Hub's message when a quota is reached
_HINTS = {401: _LOGIN, 403: "the token needs the right to write there", 429: "wait, then run the same command again"}
_MAX_SHOWN = 300  # characters of a server's message that are shown


@contextmanager
def translate_hub_errors(repo_id: str, revision: str = MAIN, path: Path | None = None) -> Iterator[None]:
    """Turn an error of the Hub, or of local file `path`, inside the block into one of ckptkit's."""
    try:
        yield
    except CkptError:
        raise
    except Exception as error:  # the client raises its own, its HTTP library's and the system's
        if isinstance(error, OSError) and error.errno and path is not None:
            with translate_os_errors(path):
                raise
        raise to_hub_error(error, repo_id, revision) from error


def to_hub_error(error: Exception, repo_id: str, revision: str) -> CkptError:
    """Return ckptkit's error for an exception of the Hub's client, or for its cause."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, HfHubHTTPError):
            return to_refused_response_error(behind, repo_id, revision)
        if isinstance(behind, OfflineModeIsEnabled):
            return IOFailure("HF_HUB_OFFLINE is set, so ckptkit does not contact the Hub", hint="unset it")
        if isinstance(behind, HFValidationError):
            return Usage(f"the Hub does not allow the name `{repo_id}`")
        if type(behind).__module__.partition(".")[0] in ("httpx", "httpx2", "requests", "urllib3"):
            # not the failed request, because it contains the token
            what = type(behind).__name__
            if "Connect" in what and str(behind):
                what = as_line_without_token(str(behind))
            hint = f"check the network and HF_ENDPOINT, then {AGAIN}"
            return IOFailure(f"no answer from {constants.ENDPOINT}: {what}", hint=hint)
        behind = behind.__cause__
    said = as_line_without_token(str(error).partition("\n")[0])  # further lines are advice for programmers
    return IOFailure(f"the Hub's client gave up: {said or type(error).__name__}", hint=AGAIN)


def to_refused_response_error(error: HfHubHTTPError, repo_id: str, revision: str) -> CkptError:
    status, headers = error.response.status_code, error.response.headers
    said = as_line_without_token(error.server_message or "")
    if isinstance(error, GatedRepoError):
        return IOFailure(f"access to `{repo_id}` must be requested", hint=f"request it at {repository_url(repo_id)}")
    is_bucket = isinstance(error, BucketNotFoundError)
    if is_bucket or isinstance(error, RepositoryNotFoundError) or headers.get("X-Error-Code") == "RepoNotFound":
        message = f"the Hub does not have `{repo_id}`, or you may not see it"
        hint = f"check the name; if it is private, {_LOGIN}"
        return NotACheckpoint("the Hub shows us no such bucket" if is_bucket else message, hint=hint)
    if isinstance(error, RevisionNotFoundError):
        return NotACheckpoint(f"`{repo_id}` does not have revision `{revision}`")
    if status in (409, 412):
        return Occupied(f"`{repo_id}` was changed by somebody else meanwhile", hint=AGAIN)
    if status in (402, 403, 413, 507) and _QUOTA.search(said):
        hint = "free some space there, or raise the storage limit; then run the same command again"
        return NoRoom(f"the Hub answered {status}: {said}", hint=hint)
    return IOFailure(f"the Hub answered {status}: {said}", hint=_HINTS.get(status, AGAIN))


def as_line_without_token(text: str) -> str:
    """Return a server's message as one line, without any token."""
    return _TOKEN.sub("hf_...", " ".join(text.split()))[:_MAX_SHOWN]


def repository_url(repo_id: str) -> str:
    return f"{constants.ENDPOINT}/{repo_id}"
