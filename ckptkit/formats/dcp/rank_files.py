"""Lay out the files that each rank writes by itself, one item after the other, as torch's FileSystemWriter does.

Source: torch/distributed/checkpoint/filesystem.py. An item is an archive of torch.save, whose CRC-32 follows the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckptkit.errors import CkptError
from ckptkit.formats.archives.write_archive import Envelope
from ckptkit.formats.dcp.read_metadata import METADATA, name_data
from ckptkit.formats.dcp.shards import ShardItem, append, end_of, wrap
from ckptkit.formats.dcp.write_metadata import record
from ckptkit.io.crc32 import combine, crc32
from ckptkit.layout import Blob, Layout, Spec
from ckptkit.layout.box import Box

__all__ = [
    "METADATA",
    "ShardItem",
    "describe_files",
    "end_of",
    "entries_file",
    "lay_out",
    "parts_around",
    "sum_items",
    "tensors_file",
]


def tensors_file(rank: int) -> str:
    """Return the name of the file with a rank's shards, whose size is known before the data is there."""
    return name_data(rank, 0)


def entries_file(rank: int) -> str:
    """Return the name of the file with a rank's entries that are no tensors."""
    return name_data(rank, 1)


def lay_out(shards: Iterable[tuple[str, Spec, Box]]) -> list[ShardItem]:
    """Return the items of a file that has these boxes of tensors. Raises `Unsupported` for a quantized dtype."""
    items: list[ShardItem] = []
    for name, spec, box in shards:
        try:
            envelope = wrap(Spec(spec.dtype, box.size))
        except CkptError as error:
            raise error.blame(tensor=name) from None
        append(items, name, box, envelope.nbytes, envelope)
    return items


def parts_around(envelope: Envelope, checksum: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after the data of a tensor, which has this CRC-32; the first do not depend on it."""
    (_, head), (start, known) = envelope.parts
    (hole,) = envelope.holes.values()
    tail = bytearray(known)
    for at in hole.crc_at:
        tail[at - start : at - start + 4] = checksum.to_bytes(4, "little")
    return head, bytes(tail)


def sum_items(items: Iterable[ShardItem], checksums: Mapping[int, int]) -> int:
    """Return the CRC-32 of a file made of items, from that of the data of each tensor, by the offset of its item."""
    total = 0
    for item in items:
        assert item.envelope is not None
        checksum = checksums[item.offset]
        head, tail = parts_around(item.envelope, checksum)
        total = crc32(head, total)
        total = combine(total, checksum, item.nbytes - len(head) - len(tail))
        total = crc32(tail, total)
    return total


def describe_files(wanted: Layout, files: Mapping[str, list[ShardItem]], blobs: Mapping[str, Blob]) -> bytes:
    """Return the metadata of a checkpoint whose files have these items, and that has these entries in further files."""
    placed = {name: list(items) for name, items in files.items()}
    for name, blob in blobs.items():
        placed.setdefault(blob.path, []).append(ShardItem(name, None, blob.offset, blob.length, None))
    return record(replace(wanted, blobs=blobs), placed)
