"""Read `example://tmp/x` from the directory `/tmp/x`."""

from __future__ import annotations

from pathlib import Path

from ckptkit.io.stores import Read, StoreEntry


class Folder:
    hint = "look into the directory"

    def __init__(self, url: str) -> None:
        self.root = Path("/") / url.partition("://")[2]

    def find_entry(self, key: str) -> StoreEntry | None:
        path = self.root / key
        if not path.exists():
            return None
        return StoreEntry(path.name, path.is_dir(), 0 if path.is_dir() else path.stat().st_size)

    def list_entries(self, key: str) -> list[StoreEntry]:
        return [
            entry
            for path in (self.root / key).iterdir()
            if (entry := self.find_entry(str(path.relative_to(self.root))))
        ]

    def open_reader(self, key: str, entry: StoreEntry) -> Read:
        data = (self.root / key).read_bytes()
        return lambda start, end: data[start:end]

    def drop_cache(self) -> None:
        pass
