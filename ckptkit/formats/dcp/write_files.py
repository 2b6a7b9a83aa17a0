"""Write a DCP directory: a data file for each rank, the metadata, and the checksums once the data is there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptkit.formats.dcp.read_metadata import METADATA, name_data
from ckptkit.formats.dcp.shards import KnownBytes, ShardItem, crc_at, end_of, items_per_rank
from ckptkit.formats.dcp.write_metadata import pickled_metadata
from ckptkit.layout import FileOffset, Layout, NewFile, Patch, Spec, WriterOptions


def arrange(wanted: Layout, options: WriterOptions) -> tuple[NewFile, ...]:
    """Return a file for each of `options.world_size` ranks, with its items and room for data; and the metadata."""
    files = items_by_file(wanted, options)
    metadata = pickled_metadata(wanted, files)
    data = (NewFile(name, end_of(items), KnownBytes(items)) for name, items in files.items())
    return *data, NewFile(METADATA, len(metadata), ((0, metadata),))


def embed(wanted: Layout, options: WriterOptions) -> Iterator[tuple[str, Patch]]:
    """Yield the metadata, updated with non-tensor entries that are stored in further files."""
    files = items_by_file(replace(wanted, blobs={}), options)
    for name, blob in wanted.blobs.items():
        files.setdefault(blob.path, []).append(ShardItem(name, None, blob.offset, blob.length, None))
    yield METADATA, (0, pickled_metadata(wanted, files))


def checksum_places(made: Layout) -> Iterator[tuple[FileOffset, int]]:
    """Yield both offsets of each item's CRC-32."""
    for tensor in made.tensors.values():
        for chunk in tensor.chunks:
            if chunk.length:
                places = crc_at(Spec(chunk.dtype, chunk.size), chunk.offset)
                yield from (((chunk.path, chunk.offset), at) for at in places)


def items_by_file(wanted: Layout, options: WriterOptions) -> dict[str, list[ShardItem]]:
    return {name_data(rank, 0): items for rank, items in enumerate(items_per_rank(wanted, options.world_size))}
