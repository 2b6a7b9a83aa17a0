"""Pieces that come in any order from several threads leave in the order of their files, in bounded memory."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.engine.visit import Step, process_units
from ckptkit.errors import Corrupt, IOFailure
from ckptkit.io import pieces
from ckptkit.io.assembly import Assembly, PendingBytes
from ckptkit.io.crc32 import crc32
from ckptkit.io.pieces import FilePiece, OrderedWriter, cut_into_pieces

_ENOUGH = 60  # seconds, after which a thread that waits is taken for one that waits forever


class Streams:
    """What a store gets: a stream for each file. `most` is how many bytes were ever held by those that take turns."""

    def __init__(self, room: int, fails_at: int | None = None) -> None:
        self.turns = OrderedWriter(self.write, room)
        self.files: dict[str, bytearray] = defaultdict(bytearray)
        self.most = 0
        self._writing: set[str] = set()
        self._left = fails_at

    def write(self, piece: FilePiece, data: memoryview) -> None:
        """Add a piece to its file."""
        assert piece.name not in self._writing
        self._writing.add(piece.name)
        assert len(self.files[piece.name]) == piece.start
        threading.Event().wait(0.0001)
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise IOFailure("the stream broke")
        self.files[piece.name] += data
        self._writing.remove(piece.name)
        self.most = max(self.most, self.turns._held)

    def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
        assert crc == crc32(data)
        self.turns.put(piece, data)

    def stop(self, error: BaseException) -> None:
        self.turns.stop(error)


def in_time(task: threading.Thread) -> None:
    """Run a thread, which has to end."""
    task.daemon = True
    task.start()
    task.join(_ENOUGH)
    assert not task.is_alive(), "the threads wait for each other"


def cut_pieces(sizes: list[int]) -> list[FilePiece]:
    return [piece for number, size in enumerate(sizes) for piece in cut_into_pieces(f"{number}", size)]


def content_of(piece: FilePiece) -> memoryview:
    return memoryview(Random(repr(piece.key)).randbytes(piece.length))


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PART_BYTES", 8)
        patch.setattr(pieces, "_MIB", 1)
        yield


@given(
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    jobs=st.integers(1, 8),
    room=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_pieces_leave_in_order(sizes: list[int], jobs: int, room: int, seed: int) -> None:
    streams, delays = Streams(room), Random(seed)

    @contextmanager
    def worker() -> Iterator[Step[FilePiece]]:
        def step(piece: FilePiece) -> None:
            threading.Event().wait(delays.choice((0, 0, 0.0005, 0.002)))
            data = content_of(piece)
            streams.put(piece, data, crc32(data))

        yield step

    in_time(threading.Thread(target=process_units, args=(cut_pieces(sizes), worker, jobs)))
    assert len(streams.files) == len(sizes)
    assert streams.files == {
        f"{number}": b"".join(content_of(piece) for piece in cut_into_pieces(f"{number}", size))
        for number, size in enumerate(sizes)
    }
    assert streams.most <= room


@given(jobs=st.integers(1, 8), room=st.integers(0, 40), at=st.integers(0, 30), is_stream=st.booleans())
def test_an_error_of_one_thread_or_of_the_stream_ends_all(jobs: int, room: int, at: int, is_stream: bool) -> None:
    streams = Streams(room, at if is_stream else None)
    raised: list[BaseException] = []

    @contextmanager
    def worker() -> Iterator[Step[FilePiece]]:
        def step(piece: FilePiece) -> None:
            if not is_stream and piece.number == at + 1:
                threading.Event().wait(0.001)
                raise Corrupt("the source is damaged")
            data = content_of(piece)
            streams.put(piece, data, crc32(data))

        try:
            yield step
        except BaseException as error:
            streams.stop(error)
            raise

    def run() -> None:
        try:
            process_units(cut_pieces([300]), worker, jobs)
        except (Corrupt, IOFailure) as error:
            raised.append(error)

    in_time(threading.Thread(target=run))
    assert [type(error) for error in raised] == [IOFailure if is_stream else Corrupt]
    late = FilePiece("late", 1, 1, 0, 1)
    with pytest.raises(type(raised[0])):
        streams.turns.put(late, memoryview(bytes(1)))


@given(
    runs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60), st.booleans()), min_size=1, max_size=6),
    tail=st.integers(0, 40),
    jobs=st.integers(1, 8),
    room=st.integers(0, 20),
)
def test_files_with_known_bytes_are_put_together_in_order(
    runs: list[tuple[int, int, bool]], tail: int, jobs: int, room: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each run is so many known bytes and then so many that come, behind which their CRC-32 may stand."""
    folder = tmp_path_factory.mktemp("room")
    known, whole = bytearray(), bytearray()
    gaps: dict[tuple[str, int], PendingBytes] = {}
    for before, nbytes, has_sum in runs:
        filler = Random(len(whole)).randbytes(before)
        data = Random(-len(whole)).randbytes(nbytes)
        known += filler + bytes(nbytes)
        whole += filler
        if nbytes:
            gaps["x", len(whole)] = PendingBytes(nbytes, [len(whole) + nbytes] if has_sum else [])
        whole += data
        if nbytes and has_sum:
            known += bytes(4)
            whole += crc32(data).to_bytes(4, "little")
    known += bytes(range(tail))
    whole += bytes(range(tail))
    (folder / "x").write_bytes(known)
    streams = Streams(room)
    assembly = Assembly(folder, {"x": len(whole)}, gaps, streams)
    steps = [
        (offset, at, min(5, gap.nbytes - at)) for (_, offset), gap in gaps.items() for at in range(0, gap.nbytes, 5)
    ]

    @contextmanager
    def worker() -> Iterator[Step[tuple[int, int, int]]]:
        def step(place: tuple[int, int, int]) -> None:
            offset, at, nbytes = place
            data = memoryview(whole)[offset + at : offset + at + nbytes]
            output = assembly.directory_writer("")
            output["x"].write_at(data, offset + at)
            output.record_written("x", offset, at, nbytes, crc32(data))

        yield step

    in_time(threading.Thread(target=process_units, args=(steps, worker, jobs)))
    if gaps:
        last = max(offset + gap.nbytes + (4 if gap.crc_offsets else 0) for (_, offset), gap in gaps.items())
        assert len(streams.files["x"]) >= last, "a stream starves until the end"
    assembly.send_remaining()
    assert streams.files["x"] == whole


