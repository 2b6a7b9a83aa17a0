"""Compare the copies of a tensor that several ranks saved. Copies that differ do not belong to one tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ckptkit.engine.compare import row_major_checksums
from ckptkit.errors import Corrupt, Report
from ckptkit.formats import locate_all_chunks
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.box import full_box
from ckptkit.layout.edits import select_entries

_HINT = "restore the files of one save, or pass --salvage to write the replica of the lowest rank"


class Pair(NamedTuple):
    """Two chunks of tensor `name` with the same elements: the chosen one, and a copy that another rank saved."""

    name: str
    chosen: Chunk
    copy: Chunk


def check_replicas(layout: Layout, report: Report, *, with_bytes: bool = True) -> None:
    """Report as `Corrupt` each tensor for which two ranks saved different bytes of the same elements.

    Compares the CRC-32 that the files record. Reads the bytes of copies without one, unless `with_bytes` is false.
    """
    reported: set[str] = set()
    for name, chosen, copy in find_differing_copies(layout, report, with_bytes=with_bytes):
        if name in reported:
            continue
        reported.add(name)
        start = f" at {list(copy.start)}" if any(copy.start) else ""
        message = f"the bytes differ from the replica in `{copy.path}`{start}"
        report(Corrupt(message, path=layout.root / chosen.path, tensor=name, hint=_HINT))


def find_differing_copies(layout: Layout, report: Report, *, with_bytes: bool = True) -> list[Pair]:
    """Return the spare chunks that differ from the chosen chunks. Reports chunks whose archive is damaged."""
    pairs: dict[str, Pair] = {}
    for name, copies in layout.spares.items():
        chosen = {chunk.box: chunk for chunk in layout.tensors[name].chunks} if name in layout.tensors else {}
        for copy in copies:
            own = chosen.get(copy.box)
            if own is not None and own.is_in_file and copy.is_in_file and copy.box.numel:
                pairs[str(len(pairs))] = Pair(name, own, copy)
    ours = locate_all_chunks(chunks_as_tensors(layout, {label: pair.chosen for label, pair in pairs.items()}), report)
    theirs = locate_all_chunks(chunks_as_tensors(layout, {label: pair.copy for label, pair in pairs.items()}), report)
    unknown = []
    different = []
    for label in pairs:
        one, other = (side.tensors[label].chunks[0] for side in (ours, theirs))
        if not (one.where is None is other.where):
            continue
        is_equal = have_equal_checksums(one, other)
        if is_equal is None:
            unknown.append(label)
        elif not is_equal:
            different.append(label)
    if unknown and with_bytes:
        our_sums, their_sums = (
            row_major_checksums(select_entries(side, set(unknown).__contains__)) for side in (ours, theirs)
        )
        different += [label for label in unknown if our_sums[label] != their_sums[label]]
    return [pairs[label] for label in sorted(different, key=int)]


def chunks_as_tensors(layout: Layout, chunks: dict[str, Chunk]) -> Layout:
    """Return a layout in which each chunk is a tensor of its own."""
    tensors = {
        label: StoredTensor(Spec(chunk.dtype, chunk.size), (chunk._replace(box=full_box(chunk.size)),))
        for label, chunk in chunks.items()
    }
    return replace(layout, tensors=tensors, blobs={}, keys={}, twins={}, spares={})


def have_equal_checksums(one: Chunk, other: Chunk) -> bool | None:
    """Return whether two located chunks are equal by their CRC-32; None if the checksums cannot decide it."""
    if None in (one.crc32, other.crc32):
        return None
    places = [
        (chunk.strides, chunk.length, chunk.offset - chunk.checksummed_range[0], chunk.checksummed_range[1])
        for chunk in (one, other)
    ]
    if places[0] != places[1]:
        return None
    if one.crc32 == other.crc32:
        return True
    return False if one.run is None else None
