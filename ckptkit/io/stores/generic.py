"""Open stores of every kind that fsspec knows: Google Cloud, Azure, HTTP, SFTP, and so on. Caches no file contents.

fsspec and the library behind it read credentials, endpoints and retries from the environment and from their own files.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ckptkit.errors import IOFailure, Usage
from ckptkit.io.stores import Read, StoreEntry, with_retries

_EXTRAS = {"s3": "ckptkit-fsdp[s3]", "s3a": "ckptkit-fsdp[s3]", "gs": "ckptkit-fsdp[gs]", "az": "ckptkit-fsdp[az]"}
_TAGS = ("ETag", "etag", "e_tag", "md5Hash", "content_md5", "generation", "checksum", "sha256", "oid")
_TIMES = ("LastModified", "mtime", "updated", "last_modified", "created", "modified")
_SYNC_LOCK = threading.Lock()  # few of the synchronous libraries are thread-safe


class FileSystem:
    """A file tree of fsspec; `url` is its root, and `settings` are passed to fsspec."""

    def __init__(self, url: str, **settings: Any) -> None:
        scheme = url.partition("://")[0].rpartition("::")[2]
        self.hint = f"set up what `{scheme}://` needs as fsspec documents it"
        try:
            import fsspec

            self._files, base = fsspec.url_to_fs(url, **settings)
        except ImportError as error:
            package = _EXTRAS.get(scheme)
            hint = f"pip install '{package}'" if package else str(error)
            raise Usage(f"`{scheme}://` needs a package that is not installed", hint=hint) from error
        except (TypeError, ValueError) as error:
            raise Usage(f"{error}", hint="use hf://, s3:// or a scheme that fsspec knows") from error
        self._base = base.rstrip("/")

    def find_entry(self, key: str) -> StoreEntry | None:
        """Return the entry at `key`, or None. The root counts as a directory if it can be listed."""
        try:
            if key:
                return entry_from_fsspec(self._files.info(self._path(key)))
            self._list(key)
        except FileNotFoundError as error:
            if self._means_missing_file(error):
                return None
            raise LookupError(str(error)) from error
        return StoreEntry("", is_dir=True)

    def list_entries(self, key: str) -> list[StoreEntry]:
        """Return the entries of the directory at `key`, without the empty placeholder object that some tools create."""
        directory = self._path(key).strip("/")
        return [entry_from_fsspec(info) for info in self._list(key) if info["name"].strip("/") != directory]

    def open_reader(self, key: str, entry: StoreEntry) -> Read:
        """Return a function that reads from the file at `key`. On S3, reads only the listed object, by ETag."""
        path = self._path(key)
        if not self._files.async_impl:
            return lambda start, stop: self._read_range(path, start, stop)
        file = self._files.open(path, "rb", cache_type="none")
        if entry_from_fsspec(file.details) != entry:
            raise IOFailure("the file was replaced while it was being read", hint="run the same command again")

        def read(start: int, stop: int) -> bytes:
            file.seek(start)
            data: bytes = file.read(stop - start)
            return data

        return lambda start, stop: with_retries(lambda: read(start, stop), connection_error_types())

    def drop_cache(self) -> None:
        self._files.invalidate_cache()

    def _means_missing_file(self, error: FileNotFoundError) -> bool:  # noqa: ARG002
        """Return whether an error means that a file is missing, and not the bucket or host that contains it."""
        return True

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}" if key else self._base

    def _list(self, key: str) -> list[dict[str, Any]]:
        listing: list[dict[str, Any]] = self._files.ls(self._path(key), detail=True)
        return listing

    def _read_range(self, path: str, start: int, stop: int) -> bytes:
        with _SYNC_LOCK:
            data: bytes = self._files.cat_file(path, start=start, end=stop)
        return data


def entry_from_fsspec(info: Mapping[str, Any]) -> StoreEntry:
    """Return an entry from fsspec's description. The tag is the store's content hash, or else the time."""
    times = [info[name] for name in _TIMES if info.get(name)]
    changed = to_epoch_seconds(times[0]) if times else 0.0
    tags = [str(info[name]).strip('"') for name in _TAGS if info.get(name)]
    name = info["name"].rstrip("/").rpartition("/")[2]
    if info["type"] == "directory":
        return StoreEntry(name, is_dir=True)
    return StoreEntry(name, False, int(info["size"] or 0), changed, tags[0] if tags else str(changed or ""))


def to_epoch_seconds(time: Any) -> float:
    """Return a time of any type as whole seconds since 1970, because a store may report it in two precisions."""
    if isinstance(time, str):
        try:
            time = datetime.fromisoformat(time)
        except ValueError:
            return 0.0
    return float(int(time.timestamp() if isinstance(time, datetime) else time))


def connection_error_types() -> tuple[type[Exception], ...]:
    """Return the exceptions for a lost connection that the library does not retry itself."""
    try:
        from aiohttp import ClientConnectionError, ClientPayloadError
    except ImportError:
        return (ConnectionError, TimeoutError)
    return (ConnectionError, TimeoutError, ClientConnectionError, ClientPayloadError)