def test_all_threads_send_at_the_same_time(tmp_path: Path) -> None:
    """A piece never waits for bytes that the thread that sends the piece before it has yet to write."""
    jobs, size, step = 3, 60, 10
    together = threading.Barrier(jobs, timeout=_ENOUGH)
    met: set[int] = set()

    class Meeting(Streams):
        def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
            if threading.get_ident() not in met:  # the first piece that this thread sends
                met.add(threading.get_ident())
                together.wait()
            self.files[piece.name][piece.start : piece.start + len(data)] = data

    (tmp_path / "x").write_bytes(bytes(size))
    whole, taker = memoryview(bytes(range(size))), Meeting(0)
    assembly = Assembly(tmp_path, {"x": size}, {("x", 0): PendingBytes(size)}, taker)
    output = assembly.directory_writer("")

    @contextmanager
    def worker() -> Iterator[Step[int]]:
        def copy_in_two_steps(start: int) -> None:
            for at in (start, start + step // 2):
                output["x"].write_at(whole[at : at + step // 2], at)
            output.record_written("x", 0, start, step, crc32(whole[start : start + step]))

        yield copy_in_two_steps

    in_time(threading.Thread(target=process_units, args=(range(0, size, step), worker, jobs)))
    assert not together.broken
    assert assembly.sent == {piece.key for piece in cut_into_pieces("x", size)}
