"""Write the archive that torch.save would write, around tensors whose bytes come later.

Source: torch/serialization.py and caffe2/serialize/inline_container.cc; the zip fields are from PKWARE's APPNOTE.TXT.
Everything is known in advance except the tensors' bytes and their CRC-32, which is stored in two places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any

from ckptkit.errors import Corrupt, Unsupported, errors_at
from ckptkit.formats.archives.non_tensor_entries import blob_reader
from ckptkit.formats.archives.zip_entries import (
    ALL_ONES,
    DIRECTORY_RECORD,
    END,
    END64,
    END64_LOCATOR,
    LOCAL_HEADER,
    check_byte_order,
    read_central_directory,
    read_entry_content,
)
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.inert_pickle import ANY_NAME, Global, PersistentId, Record
from ckptkit.formats.pickles.tensor_calls import STORAGES
from ckptkit.io.crc32 import crc32
from ckptkit.layout import Blob, Layout, Patch, Spec, StoredTensor
from ckptkit.layout.box import row_major_strides

# Storages get their keys in the order of the tensors. The bytes of most come later. Tensors inside a non-tensor entry
# are read here, with the entry.
_ENTRY_LIMIT = 1 << 28  # bytes of all non-tensor entries, which are in memory at the same time


class Storages:
    """The pickled values of the entries of `wanted`, and the `contents` of their storages: bytes, or a size."""

    def __init__(self, wanted: Layout) -> None:
        self.wanted = wanted
        self.contents: dict[str, int | bytes] = {}
        self._keys: dict[StoredTensor | tuple[str, StoredTensor], str] = {}
        self._room = _ENTRY_LIMIT

    def picklable_value_of(self, name: str) -> Any:
        """Return the tensor or other entry of this name, as `write_pickle.dump` takes it."""
        with errors_at(tensor=name):
            stored = self.wanted.tensors.get(name)
            if stored is None:
                return self._load_entry_value(self.wanted.blobs[name])
            # tied tensors, which have the same chunks, share a storage. 0-d tensors never do: the steps of two
            # parameters may come from one place in the source, but count separately
            identity = stored if stored.spec.shape else (name, stored)
            key = self._keys.get(identity)
            if key is None:
                key = self.add_storage(stored.spec.nbytes)
                if stored.chunks:
                    self._keys[identity] = key
            return tensor_rebuild_record(stored.spec, key)

    def add_storage(self, content: int | bytes) -> str:
        """Return the key of a new storage, given its bytes or its size."""
        key = str(len(self.contents))
        self.contents[key] = content
        return key

    def _load_entry_value(self, blob: Blob) -> Any:
        """Return a value from its pickle, or from its archive of torch.save; new storages replace those there."""
        if blob.content is not None:
            return inert_pickle.load(blob.content, ANY_NAME)[0]
        if blob.wrapper:
            raise Unsupported(f"stored through the transform `{blob.wrapper}`")
        with errors_at(path=self.wanted.root / blob.path):
            self._use_budget(blob.length)
            read, length = blob_reader(self.wanted.root, blob)
            entries = read_central_directory(read, length)
            check_byte_order(read, entries)
            value, _ = inert_pickle.load(read_entry_content(read, entries, "data.pkl", limit=length), ANY_NAME)
            keys: dict[str, str] = {}
            for member in inert_pickle.walk_members(value):
                if not isinstance(member, PersistentId):
                    continue
                match member.value:
                    case ("storage", kind, str(key), *rest):
                        if key not in keys:
                            content = read_entry_content(read, entries, f"data/{key}", limit=self._room)
                            self._use_budget(len(content))
                            keys[key] = self.add_storage(content)
                        member.value = ("storage", kind, keys[key], *rest)
                    case _:
                        raise Corrupt("data.pkl refers to an object that is not a storage")
        return value

    def _use_budget(self, nbytes: int) -> None:
        self._room -= nbytes
        if self._room < 0:
            raise Unsupported(f"the entries that are not tensors need more than {_ENTRY_LIMIT} bytes")


_UTF8, _SIZES_FOLLOW = 0x0800, 0x0008  # flags: names are UTF-8; CRC and sizes follow the content
_ALIGNMENT = 64  # bytes: each content begins at a multiple of this, as torch pads
_TYPED = {name: storage for storage, name in STORAGES.items()}


@dataclass(frozen=True, slots=True)
class StorageSlot:
    """The location of a storage's bytes in the archive, and the two offsets of its CRC-32 (4 bytes each)."""

    offset: int
    length: int
    crc_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ZipTemplate:
    """An archive of `nbytes` bytes: the bytes that are known, and the slots of storages by their keys."""

    nbytes: int
    parts: tuple[Patch, ...]
    holes: Mapping[str, StorageSlot]


