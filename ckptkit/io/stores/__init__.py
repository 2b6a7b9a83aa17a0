"""Open the stores of remote checkpoints: directories, files and their bytes.

Responses of a store are cached for the process, so that all readers see the same state.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from ckptkit.entry_points import PluginTable, import_object
from ckptkit.errors import CkptError, IOFailure

T = TypeVar("T")
Read = Callable[[int, int], bytes]  # returns the bytes of a file from a start to an end offset, in one request


class KnownStore(NamedTuple):
    """A row of the store table: names `module:attribute`, which are imported when first needed.

    `store` creates a `Store` from the URL of its root. The others are "" for features that ckptkit lacks there:
    `destination` creates a `Destination`, `small_files` the `SmallFiles`, `keeper` the `RunBackend` of the run at a
    path. `describe` returns a text for the user's consent about what would be written to a path; `uploads` is the
    module with `find_uploads` and `abort_open_upload` for unfinished uploads.
    """

    store: str
    destination: str = ""
    small_files: str = ""
    keeper: str = ""
    describe: str = ""
    uploads: str = ""


_S3 = KnownStore(
    "ckptkit.io.stores.s3:S3Store",
    destination="ckptkit.io.stores.s3_destination:S3Destination",
    small_files="ckptkit.plugins.s3_runs.objects:S3SmallFiles",
    keeper="ckptkit.plugins.s3_runs.keeper:S3Keeper",
    uploads="ckptkit.plugins.s3_runs.uploads",
)
_OBJECTS = KnownStore(
    "ckptkit.plugins.object_stores.calls:open_bucket_store",
    destination="ckptkit.plugins.object_stores.destination:ObjectDestination",
)
_DESCRIBE_HUB = "ckptkit.plugins.hub_writing.bucket_destination:describe_hub_destination"

# keys are the scheme of a URL, or the beginning of the URL
STORES = PluginTable(
    "ckptkit.stores",
    KnownStore,
    {
        "hf": KnownStore(
            "ckptkit.io.stores.hub:HubStore",
            destination="ckptkit.plugins.hub_writing.repo_destination:HubRepoDestination",
            describe=_DESCRIBE_HUB,
        ),
        **dict.fromkeys(("hf://datasets", "hf://spaces"), KnownStore("ckptkit.io.stores.hub:HubStore")),
        "hf://buckets": KnownStore(
            "ckptkit.plugins.hub_writing.bucket_store:HubBucketStore",
            destination="ckptkit.plugins.hub_writing.bucket_destination:HubBucketDestination",
            describe=_DESCRIBE_HUB,
        ),
        "az": _OBJECTS,
        "gs": _OBJECTS,
        "s3": _S3,
        "s3a": KnownStore(_S3.store),
    },
)
LOCAL = KnownStore("", keeper="ckptkit.runs.run_backend:LocalKeeper")  # a disk: its files need no store
OTHERS = KnownStore("ckptkit.io.stores.generic:FileSystem")  # any other scheme that fsspec knows
_PAUSES = (0.2, 1.0, 3.0)  # seconds before each retry of a request without a response


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """A file or directory of a store.

    A file has its size, and its modification time (seconds since 1970, 0 if unknown). `tag` is a value that changes
    with the content of a file, such as an ETag.
    """

    name: str
    is_dir: bool
    size: int = 0
    changed: float = 0.0
    tag: str = ""


class Store(Protocol):
    """A read-only file tree. A `key` is a path in it, with slashes; the root's key is empty.

    Each method may raise `FileNotFoundError`, `PermissionError` or an error of a library's own. `hint` is the hint for
    a store that does not respond.
    """

    hint: str

    def find_entry(self, key: str) -> StoreEntry | None:
        """Return the entry at `key`, or None."""

    def list_entries(self, key: str) -> list[StoreEntry]:
        """Return the entries in the directory at `key`."""

    def open_reader(self, key: str, entry: StoreEntry) -> Read:
        """Return a function, for one thread, that reads from the file at `key` as long as it still matches `entry`."""

    def drop_cache(self) -> None:
        """Drop all cached responses."""


@runtime_checkable
class TranslatesErrors(Protocol):
    """A store that translates its library's errors into ckptkit's."""

    def to_ckpt_error(self, error: Exception, path: Path) -> CkptError:
        """Return ckptkit's error for an exception of a method that was called for `path`."""


