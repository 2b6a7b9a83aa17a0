"""Carry blocks whose bytes lie in the source as they shall in the destination: in steps that stay in a core's cache.

A step is touched three times, by the read, the checksum and the write, and two of them find it in the cache.
"""

from __future__ import annotations

from ckptkit.engine.blocks import Block
from ckptkit.engine.gather import STEP_BYTES
from ckptkit.engine.visit import Worker
from ckptkit.files.crc32 import combine, crc32
from ckptkit.layout import Chunk, ReadRun
from ckptkit.tensors.blocks import span_of

Run = tuple[int, Chunk, int, int]  # where in the block, of which chunk, where in that, and how long; in bytes


def carry(worker: Worker, block: Block) -> int | None:
    """Copy a block to where it belongs and return its CRC-32. Does nothing and returns None for one to be gathered.

    Such are those of elements in another order or dtype, and those of so many runs that one write is better.
    """
    runs = runs_of(block)
    if runs is None:
        return None
    target = block.target.chunk
    begin = target.offset + block.start
    whole = 0
    for at, chunk, start, length in runs:
        crc = carry_run(worker, chunk, start, length, target.path, begin + at)
        worker.pieces[0].append(ReadRun(chunk, start, length, crc))
        whole = combine(whole, crc, length)
    return whole


def runs_of(block: Block) -> list[Run] | None:
    """Return the runs of bytes that a block is made of, in order; None if it is to be gathered."""
    parts = block.inputs[0].parts
    dtype = block.target.chunk.dtype
    if (len(parts) - 1) * STEP_BYTES > block.nbytes:
        return None
    runs: list[Run] = []
    for chunk, part in parts:
        here, there = span_of(part, block.box, None), span_of(part, chunk.box, chunk.strides)
        if not (here.is_run and there.is_run and chunk.dtype == dtype) or chunk.is_zeros:
            return None
        runs.append((here.start * dtype.itemsize, chunk, there.start * dtype.itemsize, here.length * dtype.itemsize))
    return sorted(runs)


def carry_run(worker: Worker, chunk: Chunk, start: int, length: int, path: str, offset: int) -> int:
    """Copy `length` bytes of a chunk from `start` to `offset` of file `path`, step by step, and return their CRC-32."""
    step = worker.sources[0].step
    source, target = worker.sources[0].files[chunk.path], worker.files[path]
    crc = 0
    for done in range(0, length, step):
        data = worker.buffer(min(step, length - done))
        source.read_into(data, chunk.offset + start + done)
        crc = crc32(data, crc)
        target.write_at(data, offset + done)
    return crc
