"""Planning measured by itself: a checkpoint of many chunks, joined with the one file that it is to become."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from ckptkit.engine.units import blocks
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor, check_cover
from ckptkit.plan import make_plan
from ckptkit.tensors.box import Box
from ckptkit.tensors.dtypes import DTYPES

RANKS, ROWS, COLUMNS = 1000, 8, 64


def plan(runs: int) -> None:
    """Seconds to check, plan and cut checkpoints of 100,000 chunks and more."""
    print(f"Medians of {runs} runs: cover checked, plan made and cut into blocks, of bf16 chunks from {RANKS} ranks.\n")
    print("| chunks | seconds | microseconds a chunk |\n| ---: | ---: | ---: |")
    for tensors in (100, 200, 400, 800):
        seconds = median(plan_once(tensors) for _ in range(runs))
        print(f"| {tensors * RANKS:,} | {seconds:.2f} | {seconds / tensors / RANKS * 1e6:.1f} |")


def plan_once(tensors: int) -> float:
    """Seconds to plan a checkpoint of so many tensors, sharded over all ranks."""
    source, target = sharded(tensors), whole(tensors)
    began = time.perf_counter()
    check_cover(source)
    units = sum(1 for _ in blocks(make_plan(source, target)))
    seconds = time.perf_counter() - began
    if units < tensors:
        raise SystemExit(f"only {units} blocks")
    return seconds


def sharded(tensors: int) -> Layout:
    """A layout in which each rank has its rows of each tensor."""
    dtype, length = DTYPES["bfloat16"], ROWS * COLUMNS * 2
    found = {}
    for i in range(tensors):
        boxes = (Box((rank * ROWS, 0), (ROWS, COLUMNS)) for rank in range(RANKS))
        chunks = tuple(Chunk(box, f"{rank}", i * length, length, dtype) for rank, box in enumerate(boxes))
        found[f"layers.{i}"] = StoredTensor(Spec(dtype, (RANKS * ROWS, COLUMNS)), chunks)
    return Layout(Path("src"), "made", found)


def whole(tensors: int) -> Layout:
    """A layout in which each tensor is one chunk of one file."""
    spec = Spec(DTYPES["bfloat16"], (RANKS * ROWS, COLUMNS))
    box = Box((0, 0), spec.shape)
    chunks = ((Chunk(box, "all", i * spec.nbytes, spec.nbytes, spec.dtype),) for i in range(tensors))
    return Layout(Path("dst"), "made", {f"layers.{i}": StoredTensor(spec, chunk) for i, chunk in enumerate(chunks)})
