"""Sources: which chunks of a plan's source have been read whole, and are what their CRC-32 says. Reads no file."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ckptkit.engine.ledger import Ledger
from ckptkit.errors import Corrupt
from ckptkit.layout import Chunk, Piece, Place
from ckptkit.plan import Plan


class Sources:
    """The source chunks of a plan, and which of them have been read whole and found to have the CRC-32 recorded."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self.root = plan.src.root
        self.lock = threading.Lock()  # for whoever notes anything
        self._names = {place_of(copy.src): target.name for target in plan.targets for copy in target.copies}
        chunks = {place_of(copy.src): copy.src for copy in plan.copies}
        self._waiting = {place: chunk for place, chunk in chunks.items() if chunk.crc32 is not None}
        self._read = ledger.read
        self.unchecked_bytes = sum(chunk.length for chunk in chunks.values() if chunk.crc32 is None)
        self.checked_bytes = 0
        for place, chunk in list(self._waiting.items()):
            self._compare_if_whole(place, chunk)

    def note(self, pieces: Iterable[Piece]) -> None:
        """Account for what was read; compare the CRC-32 of each chunk that is whole with this."""
        for piece in pieces:
            place = place_of(piece.chunk)
            chunk = self._waiting.get(place)
            if chunk is not None:
                self._read.add(place, piece.start, piece.length, piece.crc)
                self._compare_if_whole(place, chunk)

    def _compare_if_whole(self, place: Place, chunk: Chunk) -> None:
        found = self._read.whole(place, chunk.length)
        if found is None:
            return
        if found != chunk.crc32:
            raise Corrupt(
                f"the {chunk.length} bytes at {chunk.offset} are damaged: "
                f"their CRC-32 is {found:08x}, recorded is {chunk.crc32:08x}",
                path=self.root / chunk.path,
                tensor=self._names[place],
                hint="the file changed after it was written: restore it from a copy, or use another checkpoint",
            )
        self.checked_bytes += chunk.length
        del self._waiting[place]

    def unfinished(self) -> list[Chunk]:
        """The chunks with a CRC-32 of which not every byte was read, or not in one piece."""
        return list(self._waiting.values())

    def forget(self, chunk: Chunk) -> None:
        """Begin a chunk anew."""
        self._read.forget(place_of(chunk))


def place_of(chunk: Chunk) -> Place:
    """What a chunk is known by."""
    return chunk.path, chunk.offset
