"""Repositories of the Hugging Face Hub, each at one commit, so that all that is read is of one state. Keeps no bytes.

Files are read by range from where the Hub sends us, which for large ones is a CDN: asked for once, not for every range.
The token, the endpoint and the rest are those of `huggingface_hub`.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any
from urllib.parse import unquote, urlsplit

from ckptkit.errors import IOFailure, NotACheckpoint
from ckptkit.files.stores import Entry, Read

_KINDS = {"datasets": "dataset", "spaces": "space"}
_TRIES = 3
_TIMEOUT = 30  # seconds without a byte


class Repository:
    """The repository that `hf://[datasets/]org/name[@revision]` means."""

    hint = "private and gated repositories need `hf auth login` or HF_TOKEN; if a local path is meant, there is none"

    def __init__(self, url: str) -> None:
        from huggingface_hub import HfApi

        parts = url.partition("://")[2].split("/")
        self._kind = _KINDS.get(parts[0], "model")
        owner, name = parts[-2:]
        name, _, revision = name.partition("@")
        self._id, self._revision = f"{owner}/{name}", unquote(revision) or None
        self._api = HfApi()
        self._sources: dict[str, Source] = {}

    @cached_property
    def commit(self) -> str:
        """The commit that the revision means, from now on. Raises `NotACheckpoint` if there is no such repository."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            found = self._api.repo_info(self._id, revision=self._revision, repo_type=self._kind)
        except RevisionNotFoundError as error:
            raise NotACheckpoint(f"the repository has no revision `{self._revision}`") from error
        except RepositoryNotFoundError as error:
            raise NotACheckpoint("the Hub shows us no such repository", hint=self.hint) from error
        return str(found.sha)

    def find(self, key: str) -> Entry | None:
        """What is at `key`, or None."""
        if not key:
            return Entry("", is_dir=bool(self.commit))
        folder, _, name = key.rpartition("/")
        try:
            return next((entry for entry in self.entries(folder) if entry.name == name), None)
        except FileNotFoundError:
            return None

    def entries(self, key: str) -> list[Entry]:
        """What is in the directory at `key`."""
        from huggingface_hub.errors import EntryNotFoundError

        try:
            tree = self._api.list_repo_tree(self._id, key or None, revision=self.commit, repo_type=self._kind)
            return [entry_of(found) for found in tree]
        except EntryNotFoundError as error:
            raise FileNotFoundError(key) from error

    def open(self, key: str, entry: Entry) -> Read:
        """A way to read from the file at `key`; a commit never changes."""
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self._id, key, revision=self.commit, repo_type=self._kind, endpoint=self._api.endpoint)
        return self._sources.setdefault(key, Source(url, entry.size)).read

    def forget(self) -> None:
        """Nothing: what a commit holds is known for good."""


class Source:
    """A file of `size` bytes that the Hub has at `url`, and where it sends us for its content. Safe for all threads."""

    def __init__(self, url: str, size: int) -> None:
        self._url = url
        self._size = size
        self._location: str | None = None
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from one offset up to another."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return self._ask(start, stop)
        except HfHubHTTPError as error:
            if error.response.status_code not in (401, 403, 404, 410):
                raise
            self._location = None  # it was signed, and that is good for an hour or so
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
        """Where the content is."""
        from huggingface_hub import get_hf_file_metadata

        return get_hf_file_metadata(self._url, token=None, headers=headers_of_ours(), retry_on_errors=True).location

    def _credentials(self, location: str) -> dict[str, str]:
        """The headers for a location: a token is for the Hub alone."""
        is_hub = urlsplit(location)[:2] == urlsplit(self._url)[:2]
        return headers_of_ours() if is_hub else {}


def headers_of_ours() -> dict[str, str]:
    """What huggingface_hub tells the Hub with every request, such as the user's token."""
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers()


def entry_of(found: Any) -> Entry:
    """A file or directory as huggingface_hub lists it."""
    name = found.path.rpartition("/")[2]
    if not hasattr(found, "blob_id"):
        return Entry(name, is_dir=True)
    return Entry(name, False, found.size, tag=found.lfs.sha256 if found.lfs else found.blob_id)
