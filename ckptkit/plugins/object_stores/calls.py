"""Call Google Cloud Storage or Azure on one bucket, with obstore, or only read with fsspec if it is not installed.

obstore takes credentials and endpoints from the environment: https://developmentseed.org/obstore/latest/authentication/
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from ckptkit.errors import IOFailure, Usage
from ckptkit.io.path import to_uncached_path
from ckptkit.io.stores import Read, Store, StoreEntry
from ckptkit.io.stores.generic import FileSystem
from ckptkit.plugins.object_stores.errors import has_no_error_code, is_missing_object_error, to_object_store_error

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult, UpdateVersion
    from obstore.store import ObjectStore

T = TypeVar("T")

_IN_FLIGHT = 4  # concurrent requests per stream
_AT_ONCE = 1 << 26  # largest object in bytes that is sent in one request
_PATIENCE = 10  # seconds to wait for an aborted stream to end
_ALLOWS_HTTP = ("AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
_TIMEOUT = "300s"  # per request: a large part may take long


def open_bucket_store(url: str) -> Store:
    """Return the bucket or container at `url`, to read from."""
    return ObjectBucket(url) if find_spec("obstore") else FileSystem(url)


class ObjectBucket:
    """The bucket or container at `url`, also as a directory tree: keys with slashes are paths. Thread-safe."""

    hint = "check the network"

    def __init__(self, url: str) -> None:
        self.root = to_uncached_path(url)
        self._seen: dict[str, ObjectMeta] = {}
        try:
            self.store = open_object_store(url)
        except ImportError as error:
            scheme = url.partition("://")[0]
            hint = f"run `pip install 'ckptkit-fsdp[{scheme}]'`"
            raise Usage(f"writing to `{scheme}://` needs a package that is not installed", hint=hint) from error
        except Exception as error:
            raise to_object_store_error(error, self.root) from error

    def find_entry(self, key: str) -> StoreEntry | None:
        """Return the entry at `key`, or None. An empty object with other objects below it is a directory."""
        meta = self.find_object_meta(key) if key else None
        if meta is not None and meta["size"]:
            return entry_from_object_meta(meta)
        below = next(iterate_objects(self.store, key), None)
        if below is not None or not key:
            return StoreEntry("", is_dir=True)
        return None if meta is None else entry_from_object_meta(meta)

    def list_entries(self, key: str) -> list[StoreEntry]:
        """Return the entries in the directory at `key`.

        Leaves out the empty objects that some tools create for directories.
        """
        from obstore import list_with_delimiter

        listing = list_with_delimiter(self.store, key or None)
        folders = {prefix.rpartition("/")[2] for prefix in listing["common_prefixes"]}
        files = [entry_from_object_meta(meta) for meta in listing["objects"] if meta["path"] != key]
        return [
            *(StoreEntry(name, is_dir=True) for name in sorted(folders)),
            *(entry for entry in files if entry.name not in folders),
        ]

    def open_reader(self, key: str, entry: StoreEntry) -> Read:
        """Return a function that reads byte ranges of the object at `key`, and fails if its ETag changed."""
        from obstore import get

        meta = self._seen.get(key) or self.find_object_meta(key)
        if meta is None or entry_from_object_meta(meta) != entry:
            raise IOFailure("the file was replaced while it was being read", hint="run the same command again")
        self._seen[key] = meta
        tag = meta["e_tag"]

        def read(start: int, stop: int) -> bytes:
            response = get(self.store, key, options={"range": (start, stop), **({"if_match": tag} if tag else {})})
            return bytes(response.bytes())

        return read

    def drop_cache(self) -> None:
        self._seen.clear()

    def put_object(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write an object, and replace an existing one."""
        from obstore import put

        with self._translate_errors(key):
            put(self.store, key, data, chunk_size=_AT_ONCE)

    def try_put_object(
        self, key: str, data: bytes | bytearray | memoryview, expected_version: UpdateVersion | None = None
    ) -> bool:
        """Create an object in one request or, with `expected_version`, replace it if it still has this version.

        Returns False, and changes nothing, if the object exists, or if its version has changed.
        """
        from obstore import put
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        refusal = AlreadyExistsError if expected_version is None else PreconditionError
        with self._translate_errors(key), suppress(refusal):
            put(self.store, key, data, mode="create" if expected_version is None else expected_version)
            return True
        return False

    def find_object_meta(self, key: str) -> ObjectMeta | None:
        from obstore import head

        return self._call_or_none(key, lambda: head(self.store, key))

    def find_content_and_version(self, key: str) -> tuple[bytes, UpdateVersion] | None:
        from obstore import get

        def ask() -> tuple[bytes, UpdateVersion]:
            result = get(self.store, key)
            known = {"e_tag": result.meta["e_tag"], "version": result.meta["version"]}
            version = {name: value for name, value in known.items() if value is not None}
            return bytes(result.bytes()), cast("UpdateVersion", version)

        return self._call_or_none(key, ask)

    def find_object_content(self, key: str) -> bytes | None:
        found = self.find_content_and_version(key)
        return found and found[0]

    def list_objects(self, prefix: str) -> dict[str, StoreEntry]:
        """Return the objects below a `prefix` that ends in a slash, or the object of this name, by key."""
        if prefix and not prefix.endswith("/"):
            meta = self.find_object_meta(prefix)
            return {prefix: entry_from_object_meta(meta)} if meta else {}
        with self._translate_errors(prefix):
            return {meta["path"]: entry_from_object_meta(meta) for meta in iterate_objects(self.store, prefix)}

    def delete_objects(self, keys: Sequence[str]) -> None:
        """Delete objects, in any order. A missing object is not an error."""
        from obstore import delete

        if not keys:
            return
        with self._translate_errors(keys[0]):
            try:
                delete(self.store, keys)
            except FileNotFoundError as error:
                if not is_missing_object_error(error):
                    raise
                for key in keys:
                    with suppress(FileNotFoundError):
                        delete(self.store, key)

    def to_ckpt_error(self, error: Exception, path: Path) -> IOFailure:
        return to_object_store_error(fetch_error_detail(self.store, error), path)

    def _call_or_none(self, key: str, request: Callable[[], T]) -> T | None:
        with self._translate_errors(key):
            try:
                return request()
            except FileNotFoundError as error:
                if not is_missing_object_error(error):
                    raise
                return None

    @contextmanager
    def _translate_errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # obstore raises its own exceptions and built-in ones
            raise self.to_ckpt_error(error, self.root / key) from error


