"""Read from Google Cloud Storage and Azure with obstore, or with fsspec if obstore is not installed.

obstore takes credentials and endpoints from the environment: https://developmentseed.org/obstore/latest/authentication/
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.errors import CkptError, IOFailure
from ckptkit.io.stores import Read, Store, StoreEntry
from ckptkit.io.stores.generic import FileSystem
from ckptkit.plugins.object_stores.calls import fetch_error_detail, iterate_objects, open_object_store
from ckptkit.plugins.object_stores.errors import has_no_error_code, is_missing_object_error, to_object_store_error

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore


def open_bucket_store(url: str) -> Store:
    """Return the bucket or container at `url`."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        return FileSystem(url)
    return ObjectFiles(url)


class ObjectFiles:
    """The bucket or container at `url` as a directory tree: keys with slashes are paths."""

    hint = "check the network"

    def __init__(self, url: str) -> None:
        self._url = url
        self._seen: dict[str, ObjectMeta] = {}

    def find_entry(self, key: str) -> StoreEntry | None:
        """Return the entry at `key`, or None. An empty object with other objects below it is a directory."""
        meta = self._find_meta(key) if key else None
        if meta is not None and meta["size"]:
            return entry_from_object_meta(meta)
        below = next(iterate_objects(self._store, key), None)
        if below is not None or not key:
            return StoreEntry("", is_dir=True)
        return None if meta is None else entry_from_object_meta(meta)

    def list_entries(self, key: str) -> list[StoreEntry]:
        """Return the entries in the directory at `key`.

        Leaves out the empty objects that some tools create for directories.
        """
        from obstore import list_with_delimiter

        listing = list_with_delimiter(self._store, key or None)
        folders = {prefix.rpartition("/")[2] for prefix in listing["common_prefixes"]}
        files = [entry_from_object_meta(meta) for meta in listing["objects"] if meta["path"] != key]
        return [
            *(StoreEntry(name, is_dir=True) for name in sorted(folders)),
            *(entry for entry in files if entry.name not in folders),
        ]

    def open_reader(self, key: str, entry: StoreEntry) -> Read:
        """Return a function that reads byte ranges of the object at `key`, and fails if its ETag changed."""
        from obstore import get

        meta = self._seen.get(key) or self._find_meta(key)
        if meta is None or entry_from_object_meta(meta) != entry:
            raise IOFailure("the file was replaced while it was being read", hint="run the same command again")
        self._seen[key] = meta
        tag = meta["e_tag"]

        def read(start: int, stop: int) -> bytes:
            response = get(self._store, key, options={"range": (start, stop), **({"if_match": tag} if tag else {})})
            return bytes(response.bytes())

        return read

    def drop_cache(self) -> None:
        self._seen.clear()

    def to_ckpt_error(self, error: Exception, path: Path) -> CkptError:
        return to_object_store_error(
            fetch_error_detail(self._store, error) if has_no_error_code(error) else error, path
        )

    @cached_property
    def _store(self) -> ObjectStore:
        return open_object_store(self._url)

    def _find_meta(self, key: str) -> ObjectMeta | None:
        from obstore import head

        try:
            return head(self._store, key)
        except FileNotFoundError as error:
            if is_missing_object_error(error):
                return None
            raise LookupError(str(error)) from error


def entry_from_object_meta(meta: ObjectMeta) -> StoreEntry:
    """Return the entry of an object, with its ETag as tag. Only some requests put quotes around the ETag."""
    changed = meta["last_modified"].timestamp()
    tag = (meta["e_tag"] or str(changed)).strip('"')
    return StoreEntry(meta["path"].rpartition("/")[2], False, meta["size"], float(int(changed)), tag)
