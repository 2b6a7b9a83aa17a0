"""Seal the files of ranks: copy what several ranks have alike from the one that was written, and write checksums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptkit.files.file import Opened, read_at
from ckptkit.formats.archives.state_files import entries_of, opened
from ckptkit.formats.archives.zip_entries import Entry
from ckptkit.formats.shards.held import RankFile
from ckptkit.layout import Chunk, FileOffset, Patch
from ckptkit.tensors.box import Box

_PIECE = 1 << 20  # bytes copied at once


def seal_files(
    root: Path, files: list[list[RankFile]], checksums: Mapping[FileOffset, int]
) -> Iterator[tuple[str, Patch]]:
    """Yield what is to be written, by file: copies, and the CRC-32 of each storage in both of its places.

    `files` are those of all ranks by kind, as they can be read now.
    """
    with Opened(root) as sources:
        for of_kind in files:
            written = written_in(of_kind, checksums)
            for file in of_kind:
                entries = entries_in(root, file.name)
                for name, chunk in chunks_in(file):
                    yield from seal_chunk(chunk, written[name, chunk.box], checksums, entries, sources)


def written_in(files: list[RankFile], checksums: Mapping[FileOffset, int]) -> dict[tuple[str, Box], Chunk]:
    """Return, by name and box, the chunks that were filled with data."""
    return {
        (name, chunk.box): chunk
        for file in files
        for name, chunk in chunks_in(file)
        if (chunk.path, chunk.offset) in checksums
    }


def chunks_in(file: RankFile) -> Iterator[tuple[str, Chunk]]:
    """Yield the chunks with bytes that a rank holds, with their names in its file."""
    for name, tensor in file.flat.tensors.items():
        for chunk in tensor.chunks:
            if chunk.length:
                yield name, chunk


def entries_in(root: Path, name: str) -> dict[int, Entry]:
    with opened(root / name) as (read, length):
        return {entry.offset: entry for entry in entries_of(read, length).values() if entry.length}


def seal_chunk(
    chunk: Chunk, source: Chunk, checksums: Mapping[FileOffset, int], entries: Mapping[int, Entry], sources: Opened
) -> Iterator[tuple[str, Patch]]:
    """Yield the bytes of a chunk, if they are still missing, and its CRC-32."""
    if chunk is not source and (chunk.path, chunk.offset) != (source.path, source.offset):
        for at in range(0, chunk.length, _PIECE):
            size = min(_PIECE, chunk.length - at)
            yield chunk.path, (chunk.offset + at, read_at(sources[source.path], size, source.offset + at))
    content = checksums[source.path, source.offset].to_bytes(4, "little")
    yield from ((chunk.path, (at, content)) for at in entries[chunk.offset].crc_at)