class ObjectStream:
    """An object that is sent while it is written, in order, by one thread at a time. Buffers one block."""

    def __init__(self, bucket: ObjectBucket, key: str, part_bytes: int) -> None:
        self._bucket = bucket
        self._key = key
        self._part_bytes = part_bytes
        self._piece: memoryview | None = None
        self._is_whole = False
        self._result: PutResult | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._stream_pieces, name="ckptkit-send", daemon=True)
        self._thread.start()

    def write(self, piece: memoryview) -> None:
        """Add bytes; the stream keeps a reference to them. Raises the error of the stream."""
        with self._changed:
            while self._piece is not None and self._error is None:
                self._changed.wait()
            self._require_no_error()
            self._piece = piece
            self._changed.notify_all()

    def finish(self) -> PutResult:
        """Wait until the object exists."""
        with self._changed:
            self._is_whole = True
            self._changed.notify_all()
        self._thread.join()
        self._require_no_error()
        assert self._result is not None
        return self._result

    def stop(self, error: BaseException) -> None:
        """Abort. There is no object, unless all of it was sent."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._thread.join(_PATIENCE)

    def _stream_pieces(self) -> None:
        from obstore import put

        store, pieces = self._bucket.store, self._pieces()
        try:
            # if the iterator raises, no object is created
            self._result = put(store, self._key, pieces, chunk_size=self._part_bytes, max_concurrency=_IN_FLIGHT)
        except BaseException as error:  # noqa: BLE001 - raised to the thread that writes
            with self._changed:
                if self._error is None:
                    self._error = error
                    if isinstance(error, Exception):
                        self._error = self._bucket.to_ckpt_error(error, self._bucket.root / self._key)
                self._changed.notify_all()

    def _pieces(self) -> Iterator[memoryview]:
        while True:
            with self._changed:
                while self._piece is None and not self._is_whole and self._error is None:
                    self._changed.wait()
                self._require_no_error()
                piece, self._piece = self._piece, None
                self._changed.notify_all()
            if piece is None:
                return
            yield piece

    def _require_no_error(self) -> None:
        if self._error is not None:
            raise self._error


def open_object_store(url: str) -> ObjectStore:
    """Return the bucket or container at a URL; credentials and endpoint come from the environment.

    The options for HTTP are read here, because obstore ignores its environment variables for client options once any is
    passed.
    """
    from obstore.store import from_url

    allows_http = any(os.environ.get(name, "").lower() in ("1", "true") for name in _ALLOWS_HTTP)
    return from_url(url, client_options={"timeout": _TIMEOUT, "allow_http": allows_http})


def iterate_objects(store: ObjectStore, prefix: str) -> Iterator[ObjectMeta]:
    """Yield all objects whose key starts with `prefix` and a slash."""
    from obstore import list as list_pages

    for page in list_pages(store, prefix.rstrip("/") or None, chunk_size=1000):
        yield from page


def entry_from_object_meta(meta: ObjectMeta) -> StoreEntry:
    """Return the entry of an object, with its ETag as tag. Only some requests put quotes around the ETag."""
    changed = meta["last_modified"].timestamp()
    tag = (meta["e_tag"] or str(changed)).strip('"')
    return StoreEntry(meta["path"].rpartition("/")[2], False, meta["size"], float(int(changed)), tag)


def fetch_error_detail(store: ObjectStore, error: Exception) -> Exception:
    """Return an error of obstore with its reason.

    A response to HEAD has no body, so a list request is made to learn why the store refuses.
    """
    if has_no_error_code(error):
        try:
            next(iterate_objects(store, "ckptkit"), None)
        except Exception as other:  # noqa: BLE001 - as many kinds as the first
            return other
    return error
