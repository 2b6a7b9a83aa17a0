"""Measure planning by itself: a checkpoint of many chunks, joined with the one file that it is to become."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from ckptkit.engine.blocks import blocks_of_plan
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor, check_chunks_tile
from ckptkit.layout.box import Box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.plan import make_plan
from scripts.markdown import paragraph, table

RANKS, ROWS, COLUMNS = 1000, 8, 64


def plan(runs: int) -> None:
    """Measure checking, planning and cutting checkpoints of 100,000 chunks and more."""
    rows = [["chunks", "seconds", "microseconds a chunk"]]
    for tensors in (100, 200, 400, 800):
        seconds = median(plan_once(tensors) for _ in range(runs))
        rows.append([f"{tensors * RANKS:,}", f"{seconds:.2f}", f"{seconds / tensors / RANKS * 1e6:.1f}"])
    text = f"""Medians of {runs} runs, with bf16 chunks from {RANKS} ranks: check that the chunks cover their tensors,
        make the plan, cut it into blocks."""
    print(paragraph(text))
    print(table(rows))


def plan_once(tensors: int) -> float:
    """Return the seconds to plan a checkpoint of so many tensors, sharded over all ranks."""
    source, target = sharded(tensors), whole(tensors)
    began = time.perf_counter()
    check_chunks_tile(source)
    units = sum(1 for _ in blocks_of_plan(make_plan(source, target)))
    seconds = time.perf_counter() - began
    if units < tensors:
        raise SystemExit(f"only {units} blocks")
    return seconds


def sharded(tensors: int) -> Layout:
    """Return a layout in which each rank has its rows of each tensor."""
    dtype, length = DTYPES["bfloat16"], ROWS * COLUMNS * 2
    found = {}
    for i in range(tensors):
        boxes = (Box((rank * ROWS, 0), (ROWS, COLUMNS)) for rank in range(RANKS))
        chunks = tuple(Chunk(box, f"{rank}", i * length, length, dtype) for rank, box in enumerate(boxes))
        found[f"layers.{i}"] = StoredTensor(Spec(dtype, (RANKS * ROWS, COLUMNS)), chunks)
    return Layout(Path("src"), "made", found)


def whole(tensors: int) -> Layout:
    """Return a layout in which each tensor is one chunk of one file."""
    spec = Spec(DTYPES["bfloat16"], (RANKS * ROWS, COLUMNS))
    box = Box((0, 0), spec.shape)
    chunks = ((Chunk(box, "all", i * spec.nbytes, spec.nbytes, spec.dtype),) for i in range(tensors))
    return Layout(Path("dst"), "made", {f"layers.{i}": StoredTensor(spec, chunk) for i, chunk in enumerate(chunks)})