@dataclass(frozen=True, slots=True)
class StoredSum:
    """A store's checksums of a file, available without reading the file.

    `nbytes` is its size and `kinds` the names of its checksums. `parts` has, in order, (CRC-32, size) of each part of
    the file, or of the full file; it is empty if the store has no CRC-32.
    """

    nbytes: int
    parts: tuple[tuple[int, int], ...] = ()
    kinds: tuple[str, ...] = ()


@runtime_checkable
class ChecksumStore(Protocol):
    """A store that keeps checksums of files, which it computed itself when they were written."""

    def read_stored_checksums(self, key: str) -> StoredSum:
        """Return the checksums of the file at `key`, in one or two requests."""


@dataclass(slots=True)
class CachedStore:
    """A store and its cached responses: entries by key, and listings by key of their directory.

    `reopen` creates the store anew, at its current state, if the store is fixed to an earlier state.
    """

    store: Store
    reopen: Callable[[], Store] | None = None
    found: dict[str, StoreEntry | None] = field(default_factory=dict)
    listed: dict[str, dict[str, StoreEntry]] = field(default_factory=dict)

    def find_entry(self, key: str) -> StoreEntry | None:
        folder, _, name = key.rpartition("/")
        # a listing also answers for missing entries, without a request
        if key and folder in self.listed:
            return self.listed[folder].get(name)
        if key not in self.found:
            self.found[key] = None if self._is_known_absent(folder) else self.store.find_entry(key)
        return self.found[key]

    def entries_by_name(self, key: str) -> dict[str, StoreEntry]:
        """Return the entries of the directory at `key`, by name.

        Raises `FileNotFoundError` or `NotADirectoryError`.
        """
        if key not in self.listed:
            entry = self.find_entry(key)
            if entry is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            if not entry.is_dir:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            self.listed[key] = {child.name: child for child in self.store.list_entries(key)}
        return self.listed[key]

    def find_change(self, key: str) -> str | None:
        """Return the key of an entry at or below `key` that has changed since it was cached, or None."""
        self.store.drop_cache()
        fresh = CachedStore(self.store)
        below = f"{key}/" if key else ""
        for folder, before in self.listed.items():
            if folder == key or folder.startswith(below):
                after = fresh.entries_by_name(folder) if fresh.find_entry(folder) else {}
                changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
                if changed:
                    return f"{folder}/{changed[0]}".lstrip("/")
        seen = self.found.get(key)
        return key if seen is not None and fresh.find_entry(key) != seen else None

    def drop_cache(self) -> None:
        """Drop all cached responses, because the store was written to."""
        self.store.drop_cache()
        self.store = self.reopen() if self.reopen else self.store
        self.found.clear()
        self.listed.clear()

    def _is_known_absent(self, directory: str) -> bool:
        """Return whether the cache shows that a directory does not exist."""
        above, _, name = directory.rpartition("/")
        if directory and above in self.listed:
            entry = self.listed[above].get(name)
            return entry is None or not entry.is_dir
        return bool(directory) and self._is_known_absent(above)


def known_store_for_url(url: str) -> KnownStore:
    """Return the row of the store table for a URL at or below a store's root."""
    scheme, _, rest = url.partition("://")
    return STORES.get(f"{scheme}://{rest.partition('/')[0]}") or STORES.get(scheme, OTHERS)


@cache
def open_store(url: str) -> CachedStore:
    """Return the store whose root is `url`, shared by all callers. Raises `Usage` for an unknown scheme."""
    reopen = partial(import_object(known_store_for_url(url).store), url)
    return CachedStore(cast(Store, reopen()), reopen)


@contextmanager
def translate_store_errors(path: Path, store: Store) -> Iterator[None]:
    """Turn any error of a store or its library inside the block into an `IOFailure` that names `path`.

    Passes `FileNotFoundError` on: a missing file is not a failure of the store.
    """
    try:
        yield
    except CkptError as error:
        raise error.blame(path=path) from error.__cause__
    except FileNotFoundError:
        raise
    except Exception as error:  # every library has its own exceptions, and those of its dependencies
        if isinstance(store, TranslatesErrors):
            raise store.to_ckpt_error(error, path) from error
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        what = "access denied" if isinstance(error, PermissionError) else "the store does not answer"
        raise IOFailure(f"{what}: {reason}", path=path, hint=store.hint) from error


def with_retries(request: Callable[[], T], retried_errors: tuple[type[Exception], ...]) -> T:
    """Return the result of `request`, retrying a few times after a pause if a `retried_errors` error is raised."""
    for pause in _PAUSES:
        try:
            return request()
        except retried_errors:
            time.sleep(pause)
    return request()
