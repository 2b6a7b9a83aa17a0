"""Collect the damage of a checkpoint and what replaces it, and list both for the account."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.checkpoints.account import Filled, Lost
from ckptkit.layout import Chunk, Fault, Layout, StoredTensor
from ckptkit.layout.box import whole


@dataclass(slots=True)
class Faults:
    """The damage of a checkpoint apart from its lost chunks, each of which has its own fault, and what replaces it.

    `entries` are the lost entries that are not tensors, `unplaced` the tensors whose shape is unknown, both by their
    names in the checkpoint. `unnamed` are faults of files whose contents nothing tells, and `places` the paths of parts
    that cannot be read at all. `filled` are the absolute paths of chunks that were taken from elsewhere, each with a
    description of the source; no other chunks have absolute paths. `repaired` are names of tensors that have another
    copy of the same bytes. `described_by` is the checkpoint whose metadata describes the files, if
    their own is missing.
    """

    entries: dict[str, Fault] = field(default_factory=dict)
    unplaced: dict[str, Fault] = field(default_factory=dict)
    unnamed: list[Fault] = field(default_factory=list)
    places: list[Path] = field(default_factory=list)
    filled: dict[str, str] = field(default_factory=dict)
    filled_entries: dict[str, str] = field(default_factory=dict)
    repaired: dict[str, None] = field(default_factory=dict)
    described_by: Path | None = None

    def note_filled(self, chunks: Iterable[Chunk], source: str) -> None:
        """Note that chunks were taken from elsewhere."""
        self.filled.update((chunk.path, source) for chunk in chunks if chunk.is_in_file)


def lost_tensors(tensors: Mapping[str, StoredTensor]) -> Iterator[Lost]:
    """Yield an entry of the account for each tensor that has lost chunks."""
    for name, tensor in tensors.items():
        gone = [(chunk.box, chunk.where) for chunk in tensor.chunks if isinstance(chunk.where, Fault)]
        if gone:
            fault, spec = gone[0][1], tensor.spec
            boxes = () if tensor.splits else tuple(sorted(box for box, _ in gone))
            is_all = boxes == (whole(spec.shape),)
            yield Lost(name, fault.why, fault.path, () if is_all else boxes, spec.shape, spec.nbytes)


def lost_entries(entries: Iterable[tuple[str, Fault]]) -> Iterator[Lost]:
    """Yield an entry of the account for everything without a shape: entries that are not tensors, unknown contents."""
    for name, fault in entries:
        yield Lost(name, fault.why, fault.path)


def filled_tensors(layout: Layout, faults: Faults) -> Iterator[Filled]:
    """Yield an entry of the account for each tensor with bytes from elsewhere."""
    for name, tensor in layout.tensors.items() if faults.filled else ():
        taken = [chunk for chunk in tensor.chunks if chunk.path in faults.filled]
        if taken:
            before, after = taken[0].dtype, tensor.spec.dtype
            cast = f"{before} => {after}" if before != after else ""
            yield Filled(name, faults.filled[taken[0].path], cast)
