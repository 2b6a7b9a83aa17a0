"""Number the storages of a torch.save file to be made, as its tensors come.

The bytes of most are still to come. Those of tensors that lie inside an entry that is no tensor are read here, with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats.archives.read_archive import check_byte_order
from ckptkit.formats.archives.values import reading
from ckptkit.formats.archives.write_archive import describe_tensor
from ckptkit.formats.archives.zip_entries import ReadAt, ZipEntry, read_directory, read_entry
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.inert_pickle import ANY_NAME, PersistentId, Record
from ckptkit.layout import Blob, Layout, StoredTensor

_ENTRY_LIMIT = 1 << 28  # bytes of all entries that are no tensors; they are held in memory


class Storages:
    """The values that `wanted` has by name, and the `contents` that they need: bytes, or how many will come."""

    def __init__(self, wanted: Layout) -> None:
        self.wanted = wanted
        self.contents: dict[str, int | bytes] = {}
        self._keys: dict[StoredTensor | tuple[str, StoredTensor], str] = {}
        self._room = _ENTRY_LIMIT

    def value(self, name: str) -> Any:
        """Return the tensor or other entry of this name, as `write_pickle.dump` takes it."""
        try:
            if name in self.wanted.tensors:
                return self._tensor(name, self.wanted.tensors[name])
            return self._entry(self.wanted.blobs[name])
        except CkptError as error:
            raise error.blame(tensor=name) from None

    def _tensor(self, name: str, stored: StoredTensor) -> Record:
        """Return a tensor with a storage of its own; tied ones, which have the same chunks, share it.

        Single numbers never do: the steps of two parameters may be read from one place, but count by themselves.
        """
        kept = stored if stored.spec.shape else (name, stored)
        key = self._keys.get(kept)
        if key is None:
            key = self.add(stored.spec.nbytes)
            if stored.chunks:
                self._keys[kept] = key
        return describe_tensor(stored.spec, key)

    def add(self, content: int | bytes) -> str:
        """Return the key of a new storage, with its bytes or how many will come."""
        key = str(len(self.contents))
        self.contents[key] = content
        return key

    def _entry(self, blob: Blob) -> Any:
        """Return a value from its pickle, or from its archive of torch.save together with the storages in it."""
        if blob.content is not None:
            return inert_pickle.load(blob.content, ANY_NAME)[0]
        if blob.wrapper:
            raise Unsupported(f"stored through the transform `{blob.wrapper}`")
        try:
            self._spend(blob.length)
            read, length = reading(self.wanted.root, blob)
            entries = read_directory(read, length)
            check_byte_order(read, entries)
            value, _ = inert_pickle.load(read_entry(read, entries, "data.pkl", limit=length), ANY_NAME)
            self._bring(value, read, entries)
        except CkptError as error:
            raise error.blame(path=self.wanted.root / blob.path) from None
        return value

    def _bring(self, value: Any, read: ReadAt, entries: Mapping[str, ZipEntry]) -> None:
        """Make a value refer to storages of ours, with the bytes of those in its archive."""
        keys: dict[str, str] = {}
        for part in inert_pickle.walk(value):
            if not isinstance(part, PersistentId):
                continue
            match part.value:
                case ("storage", kind, str(key), *rest):
                    if key not in keys:
                        content = read_entry(read, entries, f"data/{key}", limit=self._room)
                        self._spend(len(content))
                        keys[key] = self.add(content)
                    part.value = ("storage", kind, keys[key], *rest)
                case _:
                    raise Corrupt("data.pkl refers to an object that is not a storage")

    def _spend(self, nbytes: int) -> None:
        self._room -= nbytes
        if self._room < 0:
            raise Unsupported(f"the entries that are not tensors need more than {_ENTRY_LIMIT} bytes")
