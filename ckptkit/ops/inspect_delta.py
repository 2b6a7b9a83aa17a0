"""Describe a delta without reading its data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptkit.deltas.chain import short
from ckptkit.deltas.find import is_any_byte_delta
from ckptkit.deltas.open_bytes import open_byte_delta
from ckptkit.deltas.open_delta import open_delta
from ckptkit.deltas.record import FORMAT, DeltaRecord
from ckptkit.files.path import to_path
from ckptkit.pictures.numbers import format_bytes, per_cent
from ckptkit.pictures.words import count
from ckptkit.summary import Summarized


@dataclass(frozen=True, slots=True)
class InspectedDelta(Summarized):
    """A delta at a glance: what it says of itself, and the bytes that it holds of tensors."""

    path: Path
    format: str
    record: DeltaRecord
    nbytes: int

    def summary(self) -> Iterator[str]:
        record = self.record
        yield f"{self.path}: {self.format}, from {short(record.base)} to {short(record.new)}"
        changed = len(record.tensors)
        every = count(changed + record.unchanged, "tensor")
        yield f"{per_cent(record.density)} of the elements changed, in {changed:,} of {every}"
        share = per_cent(self.nbytes / record.nbytes) if record.nbytes else "none"
        yield f"{format_bytes(self.nbytes)}, {share} of the model's {format_bytes(record.nbytes)}"


@dataclass(frozen=True, slots=True)
class InspectedByteDelta(Summarized):
    """A delta of bytes at a glance: the versions that it leads from and to, and the bytes of what it holds."""

    path: Path
    format: str
    version: int
    base_version: int
    encoding: str
    checksums: tuple[str, ...]
    tensors: tuple[str, ...]
    nbytes: int

    def summary(self) -> Iterator[str]:
        yield f"{self.path}: {self.format}, from version {self.base_version} to {self.version}"
        yield f"{count(len(self.tensors), 'tensor')}, {format_bytes(self.nbytes)}, {self.encoding} with zstd"
        yield f"digests: {', '.join(self.checksums) or 'none'}"


def inspect_delta(path: str | Path) -> InspectedDelta | InspectedByteDelta:
    """Return what the delta in a directory contains, in any format that ckptkit applies.

    Raises `Incomplete` if it is not finished, `Corrupt` if its files do not fit together.
    """
    place = to_path(path)
    if is_any_byte_delta(place):
        found = open_byte_delta(place)
        checksums = tuple(sorted({tensor.algorithm for tensor in found.tensors.values()}))
        names = found.path, found.format, found.version, found.base_version, found.encoding
        return InspectedByteDelta(*names, checksums, tuple(found.tensors), found.nbytes)
    delta = open_delta(place)
    return InspectedDelta(delta.path, FORMAT, delta.record, delta.nbytes)
