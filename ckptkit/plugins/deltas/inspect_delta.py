"""Summarize a delta without reading its data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptkit.io.path import to_path
from ckptkit.plugins.deltas.chain import short_id
from ckptkit.plugins.deltas.open_delta import open_delta
from ckptkit.plugins.deltas.record import FORMAT, DeltaRecord
from ckptkit.summary import Summarized


@dataclass(frozen=True, slots=True)
class InspectedDelta(Summarized):
    """A summary of a delta: its `delta.json`, and the bytes of tensor data that it contains."""

    path: Path
    format: str
    record: DeltaRecord
    nbytes: int

    def summary(self) -> Iterator[str]:
        yield f"{self.path}: {self.format}, from {short_id(self.record.base)} to {short_id(self.record.new)}"
        yield from self.record.summary(self.nbytes)


def inspect_delta(path: str | Path) -> InspectedDelta:
    """Return a summary of the delta in directory `path`.

    Raises `Incomplete` if it is not finished, `Corrupt` if its files do not fit together.
    """
    delta = open_delta(to_path(path))
    return InspectedDelta(delta.path, FORMAT, delta.record, delta.nbytes)
