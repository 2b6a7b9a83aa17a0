"""Read from repositories of the Hugging Face Hub, each at one commit, so that all reads see one state.

File contents are not cached. Reads are range requests to the address that the Hub redirects to (a CDN for large files),
which is looked up once per file. `huggingface_hub` provides the token, the endpoint and other settings.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ckptkit.errors import CkptError, IOFailure
from ckptkit.io.stores import Read, StoreEntry
from ckptkit.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_KINDS = {"datasets": "dataset", "spaces": "space"}
_TRIES = 3
_TIMEOUT = 30  # seconds without receiving a byte


class HubStore:
    """The repository at `hf://[datasets/]org/name[@revision]`."""

    hint = "check the network and the name; if the repository is private, run `hf auth login` or set HF_TOKEN"

    def __init__(self, url: str) -> None:
        self._kind, self.id, self._revision = parse_kind_id_and_revision(url.partition("://")[2])
        self._api = make_hub_client()
        self._sources: dict[str, HubDownload] = {}

    @cached_property
    def commit(self) -> str:
        return str(self._api.repo_info(self.id, revision=self._revision, repo_type=self._kind).sha)

    def find_entry(self, key: str) -> StoreEntry | None:
        if not key:
            return StoreEntry("", is_dir=bool(self.commit))
        folder, _, name = key.rpartition("/")
        try:
            return next((entry for entry in self.list_entries(folder) if entry.name == name), None)
        except FileNotFoundError:
            return None

    def list_entries(self, key: str) -> list[StoreEntry]:
        from huggingface_hub.errors import EntryNotFoundError

        try:
            tree = self._api.list_repo_tree(self.id, key or None, revision=self.commit, repo_type=self._kind)
            return [entry_from_hub(item) for item in tree]
        except EntryNotFoundError as error:
            raise FileNotFoundError(key) from error

    def open_reader(self, key: str, entry: StoreEntry) -> Read:
        """Return a function that reads from the file at `key`. A commit never changes, so `entry` is not checked."""
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.id, key, revision=self.commit, repo_type=self._kind, endpoint=self._api.endpoint)
        return self._sources.setdefault(key, HubDownload(url, entry.size)).read

    def drop_cache(self) -> None:
        """Do nothing: a commit never changes."""

    def to_ckpt_error(self, error: Exception, path: Path) -> CkptError:
        from ckptkit.io.stores.hub_errors import MAIN, to_hub_error

        return to_hub_error(error, self.id, self._revision or MAIN).blame(path=path)


class HubDownload:
    """A file of `size` bytes at the Hub's `url`, and the address that it redirects to. Thread-safe."""

    def __init__(self, url: str, size: int) -> None:
        self._url = url
        self._size = size
        self._location: str | None = None
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> bytes:
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return self._request_range(start, stop)
        except HfHubHTTPError as error:
            if error.response.status_code not in (401, 403, 404, 410):
                raise
            self._location = None  # the signed URL has expired, after an hour or so
            return self._request_range(start, stop)

    def _request_range(self, start: int, stop: int) -> bytes:
        from huggingface_hub import get_hf_file_metadata
        from huggingface_hub.utils import hf_raise_for_status, http_backoff

        with self._lock:
            if self._location is None:
                file = get_hf_file_metadata(self._url, token=None, headers=request_headers(), retry_on_errors=True)
                self._location = file.location
            location = self._location
        is_hub = urlsplit(location)[:2] == urlsplit(self._url)[:2]  # the token is only sent to the Hub
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        headers |= request_headers() if is_hub else {}
        answer = http_backoff(
            "GET", location, headers=headers, timeout=_TIMEOUT, max_retries=_TRIES, base_wait_time=0.5
        )
        hf_raise_for_status(answer)
        if answer.status_code != 206 and stop - start != self._size:
            hint = "run `ckptkit pull` and pass its directory, or check the proxy or mirror (HF_ENDPOINT)"
            raise IOFailure("the server ignores range requests and sends the whole file", hint=hint)
        return bytes(answer.content)


def parse_kind_id_and_revision(path: str) -> tuple[str, str, str | None]:
    """Return kind, id and revision of `[datasets/]org/name[@revision]`."""
    parts = path.split("/")
    owner, name = parts[-2:]
    name, _, revision = name.partition("@")
    return _KINDS.get(parts[0], "model"), f"{owner}/{name}", unquote(revision) or None


def find_offline_snapshot(repository: str) -> Path | None:
    """Return the snapshot of `[datasets/]org/name[@revision]` in the Hub's cache, if HF_HUB_OFFLINE is set; else None.

    The snapshot of a partly downloaded repository contains only the downloaded files.
    """
    from huggingface_hub import constants, snapshot_download

    if not constants.HF_HUB_OFFLINE:
        return None
    kind, name, revision = parse_kind_id_and_revision(repository)
    try:
        return Path(snapshot_download(name, revision=revision, repo_type=kind, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or an invalid name
        return None


@contextmanager
def translate_download_errors(model: str) -> Iterator[None]:
    """Turn an error of the Hub's client inside the block into one of ckptkit's that names `model`."""
    from huggingface_hub import constants

    from ckptkit.io.stores.hub_errors import MAIN, to_hub_error

    try:
        yield
    except Exception as error:  # the client raises its own, its HTTP library's and the system's
        if constants.HF_HUB_OFFLINE:
            message = f"HF_HUB_OFFLINE is set, and the Hub's cache does not contain `{model}`"
            raise IOFailure(message, hint="unset HF_HUB_OFFLINE, or pass a local directory") from error
        problem = to_hub_error(error, model, MAIN)
        problem.message = f"no local path is called `{model}`, and getting it from the Hub failed: {problem.message}"
        raise problem from error


def make_hub_client() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(library_name="ckptkit", library_version=__version__)


def request_headers() -> dict[str, str]:
    """Return the headers of every request to the Hub, including the user's token."""
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(library_name="ckptkit", library_version=__version__)


def entry_from_hub(item: Any) -> StoreEntry:
    name = item.path.rpartition("/")[2]
    if not hasattr(item, "blob_id"):
        return StoreEntry(name, is_dir=True)
    return StoreEntry(name, False, item.size, tag=item.lfs.sha256 if item.lfs else item.blob_id)
