"""Compare runs of source bytes with the CRC-32 recorded for them, once they have been read whole. Reads no file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckptkit.engine.ledger import Ledger, SourcePlace, place_in_run
from ckptkit.errors import Corrupt
from ckptkit.layout import Chunk, Piece, Place
from ckptkit.plan import Copy, Plan, Target, in_order, itself
from ckptkit.tensors.box import whole
from ckptkit.tensors.dtypes import DTYPES


class Sources:
    """The runs of bytes that a plan reads, and which of them have been read whole and have the CRC-32 recorded.

    A run is a chunk, or what several chunks were cut out of.
    """

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        runs = {source_place(copy): (target.name, copy.src) for target in plan.targets for copy in target.copies}
        self._waiting = {place: run for place, run in runs.items() if run[1].crc32 is not None}
        self._read = ledger.read
        self.unchecked_bytes = sum(chunk.bytes[1] for _, chunk in runs.values() if chunk.crc32 is None)
        self.checked_bytes = 0
        for place in [place for place, *_ in self._read if place in self._waiting]:
            self._compare_if_whole(place)

    def note(self, pieces: Sequence[Iterable[Piece]]) -> None:
        """Account for what was read of each source; compare the CRC-32 of each run that is whole with this.

        Raises `Corrupt` for one that differs.
        """
        for number, found in enumerate(pieces):
            for piece in found:
                path, offset, start = place_in_run(piece.chunk, piece.start)
                place = number, path, offset
                if place in self._waiting:
                    self._read.add(place, start, piece.length, piece.crc)
                    self._compare_if_whole(place)

    def _compare_if_whole(self, place: SourcePlace) -> None:
        name, chunk = self._waiting[place]
        offset, length = chunk.bytes
        found = self._read.whole(place, length)
        if found is None:
            return
        if found != chunk.crc32:
            raise Corrupt(
                f"the {length} bytes at {offset} are damaged: "
                f"their CRC-32 is {found:08x}, recorded is {chunk.crc32:08x}",
                path=self._plan.sources[place[0]].root / chunk.path,
                tensor=name,
                hint="the file changed after it was written: restore it from a copy, or use another checkpoint",
            )
        self.checked_bytes += length
        del self._waiting[place]

    def unfinished(self) -> Plan:
        """Return the plan to read what is missing of the runs that have a CRC-32 and were not read whole in order."""
        targets = (target for place, run in self._waiting.items() for target in self._rest(place, *run))
        return replace(self._plan, targets=in_order(targets), combination=None)

    def _rest(self, place: SourcePlace, name: str, chunk: Chunk) -> Iterator[Target]:
        """Yield what was not read in order of a run."""
        offset, length = chunk.bytes
        for start, stop in self._read.gaps(place, length):
            box = whole((stop - start,))
            part = Chunk(box, chunk.path, offset + start, stop - start, DTYPES["uint8"], run=chunk.bytes)
            yield itself(name, part, place[0])


def source_place(copy: Copy) -> SourcePlace:
    """Return the source, file and offset by which the run that is read is known."""
    return copy.source, copy.src.path, copy.src.bytes[0]


def place_of(chunk: Chunk) -> Place:
    """Return the file and offset by which the bytes of a chunk, or those that it was cut out of, are known."""
    return chunk.path, chunk.bytes[0]
