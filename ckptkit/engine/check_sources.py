"""Compare runs of source bytes with the CRC-32 recorded for them, once they have been read whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptkit.engine.ledger import Ledger, SourcePlace, place_in_run
from ckptkit.errors import Corrupt
from ckptkit.io.crc32 import tell_damage
from ckptkit.layout import Chunk, FileOffset, ReadRun
from ckptkit.layout.box import whole
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.gc_pause import collector_paused
from ckptkit.layout.plan import Copy, Plan, Target, in_order, itself

# Of a run that has other chunks too no more is read than was asked for, unless that is nearly all.
_NEARLY = 8  # the part that may be missing: one in so many bytes
_FEW = 1 << 16  # bytes that may be missing of a short one


class Sources:
    """The runs of bytes that a plan reads, and which of them have been read whole and have the CRC-32 recorded.

    A run is a chunk, or what several chunks were cut out of. With `is_all` nothing but the plan reads them: a run that
    the plan does not read whole is not compared.
    """

    @collector_paused()
    def __init__(self, plan: Plan, ledger: Ledger, *, is_all: bool = False) -> None:
        self._plan = plan
        copies = ((name_of(target, copy), copy) for target in plan.targets for copy in target.copies)
        runs = {source_place(copy): (name, copy.src) for name, copy in copies if copy.src.where is None}
        nbytes = count_read(copy for copy in plan.copies if is_all or copy.src.run is not None)
        self._waiting = {
            place: (name, chunk)
            for place, (name, chunk) in runs.items()
            if chunk.crc32 is not None and not (is_all and nbytes[place] < chunk.bytes[1])
        }
        self._read = ledger.read
        self._asked = count_asked(nbytes, runs)
        self._compared: set[SourcePlace] = set()
        self.checked_bytes = 0
        for place in [place for place, *_ in self._read if place in self._waiting]:
            self._compare_if_whole(place)

    @property
    def unchecked_bytes(self) -> int:
        """Return the bytes of what is read that have not been compared with a CRC-32."""
        return sum(self._asked.values()) - self.checked_bytes

    @property
    def unchecked(self) -> Counter[tuple[int, str]]:
        """Return the unchecked bytes by source and file, of the files that a CRC-32 is known of as a whole."""
        unchecked: Counter[tuple[int, str]] = Counter()
        for place, nbytes in self._asked.items():
            number, path, _ = place
            if nbytes and place not in self._compared and path in self._plan.sources[number].file_sums:
                unchecked[number, path] += nbytes
        return unchecked

    def compares(self, number: int, chunk: Chunk) -> bool:
        """Return whether a chunk has a recorded CRC-32 that is still to be compared with its bytes."""
        return (number, *place_of(chunk)) in self._waiting

    def records(self, number: int, chunk: Chunk) -> bool:
        """Return whether the CRC-32 of a chunk's bytes is to be compared, now or when all of its file was read."""
        return chunk.path in self._plan.sources[number].file_sums or self.compares(number, chunk)

    def note(self, pieces: Sequence[Iterable[ReadRun]]) -> None:
        """Account for what was read of each source; compare the CRC-32 of each run that is whole with this.

        Raises `Corrupt` for one that differs.
        """
        for number, found in enumerate(pieces):
            for piece in found:
                path, offset, start = place_in_run(piece.chunk, piece.start)
                place = number, path, offset
                if place in self._waiting:
                    assert piece.crc is not None, "`compares` asks for it"
                    self._read.add(place, start, piece.length, piece.crc)
                    self._compare_if_whole(place)

    def hand_over(self, shared: Ledger) -> None:
        """Enter what was read of runs with more chunks into a ledger of several reads, and compare those whole there.

        Raises `Corrupt` for one that differs.
        """
        unfinished = [place for place, (_, chunk) in self._waiting.items() if chunk.run is not None]
        for place, *piece in self._read:
            if place in unfinished:
                shared.read.add(place, *piece)
        for place in unfinished:
            self._compare_if_whole(place, shared)
            if place not in self._waiting:
                shared.read.forget(place)

    def _compare_if_whole(self, place: SourcePlace, ledger: Ledger | None = None) -> None:
        name, chunk = self._waiting[place]
        offset, length = chunk.bytes
        found = (self._read if ledger is None else ledger.read).whole(place, length)
        if found is None:
            return
        if found != chunk.crc32:
            raise Corrupt(
                tell_damage(length, offset, found, chunk.crc32),
                path=self._plan.sources[place[0]].root / chunk.path,
                tensor=name,
            )
        self.checked_bytes += self._asked[place]
        self._compared.add(place)
        del self._waiting[place]

    def unfinished(self) -> Plan:
        """Return the plan to read what is missing of the runs that have a CRC-32 and were not read whole in order.

        A run of which much was not asked for, since it has other chunks, is left.
        """
        targets = (target for place, run in self._waiting.items() for target in self._rest(place, *run))
        return replace(self._plan, targets=in_order(targets))

    def _rest(self, place: SourcePlace, name: str, chunk: Chunk) -> Iterator[Target]:
        """Yield what was not read in order of a run."""
        offset, length = chunk.bytes
        if length - self._asked[place] > max(length // _NEARLY, _FEW):
            return
        for start, missing in self._read.missing(place, length):
            part = Chunk(whole((missing,)), chunk.path, offset + start, missing, DTYPES["uint8"], run=chunk.bytes)
            yield itself(name, part, place[0])


def count_read(copies: Iterable[Copy]) -> Counter[SourcePlace]:
    """Return the bytes that copies read of each run; those that are read twice count twice."""
    nbytes: Counter[SourcePlace] = Counter()
    for copy in copies:
        if copy.src.where is None:
            nbytes[source_place(copy)] += copy.region.numel * copy.src.dtype.itemsize
    return nbytes


def count_asked(
    nbytes: Counter[SourcePlace], runs: Mapping[SourcePlace, tuple[str, Chunk]]
) -> Mapping[SourcePlace, int]:
    """Return the bytes of each run that are asked for: of a chunk by itself all, of one with others those read."""
    lengths = ((place, chunk, chunk.bytes[1]) for place, (_, chunk) in runs.items())
    return {place: length if chunk.run is None else min(length, nbytes[place]) for place, chunk, length in lengths}


def name_of(target: Target, copy: Copy) -> str:
    return target.name if target.recipe is None else target.recipe.operands[copy.operand].name


def source_place(copy: Copy) -> SourcePlace:
    """Return the source, file and offset by which the run that is read is known."""
    return copy.source, copy.src.path, copy.src.bytes[0]


def place_of(chunk: Chunk) -> FileOffset:
    """Return the file and offset by which the bytes of a chunk, or those that it was cut out of, are known."""
    return chunk.path, chunk.bytes[0]
