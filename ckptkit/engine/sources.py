"""Compare source chunks with the CRC-32 recorded for them, once they have been read whole. Reads no file.

Many chunks may lie in one storage that has a CRC-32: it is compared when all of it was read, or nearly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckptkit.engine.ledger import Ledger, SourcePlace, checked_place
from ckptkit.errors import Corrupt
from ckptkit.layout import Chunk, Piece, Place, Storage
from ckptkit.plan import Copy, Plan, as_bytes, in_order, itself

# Of a storage no more is read than was asked for, unless that is nearly all: an eighth may be lacking, or few bytes.
_PART, _FEW = 8, 1 << 16


class Sources:
    """The source chunks of a plan, and which of them have been read whole and found to have the CRC-32 recorded."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        chunks = {(copy.source, copy.src.path, copy.src.offset): copy for copy in plan.copies}
        self._names = {source_place(copy): target.name for target in plan.targets for copy in target.copies}
        self._nbytes: Counter[SourcePlace] = Counter()
        self._waiting: dict[SourcePlace, Chunk] = {}
        for copy in chunks.values():
            self._nbytes[source_place(copy)] += copy.src.length
            if copy.src.checked_as is not None:
                self._waiting[source_place(copy)] = copy.src
        self._read = ledger.read
        self.checked_bytes = 0
        for place, chunk in list(self._waiting.items()):
            self._compare_if_whole(place, chunk)

    @property
    def unchecked_bytes(self) -> int:
        """Return the bytes of all chunks that have not been compared with a CRC-32."""
        return sum(self._nbytes.values()) - self.checked_bytes

    def note(self, pieces: Sequence[Iterable[Piece]]) -> None:
        """Account for what was read of each source; compare the CRC-32 of what is whole with this.

        Raises `Corrupt` for one that differs.
        """
        for number, found in enumerate(pieces):
            for piece in found:
                place = checked_place(number, piece.chunk)
                chunk = self._waiting.get(place)
                if chunk is not None:
                    start = piece.chunk.offset + piece.start - place[2]
                    self._read.add(place, start, piece.length, piece.crc)
                    self._compare_if_whole(place, chunk)

    def _compare_if_whole(self, place: SourcePlace, chunk: Chunk) -> None:
        whole = checked(chunk)
        found = self._read.whole(place, whole.length)
        if found is None:
            return
        if found != whole.crc32:
            raise Corrupt(
                f"the {whole.length} bytes at {whole.offset} are damaged: "
                f"their CRC-32 is {found:08x}, recorded is {whole.crc32:08x}",
                path=self._plan.sources[place[0]].root / chunk.path,
                tensor=self._names[place],
                hint="the file changed after it was written: restore it from a copy, or use another checkpoint",
            )
        self.checked_bytes += self._nbytes[place]
        del self._waiting[place]

    def unfinished(self) -> Plan:
        """Return the plan to read what is lacking of each chunk that has a CRC-32 and was not read whole in order.

        Of a storage of which much is lacking that is not asked for.
        """
        targets = [
            itself(self._names[place], part, place[0])
            for place, chunk in self._waiting.items()
            for part in self._lacking(place, chunk)
        ]
        return replace(self._plan, targets=in_order(targets), combination=None)

    def _lacking(self, place: SourcePlace, chunk: Chunk) -> Iterator[Chunk]:
        whole = checked(chunk)
        gaps = list(self._read.missing(place, whole.length))
        lacking = sum(length for _, length in gaps)
        if chunk.crc32 is None and lacking > max(whole.length // _PART, _FEW):
            return
        for start, length in gaps:
            part = chunk._replace(offset=whole.offset + start, length=length, crc32=None, storage=whole)
            yield as_bytes(part)


def checked(chunk: Chunk) -> Storage:
    """Return the bytes over which a chunk's CRC-32 was taken."""
    whole = chunk.checked_as
    assert whole is not None
    return whole


def source_place(copy: Copy) -> SourcePlace:
    """Return the source, file and offset by which the bytes are known that a chunk is compared with."""
    return checked_place(copy.source, copy.src)


def place_of(chunk: Chunk) -> Place:
    """Return the file and offset by which a chunk is known."""
    return chunk.path, chunk.offset
