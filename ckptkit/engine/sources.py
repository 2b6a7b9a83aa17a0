"""Compare source chunks with the CRC-32 recorded for them, once they have been read whole. Reads no file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckptkit.engine.ledger import Ledger, SourcePlace
from ckptkit.errors import Corrupt
from ckptkit.layout import Chunk, Piece, Place
from ckptkit.plan import Copy, Plan, as_bytes, in_order, itself


class Sources:
    """The source chunks of a plan, and which of them have been read whole and found to have the CRC-32 recorded."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        self._names = {source_place(copy): target.name for target in plan.targets for copy in target.copies}
        chunks = {source_place(copy): copy.src for copy in plan.copies}
        self._waiting = {place: chunk for place, chunk in chunks.items() if chunk.crc32 is not None}
        self._read = ledger.read
        self.unchecked_bytes = sum(chunk.length for chunk in chunks.values() if chunk.crc32 is None)
        self.checked_bytes = 0
        for place, chunk in list(self._waiting.items()):
            self._compare_if_whole(place, chunk)

    def note(self, pieces: Sequence[Iterable[Piece]]) -> None:
        """Account for what was read of each source; compare the CRC-32 of each chunk that is whole with this.

        Raises `Corrupt` for one that differs.
        """
        for number, found in enumerate(pieces):
            for piece in found:
                place = number, piece.chunk.path, piece.chunk.offset
                chunk = self._waiting.get(place)
                if chunk is not None:
                    self._read.add(place, piece.start, piece.length, piece.crc)
                    self._compare_if_whole(place, chunk)

    def _compare_if_whole(self, place: SourcePlace, chunk: Chunk) -> None:
        found = self._read.whole(place, chunk.length)
        if found is None:
            return
        if found != chunk.crc32:
            raise Corrupt(
                f"the {chunk.length} bytes at {chunk.offset} are damaged: "
                f"their CRC-32 is {found:08x}, recorded is {chunk.crc32:08x}",
                path=self._plan.sources[place[0]].root / chunk.path,
                tensor=self._names[place],
                hint="the file changed after it was written: restore it from a copy, or use another checkpoint",
            )
        self.checked_bytes += chunk.length
        del self._waiting[place]

    def unfinished(self) -> Plan:
        """Return the plan to read those chunks from end to end that have a CRC-32 and were not read whole in order."""
        targets = (itself(self._names[place], as_bytes(chunk), place[0]) for place, chunk in self._waiting.items())
        return replace(self._plan, targets=in_order(targets), combination=None)


def source_place(copy: Copy) -> SourcePlace:
    """Return the source, file and offset by which the chunk that is read is known."""
    return copy.source, copy.src.path, copy.src.offset


def place_of(chunk: Chunk) -> Place:
    """Return the file and offset by which a chunk is known."""
    return chunk.path, chunk.offset