def make_zip_template(
    pickle: bytes,
    storages: Mapping[str, int | bytes],
    *,
    is_ordered: bool = True,
    superseded_pickle: bytes | None = None,
) -> ZipTemplate:
    """Return the archive of an object pickled as `pickle`. `storages` has the bytes of each storage, or its size.

    With `superseded_pickle`, that pickle is written first but not listed in the directory, and `pickle` is written at
    the end. So an archive that already has its data changes only at its end.

    Unless `is_ordered`, or with `superseded_pickle`, storages may be in another order than in the pickle, and torch
    must not compute their offsets from it (`.format_version` 0).
    """
    making = _ArchiveBuilder()
    making.add_entry("data.pkl", pickle if superseded_pickle is None else superseded_pickle)
    if superseded_pickle is not None:
        making.directory.clear()
        making.count = 0
    making.add_entry(".format_version", b"1" if is_ordered and superseded_pickle is None else b"0")
    making.add_entry(".storage_alignment", str(_ALIGNMENT).encode())
    making.add_entry("byteorder", b"little")
    for key, storage in storages.items():
        if isinstance(storage, int) or superseded_pickle is None:
            making.add_entry(f"data/{key}", storage)
    making.add_entry("version", b"3\n")
    if superseded_pickle is not None:
        making.add_entry("data.pkl", pickle)
        for key, storage in storages.items():
            if not isinstance(storage, int):
                making.add_entry(f"data/{key}", storage)
    return making.finish_template()


def tensor_rebuild_record(spec: Spec, key: str) -> Record:
    """Return the call that rebuilds a row-major tensor of storage `key`. Raises `Unsupported` if quantized."""
    if spec.dtype.kind == "quantized":
        raise Unsupported(f"a tensor of dtype {spec.dtype} has its scales beside its bytes", hint="drop it")
    hooks = Record(Global("collections", "OrderedDict"), ())
    strides = row_major_strides(tuple(max(1, n) for n in spec.shape))
    typed = _TYPED.get(spec.dtype.name)
    kind = Global("torch", typed) if typed else Global("torch.storage", "UntypedStorage")
    storage = PersistentId(("storage", kind, key, "cpu", spec.numel if typed else spec.nbytes))
    view = (storage, 0, spec.shape, strides, False, hooks)
    if typed:
        return Record(Global("torch._utils", "_rebuild_tensor_v2"), view)
    return Record(Global("torch._utils", "_rebuild_tensor_v3"), (*view, Global("torch", spec.dtype.name)))


class _ArchiveBuilder:
    """Builds an archive from start to end."""

    def __init__(self) -> None:
        self.parts: list[Patch] = []
        self.holes: dict[str, StorageSlot] = {}
        self.known = bytearray()  # the bytes since the last slot
        self.start = 0  # offset of `known`
        self.directory = bytearray()
        self.count = 0

    @property
    def at(self) -> int:
        return self.start + len(self.known)

    def add_entry(self, name: str, content: int | bytes) -> None:
        """Add an entry with its content, or with room for that many bytes."""
        length = content if isinstance(content, int) else len(content)
        path = f"archive/{name}".encode()
        begin, checksum = self.at, 0
        # as in torch, CRC and sizes do not follow an empty entry
        flags = _UTF8 | _SIZES_FOLLOW if length else _UTF8
        extra = b"\x01\x00\x10\x00" + length.to_bytes(8, "little") * 2 if length >= ALL_ONES else b""
        padding = -(self.at + LOCAL_HEADER.size + len(path) + len(extra) + 4) % _ALIGNMENT
        extra += b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        header = LOCAL_HEADER.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra))
        self.known += header + path + extra
        if isinstance(content, int):
            offset = self.at
            self.parts.append((self.start, bytes(self.known)))
            self.start, self.known = offset + length, bytearray()
            # the second offset is relative to the directory
            crc_offsets = (self.at + 4, len(self.directory) + 16)
            self.holes[name.removeprefix("data/")] = StorageSlot(offset, length, crc_offsets)
        else:
            checksum = crc32(content)
            self.known += content
        if length:  # torch computes the offset of the next entry, and expects no checksum behind an empty one
            sizes = Struct("<QQ" if length >= ALL_ONES else "<II")
            self.known += b"PK\x07\x08" + checksum.to_bytes(4, "little") + sizes.pack(length, length)
        wide = [value for value in (length, length, begin) if value >= ALL_ONES]
        extra = b"" if not wide else b"\x01\x00" + Struct(f"<H{len(wide)}Q").pack(8 * len(wide), *wide)
        size = min(length, ALL_ONES)
        fields = (0, 0, flags, 0, 0, 0, checksum, size, size, len(path), len(extra), 0, 0, 0, 0, min(begin, ALL_ONES))
        self.directory += DIRECTORY_RECORD.pack(b"PK\x01\x02", *fields) + path + extra
        self.count += 1

    def finish_template(self) -> ZipTemplate:
        """Return the archive, with its directory at the end, where readers look for it."""
        at, count, size = self.at, self.count, len(self.directory)
        end = at + size
        self.known += self.directory
        self.known += END64.pack(b"PK\x06\x06", END64.size - 12, 0, 45, 0, 0, count, count, size, at)
        self.known += END64_LOCATOR.pack(b"PK\x06\x07", 0, end, 1)
        few, near = min(count, 0xFFFF), min(at, ALL_ONES)
        self.known += END.pack(b"PK\x05\x06", 0, 0, few, few, min(size, ALL_ONES), near, 0)
        self.parts.append((self.start, bytes(self.known)))
        holes = {
            key: replace(hole, crc_offsets=(hole.crc_offsets[0], at + hole.crc_offsets[1]))
            for key, hole in self.holes.items()
        }
        return ZipTemplate(self.at, tuple(self.parts), holes)
