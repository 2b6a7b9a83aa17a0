"""Call the Hub: look up and create repositories.

ckptkit never asks for, stores or shows a token: `huggingface_hub` finds the token of `hf auth login` or `HF_TOKEN`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import ERROR

from huggingface_hub import get_token
from huggingface_hub.utils import logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ckptkit.errors import Corrupt, IOFailure, NotACheckpoint, Unsafe
from ckptkit.io.stores.hub import make_hub_client
from ckptkit.io.stores.hub_errors import AGAIN, MAIN, repository_url, translate_hub_errors


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file on the Hub: its size, its git object id and, for a large file, its SHA-256.

    For a large file, the git object is only an LFS pointer.
    """

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
        return repository_url(self.repo_id)


def find_repository(repo_id: str, revision: str) -> HubRepository | None:
    """Return the current state of a repository; None without the repository or revision."""
    try:
        return require_repository(repo_id, revision)
    except NotACheckpoint:
        return None


def require_repository(repo_id: str, revision: str) -> HubRepository:
    """Return the current state of a repository.

    Raises `NotACheckpoint` if it does not exist or is not visible to us.
    """
    with translate_hub_errors(repo_id, revision):
        info = make_hub_client().model_info(repo_id, revision=revision, files_metadata=True)
    files = {}
    for file in info.siblings or ():
        if file.size is None or file.blob_id is None:
            raise Corrupt(f"the Hub returned no size or id of the file `{file.rfilename!a}`", path=info.id, hint=AGAIN)
        files[file.rfilename] = HubFile(file.size, file.blob_id, file.lfs.sha256 if file.lfs else None)
    if info.sha is None:
        raise Corrupt("the Hub returned no commit id", path=info.id, hint=AGAIN)
    return HubRepository(info.id, info.sha, bool(info.private), files)


def require_token() -> None:
    if get_token() is None:
        raise IOFailure("there is no token for the Hub", hint="run `hf auth login`, or set HF_TOKEN")


def create_repository(repo_id: str, *, private: bool) -> HubRepository:
    """Create a repository. Raises `Unsafe` if the Hub made it public although `private` was requested."""
    with translate_hub_errors(repo_id):
        make_hub_client().create_repo(repo_id, private=private)
    repository = require_repository(repo_id, MAIN)
    if private and not repository.is_private:
        hint = "make it private in its settings on the Hub, and run the same command again"
        message = "expected a private repository, but the Hub made a public one; nothing was sent"
        raise Unsafe(message, path=repo_id, hint=hint)
    return repository


def create_branch(repo_id: str, branch: str, commit: str) -> None:
    with translate_hub_errors(repo_id):
        make_hub_client().create_branch(repo_id, branch=branch, revision=commit)


@contextmanager
def silenced_hub_client() -> Iterator[None]:
    """Suppress progress bars and retry logs of `huggingface_hub` inside the block."""
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
