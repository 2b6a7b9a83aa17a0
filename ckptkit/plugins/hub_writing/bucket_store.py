"""Read from buckets of the Hugging Face Hub, and change their files.

Files are read by byte range from the URL to which the Hub redirects, like files in repositories. A bucket has no
commits, so a file that is replaced during reading is recognized by the Hub's hash of its content.
https://huggingface.co/docs/hub/storage-buckets
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from huggingface_hub import constants
from huggingface_hub.utils import hf_raise_for_status, http_backoff

from ckptkit.errors import IOFailure, NotACheckpoint
from ckptkit.io.claims import LIMIT
from ckptkit.io.file import read_small
from ckptkit.io.path import drop_cached_listing, to_uncached_path
from ckptkit.io.stores import Read, StoreEntry
from ckptkit.io.stores.hub import HubDownload, HubStore, request_headers
from ckptkit.io.stores.hub_errors import AGAIN, as_line_without_token, translate_hub_errors
from ckptkit.plugins.hub_writing.calls import BUCKET, NDJSON, Line, to_json_lines

_MOST = 100  # changes of files per request


class HubBucketStore(HubStore):
    """The bucket at `hf://buckets/namespace/name`."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.root = to_uncached_path(url)

    def find_entry(self, key: str) -> StoreEntry | None:
        if key:
            return super().find_entry(key)
        self._api.bucket_info(self.id)
        return StoreEntry("", is_dir=True)

    def list_entries(self, key: str) -> list[StoreEntry]:
        base = f"{key}/" if key else ""
        tree = self._api.list_bucket_tree(self.id, prefix=key or None, recursive=False)
        below = (item for item in tree if item.path.startswith(base) and item.path != base)
        inside = (item for item in below if "/" not in item.path.removeprefix(base).strip("/"))
        return list({entry.name: entry for entry in map(entry_from_bucket_item, inside)}.values())

    def open_reader(self, key: str, entry: StoreEntry) -> Read:
        address = f"{self._api.endpoint}/buckets/{self.id}/resolve/{quote(key, safe='')}"
        return self._sources.setdefault(f"{key} {entry.tag}", HubDownload(address, entry.size)).read

    def drop_cache(self) -> None:
        """Drop the cached file addresses, because files may have been replaced."""
        self._sources.clear()

    @property
    def is_private(self) -> bool | None:
        """Return whether the bucket is private; None if it does not exist or is not visible to us."""
        try:
            with translate_hub_errors(self.id):
                return bool(self._api.bucket_info(self.id).private)
        except NotACheckpoint:
            return None

    def create(self) -> None:
        with translate_hub_errors(self.id):
            self._api.create_bucket(self.id, private=True)

    def find_object_content(self, key: str) -> bytes | None:
        path = drop_cached_listing(self.root) / key
        return read_small(path, LIMIT) if path.exists() else None

    def find_objects(self, keys: Sequence[str]) -> dict[str, StoreEntry]:
        """Return the existing files among these, by key."""
        with translate_hub_errors(self.id):
            files = self._api.get_bucket_paths_info(self.id, list(keys))
            return {file.path: to_entry(file.path, file.size, file.xet_hash) for file in files}

    def list_objects(self, prefix: str) -> dict[str, StoreEntry]:
        if not prefix.endswith("/"):
            return self.find_objects([prefix])
        with translate_hub_errors(self.id):
            tree = self._api.list_bucket_tree(self.id, prefix=prefix.rstrip("/"), recursive=True)
            files = (item for item in tree if item.type == "file" and item.path.startswith(prefix))
            return {file.path: to_entry(file.path, file.size, file.xet_hash) for file in files}

    def delete_objects(self, keys: Iterable[str]) -> None:
        self.change_files([{"type": "deleteFile", "path": key} for key in keys])

    def change_files(self, operations: Sequence[Line]) -> None:
        """Add and delete files of the bucket. Raises `IOFailure` if some of the changes failed.

        Each file is changed completely or not at all, but the changes are not one transaction.
        https://huggingface.co/docs/hub/storage-buckets
        """
        address = f"{constants.ENDPOINT}/api/{BUCKET}/{self.id}/batch"
        for start in range(0, len(operations), _MOST):
            batch = operations[start : start + _MOST]
            with translate_hub_errors(self.id):
                headers = request_headers() | NDJSON
                response = http_backoff("POST", address, headers=headers, content=to_json_lines(batch))
                failed = response.json().get("failed") if response.status_code in (200, 422) else None
                if failed:
                    why = as_line_without_token(str(failed[0].get("error")))
                    message = f"the Hub did not change {len(failed)} of {len(batch)} files: {why}"
                    raise IOFailure(message, path=self.root / str(failed[0].get("path")), hint=AGAIN)
                hf_raise_for_status(response)


def entry_from_bucket_item(item: Any) -> StoreEntry:
    name = item.path.strip("/").rpartition("/")[2]
    if item.type != "file":
        return StoreEntry(name, is_dir=True)
    changed = item.mtime.timestamp() if item.mtime else 0.0
    return StoreEntry(name, False, item.size, changed, tag=item.xet_hash)


def to_entry(key: str, nbytes: int, xet_hash: str) -> StoreEntry:
    """Return a file; its tag is the hash of its content in the Hub's storage."""
    return StoreEntry(key.rpartition("/")[2], False, nbytes, tag=xet_hash)
