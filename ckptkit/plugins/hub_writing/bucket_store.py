"""Read from buckets of the Hugging Face Hub.

Files are read by byte range from the URL to which the Hub redirects, like files in repositories. A bucket has no
commits, so a file that is replaced during reading is recognized by the Hub's hash of its content.
https://huggingface.co/docs/hub/storage-buckets
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from ckptkit.errors import NotACheckpoint
from ckptkit.io.stores import Read, StoreEntry
from ckptkit.io.stores.hub import HubDownload, HubStore, make_hub_client


class HubBucketStore:
    """The bucket at `hf://buckets/namespace/name`."""

    hint = HubStore.hint

    def __init__(self, url: str) -> None:
        self._id = "/".join(url.split("/")[-2:])
        self._api = make_hub_client()
        self._sources: dict[tuple[str, str], HubDownload] = {}

    def find_entry(self, key: str) -> StoreEntry | None:
        """Return the entry at `key`, or None."""
        if not key:
            return StoreEntry("", is_dir=self._is_existing_bucket())
        folder, _, name = key.rpartition("/")
        return next((entry for entry in self.list_entries(folder) if entry.name == name), None)

    def list_entries(self, key: str) -> list[StoreEntry]:
        """Return the entries of the directory at `key`."""
        from huggingface_hub.errors import BucketNotFoundError

        base = f"{key}/" if key else ""
        try:
            tree = list(self._api.list_bucket_tree(self._id, prefix=key or None, recursive=False))
        except BucketNotFoundError as error:
            raise NotACheckpoint("the Hub shows us no such bucket", hint=self.hint) from error
        by_name = {
            (entry := entry_from_bucket_item(item)).name: entry for item in tree if is_directly_in(item.path, base)
        }
        return list(by_name.values())

    def open_reader(self, key: str, entry: StoreEntry) -> Read:
        """Return a function that reads from the file at `key`."""
        address = f"{self._api.endpoint}/buckets/{self._id}/resolve/{quote(key, safe='')}"
        return self._sources.setdefault((key, entry.tag), HubDownload(address, entry.size)).read

    def drop_cache(self) -> None:
        """Drop the cached file addresses, because files may have been replaced."""
        self._sources.clear()

    def _is_existing_bucket(self) -> bool:
        from huggingface_hub.errors import BucketNotFoundError

        try:
            self._api.bucket_info(self._id)
        except BucketNotFoundError as error:
            raise NotACheckpoint("the Hub shows us no such bucket", hint=self.hint) from error
        return True


def is_directly_in(path: str, base: str) -> bool:
    """Return whether a path is directly in the folder with the path prefix `base`."""
    return path.startswith(base) and path != base and "/" not in path.removeprefix(base).strip("/")


def entry_from_bucket_item(item: Any) -> StoreEntry:
    """Return the entry for a file or directory as huggingface_hub lists it."""
    name = item.path.strip("/").rpartition("/")[2]
    if item.type != "file":
        return StoreEntry(name, is_dir=True)
    changed = item.mtime.timestamp() if item.mtime else 0.0
    return StoreEntry(name, False, item.size, changed, tag=item.xet_hash)
