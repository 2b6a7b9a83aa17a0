"""Check a sample of the envelopes of a large checkpoint: a dry run needs sizes, which the metadata have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckptkit.formats import locate
from ckptkit.formats.archives.locate import ENVELOPE
from ckptkit.layout import Chunk, Layout

_ALL = 20_000  # envelopes that are all opened
_SAMPLE = 4096  # of more envelopes, those that are opened, and as many that are the last of a file


class Checked(NamedTuple):
    """A layout, the `part` of it that was checked, the same part with its bytes `found`, and a remark if not all was.

    If all was checked, `layout` has its bytes found.
    """

    layout: Layout
    part: Layout
    found: Layout
    remark: str | None = None


def locate_sample(layout: Layout) -> Checked:
    """Check all envelopes of a layout, or a sample of a large one.

    Raises what `locate` raises. The last envelope of a file is in the sample, of so many files as the sample is large:
    the reader of the metadata has compared the sizes of all files.
    """
    chunks = [chunk for tensor in layout.tensors.values() for chunk in tensor.chunks if chunk.wrapper == ENVELOPE]
    if len(chunks) <= _ALL:
        found = locate(layout)
        return Checked(found, layout, found)
    chosen = {(chunk.path, chunk.offset) for chunk in (*spread(last_in_files(chunks)), *spread(chunks))}
    tensors = {
        name: replace(tensor, chunks=some)
        for name, tensor in layout.tensors.items()
        if (some := tuple(chunk for chunk in tensor.chunks if (chunk.path, chunk.offset) in chosen))
    }
    sample = replace(layout, tensors=tensors)
    remark = f"checked the headers of {len(chosen):,} of {len(chunks):,} chunks; the conversion itself checks all"
    return Checked(layout, sample, locate(sample), remark)


def spread(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """Return every n-th of some chunks, as many as a sample has."""
    return chunks[:: max(1, len(chunks) // _SAMPLE)]


def last_in_files(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return the last chunk in each file."""
    last: dict[str, Chunk] = {}
    for chunk in chunks:
        if chunk.offset >= last.get(chunk.path, chunk).offset:
            last[chunk.path] = chunk
    return list(last.values())
