"""Ask the Hub what is in a repository, through `huggingface_hub`, and turn its errors into ours. Sends no file.

A token is never asked for, kept or shown: `huggingface_hub` finds it where `hf auth login` or `HF_TOKEN` put it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ckptkit.errors import (
    CkptError,
    Corrupt,
    IOFailure,
    NotACheckpoint,
    Occupied,
    Usage,
    translate_os_errors,
)
from ckptkit.files.stores.hub import connect

MAIN = "main"
_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_TOKEN = re.compile(r"hf_\w+")
_LOGIN = "`hf auth login`, or HF_TOKEN, says who you are"
_AGAIN = "run the same command again: what has arrived is not sent again"
_MOST = 300  # characters of what a server says


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file on the Hub: its size, git's id of it, and if it is large its SHA-256, since the id is a pointer's then."""

    nbytes: int
    oid: str
    sha256: str | None


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A repository at one commit."""

    repo_id: str
    commit: str
    is_private: bool
    files: Mapping[str, HubFile]

    @property
    def url(self) -> str:
        return page_of(self.repo_id)


def page_of(repo_id: str) -> str:
    """Return the address of a repository's page."""
    return f"{constants.ENDPOINT}/{repo_id}"


def parse_place(place: str, revision: str | None = None) -> tuple[str, str]:
    """Return repository and revision of `org/model`, `org/model@revision` or `hf://org/model`."""
    repo_id, _, named = place.removeprefix("hf://").partition("@")
    if not _ID.fullmatch(repo_id):
        raise Usage(f"`{place}` is no repository of the Hub", hint="write it like org/model, or org/model@revision")
    if named and revision not in (None, named):
        raise Usage(f"`{place}` names one revision and --revision another")
    return repo_id, named or revision or MAIN


def find(repo_id: str, revision: str) -> HubRepository | None:
    """Return a repository as it is now, None if there is no such repository or revision."""
    try:
        return look_up(repo_id, revision)
    except NotACheckpoint:
        return None


def look_up(repo_id: str, revision: str) -> HubRepository:
    """Return a repository as it is now. Raises `NotACheckpoint` if there is none, or none that we may see."""
    with talking(repo_id, revision):
        found = connect().model_info(repo_id, revision=revision, files_metadata=True)
    files = {}
    for file in found.siblings or ():
        if file.size is None or file.blob_id is None:
            raise Corrupt(f"the Hub does not say what `{file.rfilename!a}` is", path=found.id)
        files[file.rfilename] = HubFile(file.size, file.blob_id, file.lfs.sha256 if file.lfs else None)
    if found.sha is None:
        raise Corrupt("the Hub does not say which commit this is", path=found.id)
    return HubRepository(found.id, found.sha, bool(found.private), files)


@contextmanager
def silent() -> Iterator[None]:
    """Keep `huggingface_hub` from showing bars and from logging its retries inside the block."""
    level, had_bars = logging.get_verbosity(), not are_progress_bars_disabled()
    logging.set_verbosity(ERROR)
    if had_bars:
        disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            enable_progress_bars()


@contextmanager
def talking(repo_id: str, revision: str = MAIN, path: Path | None = None) -> Iterator[None]:
    """Turn an error of the Hub or of file `path` inside the block, which does nothing else, into one of ours."""
    try:
        yield
    except CkptError:
        raise
    except Exception as error:  # the hub raises its own, its HTTP client's and the system's
        if isinstance(error, OSError) and error.errno and path is not None:
            with translate_os_errors(path):
                raise
        raise translate(error, repo_id, revision) from error


def translate(error: Exception, repo_id: str, revision: str) -> CkptError:
    """Return our error for one of the Hub, or for the one that caused it."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, HfHubHTTPError):
            return refusal(behind, repo_id, revision)
        if isinstance(behind, OfflineModeIsEnabled):
            return IOFailure("the Hub is not asked while HF_HUB_OFFLINE is set", hint="unset it")
        if isinstance(behind, HFValidationError):
            return Usage(f"`{repo_id}` is no name that the Hub allows")
        if type(behind).__module__.partition(".")[0] in ("httpx", "httpx2", "requests", "urllib3"):
            return unreachable(behind)
        behind = behind.__cause__
    said = redact(str(error).partition("\n")[0])  # the rest is advice on how to call it
    return IOFailure(f"the Hub's client gave up: {said or type(error).__name__}", hint=_AGAIN)


def unreachable(error: BaseException) -> IOFailure:
    """Return the error for a missing answer; it does not repeat a request that failed, since that holds the token."""
    what = type(error).__name__
    if "Connect" in what and str(error):
        what = redact(str(error))
    hint = f"is there a network, and is HF_ENDPOINT right? then {_AGAIN}"
    return IOFailure(f"no answer from {constants.ENDPOINT}: {what}", hint=hint)


def refusal(error: HfHubHTTPError, repo_id: str, revision: str) -> CkptError:
    """Return the error for an answer that refuses."""
    status, said = error.response.status_code, redact(error.server_message or "")
    if isinstance(error, GatedRepoError):
        return IOFailure(f"access to `{repo_id}` has to be asked for", hint=f"do so at {page_of(repo_id)}")
    if isinstance(error, RepositoryNotFoundError):
        hint = f"check the name; if it is private, {_LOGIN}"
        return NotACheckpoint(f"the Hub has no `{repo_id}`, or none for you", hint=hint)
    if isinstance(error, RevisionNotFoundError):
        return NotACheckpoint(f"`{repo_id}` has no revision `{revision}`")
    if status in (409, 412):
        return Occupied(f"`{repo_id}` was changed by somebody else meanwhile", hint=_AGAIN)
    hints = {401: _LOGIN, 403: "the token needs the right to write there"}
    return IOFailure(f"the Hub answered {status}: {said}", hint=hints.get(status, _AGAIN))


def redact(text: str) -> str:
    """Return one line of what a server says, without any token."""
    return _TOKEN.sub("hf_...", " ".join(text.split()))[:_MOST]
