"""Find damage: read every byte of a layout once, and compare each run of bytes with its CRC-32.

Where copying ends at the first run that is damaged, this goes on to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptkit.engine.blocks import Block
from ckptkit.engine.visit import Pieces, Worker, visit
from ckptkit.errors import CkptError, Corrupt, IOFailure
from ckptkit.io.crc32 import Checksums, crc32, tell_damage
from ckptkit.layout import Chunk, Layout
from ckptkit.layout.plan import plan_bytes

Run = tuple[str, int, int]  # a file, and the offset and length of bytes in it that have a checksum together


def run_of(chunk: Chunk) -> Run:
    """Return the run of bytes that a chunk is, or that it was cut out of."""
    return (chunk.path, *chunk.bytes)


def find_damage(
    layout: Layout, *, jobs: int | None = None, progress: Callable[[int], None] | None = None
) -> dict[Run, CkptError]:
    """Return the runs of bytes that cannot be read, or have another CRC-32 than is recorded, each with the reason.

    The layout has been located. `progress` is told of bytes read, by one thread at a time.
    """
    runs = dict(runs_in(layout))
    sums: Checksums[Run] = Checksums()
    found: dict[Run, CkptError] = {}

    def look(worker: Worker, block: Block) -> int | CkptError:
        chunk, data = block.target.chunk, worker.buffer(block.nbytes)
        try:
            worker.sources[0].load(chunk.path, chunk.offset + block.start, data)
        except (Corrupt, IOFailure) as error:
            return error.with_traceback(None)
        return crc32(data)

    def note(block: Block, seen: int | CkptError, _pieces: Pieces) -> None:
        run = run_of(block.target.chunk)
        if isinstance(seen, CkptError):
            found.setdefault(run, seen)
        else:
            sums.add(run, block.start, block.nbytes, seen)
        if progress:
            progress(block.nbytes)

    visit(plan_bytes(layout.root, sorted(runs)), look, note, jobs)
    for run, recorded in runs.items():
        crc = sums.whole(run, run[2])
        if run not in found and recorded not in (None, crc):
            found[run] = Corrupt(tell_damage(run[2], run[1], crc, recorded))
    return found


def runs_in(layout: Layout) -> Iterator[tuple[Run, int | None]]:
    """Yield each run of bytes that a layout has tensors in, with the CRC-32 that is recorded for it."""
    for tensor in layout.tensors.values():
        for chunk in tensor.chunks:
            if chunk.box.numel and chunk.is_in_file:
                yield run_of(chunk), chunk.crc32


def nbytes_of(layout: Layout) -> int:
    """Return how many bytes are read to find the damage in a layout."""
    return sum(length for _, _, length in dict(runs_in(layout)))
