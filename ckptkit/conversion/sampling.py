"""Check a sample of the envelopes of a large checkpoint: a dry run needs sizes, which the metadata have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ckptkit.formats import locate
from ckptkit.formats.archives.locate import ENVELOPE
from ckptkit.layout import Chunk, FileOffset, Layout

_ALL = 20_000  # envelopes that are all opened
_SAMPLE = 4096  # of more envelopes, those that are opened beside the last one of each file


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

    Raises what `locate` raises. The last envelope of each file is in the sample, so a file that is missing or truncated
    is found.
    """
    places = [
        (chunk.path, chunk.offset)
        for tensor in layout.tensors.values()
        for chunk in tensor.chunks
        if chunk.wrapper == ENVELOPE
    ]
    if len(places) <= _ALL:
        found = locate(layout)
        return Checked(found, layout, found)
    chosen = {*last_in_files(places), *places[:: len(places) // _SAMPLE]}

    def is_chosen(chunk: Chunk) -> bool:
        return chunk.wrapper != ENVELOPE or (chunk.path, chunk.offset) in chosen

    tensors = {
        name: replace(tensor, chunks=some)
        for name, tensor in layout.tensors.items()
        if (some := tuple(filter(is_chosen, tensor.chunks)))
    }
    sample = replace(layout, tensors=tensors)
    remark = f"checked the headers of {len(chosen):,} of {len(places):,} chunks; the conversion itself checks all"
    return Checked(layout, sample, locate(sample), remark)


def last_in_files(places: Iterable[FileOffset]) -> Iterable[FileOffset]:
    """Return the last place in each file."""
    last: dict[str, int] = {}
    for path, offset in places:
        last[path] = max(offset, last.get(path, offset))
    return last.items()
