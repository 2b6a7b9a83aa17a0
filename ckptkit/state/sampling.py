"""Check a sample of the zip wrappers of a large checkpoint. A dry run needs sizes only, and the metadata has these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckptkit.formats import locate_all_chunks
from ckptkit.formats.archives.locate import ENVELOPE
from ckptkit.layout import Chunk, Layout

_ALL = 20_000  # zip wrappers; up to this number, all are checked
_SAMPLE = 4096  # checked zip wrappers of a larger checkpoint; as many again are the last in a file


class Checked(NamedTuple):
    """A layout, the `part` of it that was checked, that part with its byte ranges (`found`), and a remark on the rest.

    If all was checked, `layout` has its byte ranges located, and there is no remark.
    """

    layout: Layout
    part: Layout
    found: Layout
    remark: str | None = None


def locate_sample(layout: Layout) -> Checked:
    """Check all zip wrappers of a layout, or a sample if it is large.

    Raises the errors of `locate_all_chunks`. The sample includes the last wrapper of a number of files: the reader of
    the metadata has compared only file sizes.
    """
    chunks = [chunk for tensor in layout.tensors.values() for chunk in tensor.chunks if chunk.wrapper == ENVELOPE]
    if len(chunks) <= _ALL:
        located = locate_all_chunks(layout)
        return Checked(located, layout, located)
    chosen = {
        (chunk.path, chunk.offset)
        for chunk in (*evenly_spaced_chunks(last_chunk_of_each_file(chunks)), *evenly_spaced_chunks(chunks))
    }
    tensors = {
        name: replace(tensor, chunks=sampled)
        for name, tensor in layout.tensors.items()
        if (sampled := tuple(chunk for chunk in tensor.chunks if (chunk.path, chunk.offset) in chosen))
    }
    sample = replace(layout, tensors=tensors)
    remark = f"checked the headers of {len(chosen):,} of {len(chunks):,} chunks; the conversion itself checks all"
    return Checked(layout, sample, locate_all_chunks(sample), remark)


def evenly_spaced_chunks(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """Return evenly spaced chunks, as many as a sample has."""
    return chunks[:: max(1, len(chunks) // _SAMPLE)]


def last_chunk_of_each_file(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return the last chunk in each file."""
    last: dict[str, Chunk] = {}
    for chunk in chunks:
        if chunk.offset >= last.get(chunk.path, chunk).offset:
            last[chunk.path] = chunk
    return list(last.values())
