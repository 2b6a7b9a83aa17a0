"""Read from repositories of the Hugging Face Hub, each at one commit, so that all reads see one state. Keeps no bytes.

Files are read by range from where the Hub redirects, for large ones to a CDN: asked once a file, not for every range.
The token, the endpoint and other settings are those of `huggingface_hub`.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ckptkit.errors import IOFailure, NotACheckpoint
from ckptkit.files.stores import Read, StoreEntry
from ckptkit.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_KINDS = {"datasets": "dataset", "spaces": "space"}
_TRIES = 3
_TIMEOUT = 30  # seconds without a byte


class HubStore:
    """The repository that `hf://[datasets/]org/name[@revision]` means."""

    hint = "private and gated repositories need `hf auth login` or HF_TOKEN; if a local path is meant, there is none"

    def __init__(self, url: str) -> None:
        parts = url.partition("://")[2].split("/")
        self._kind = _KINDS.get(parts[0], "model")
        owner, name = parts[-2:]
        name, _, revision = name.partition("@")
        self._id, self._revision = f"{owner}/{name}", unquote(revision) or None
        self._api = connect()
        self._sources: dict[str, HubDownload] = {}

    @cached_property
    def commit(self) -> str:
        """Return the commit of the revision, the same from now on. Raises `NotACheckpoint` if there is none."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            found = self._api.repo_info(self._id, revision=self._revision, repo_type=self._kind)
        except RevisionNotFoundError as error:
            raise NotACheckpoint(f"the repository has no revision `{self._revision}`") from error
        except RepositoryNotFoundError as error:
            raise NotACheckpoint("the Hub shows us no such repository", hint=self.hint) from error
        return str(found.sha)

    def find(self, key: str) -> StoreEntry | None:
        """Return the entry at `key`, or None."""
        if not key:
            return StoreEntry("", is_dir=bool(self.commit))
        folder, _, name = key.rpartition("/")
        try:
            return next((entry for entry in self.entries(folder) if entry.name == name), None)
        except FileNotFoundError:
            return None

    def entries(self, key: str) -> list[StoreEntry]:
        """Return the entries of the directory at `key`."""
        from huggingface_hub.errors import EntryNotFoundError

        try:
            tree = self._api.list_repo_tree(self._id, key or None, revision=self.commit, repo_type=self._kind)
            return [entry_of(found) for found in tree]
        except EntryNotFoundError as error:
            raise FileNotFoundError(key) from error

    def open(self, key: str, entry: StoreEntry) -> Read:
        """Return a function that reads from the file at `key`; a commit never changes."""
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self._id, key, revision=self.commit, repo_type=self._kind, endpoint=self._api.endpoint)
        return self._sources.setdefault(key, HubDownload(url, entry.size)).read

    def forget(self) -> None:
        """Keep all: a commit never changes."""


class HubDownload:
    """A file of `size` bytes that the Hub has at `url`, and the address it redirects to. Safe for all threads."""

    def __init__(self, url: str, size: int) -> None:
        self._url = url
        self._size = size
        self._location: str | None = None
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from one offset up to another."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return self._ask(start, stop)
        except HfHubHTTPError as error:
            if error.response.status_code not in (401, 403, 404, 410):
                raise
            self._location = None  # its signature has expired, after an hour or so
            return self._ask(start, stop)

    def _ask(self, start: int, stop: int) -> bytes:
        from huggingface_hub.utils import hf_raise_for_status, http_backoff

        with self._lock:
            location = self._location = self._location or self._locate()
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity", **self._credentials(location)}
        answer = http_backoff(
            "GET", location, headers=headers, timeout=_TIMEOUT, max_retries=_TRIES, base_wait_time=0.5
        )
        hf_raise_for_status(answer)
        if answer.status_code != 206 and stop - start != self._size:
            raise IOFailure("the server knows no ranges, and sends the whole file")
        return bytes(answer.content)

    def _locate(self) -> str:
        """Return the address of the content."""
        from huggingface_hub import get_hf_file_metadata

        return get_hf_file_metadata(self._url, token=None, headers=our_headers(), retry_on_errors=True).location

    def _credentials(self, location: str) -> dict[str, str]:
        """Return the headers for an address: the token is sent to the Hub alone."""
        is_hub = urlsplit(location)[:2] == urlsplit(self._url)[:2]
        return our_headers() if is_hub else {}


def connect() -> HfApi:
    """Return the Hub's own client."""
    from huggingface_hub import HfApi

    return HfApi(library_name="ckptkit", library_version=__version__)


def our_headers() -> dict[str, str]:
    """Return the headers of every request to the Hub, such as the user's token."""
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(library_name="ckptkit", library_version=__version__)


def entry_of(found: Any) -> StoreEntry:
    """Return the entry for a file or directory as huggingface_hub lists it."""
    name = found.path.rpartition("/")[2]
    if not hasattr(found, "blob_id"):
        return StoreEntry(name, is_dir=True)
    return StoreEntry(name, False, found.size, tag=found.lfs.sha256 if found.lfs else found.blob_id)
