"""Read from buckets of the Hugging Face Hub.

Files are read by byte range from the URL to which the Hub redirects, like files in repositories. A bucket has no
commits, so a file that is replaced during reading is recognized by the Hub's hash of its content.
https://huggingface.co/docs/hub/storage-buckets
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

from ckptkit.errors import NotACheckpoint
from ckptkit.io.stores import Read, StoreEntry
from ckptkit.io.stores.hub import HubDownload, HubStore, make_hub_client

T = TypeVar("T")


class HubBucketStore:
    """The bucket at `hf://buckets/namespace/name`."""

    hint = HubStore.hint

    def __init__(self, url: str) -> None:
        self._id = "/".join(url.split("/")[-2:])
        self._api = make_hub_client()
        self._sources: dict[tuple[str, str], HubDownload] = {}

    def find_entry(self, key: str) -> StoreEntry | None:
        if not key:
            self._call(lambda: self._api.bucket_info(self._id))
            return StoreEntry("", is_dir=True)
        folder, _, name = key.rpartition("/")
        return next((entry for entry in self.list_entries(folder) if entry.name == name), None)

    def list_entries(self, key: str) -> list[StoreEntry]:
        base = f"{key}/" if key else ""
        tree = self._call(lambda: list(self._api.list_bucket_tree(self._id, prefix=key or None, recursive=False)))
        below = (item for item in tree if item.path.startswith(base) and item.path != base)
        inside = (item for item in below if "/" not in item.path.removeprefix(base).strip("/"))
        return list({entry.name: entry for entry in map(entry_from_bucket_item, inside)}.values())

    def open_reader(self, key: str, entry: StoreEntry) -> Read:
        address = f"{self._api.endpoint}/buckets/{self._id}/resolve/{quote(key, safe='')}"
        return self._sources.setdefault((key, entry.tag), HubDownload(address, entry.size)).read

    def drop_cache(self) -> None:
        """Drop the cached file addresses, because files may have been replaced."""
        self._sources.clear()

    def _call(self, request: Callable[[], T]) -> T:
        from huggingface_hub.errors import BucketNotFoundError

        try:
            return request()
        except BucketNotFoundError as error:
            raise NotACheckpoint("the Hub shows us no such bucket", hint=self.hint) from error


def entry_from_bucket_item(item: Any) -> StoreEntry:
    name = item.path.strip("/").rpartition("/")[2]
    if item.type != "file":
        return StoreEntry(name, is_dir=True)
    changed = item.mtime.timestamp() if item.mtime else 0.0
    return StoreEntry(name, False, item.size, changed, tag=item.xet_hash)
