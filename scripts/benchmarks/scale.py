"""Measure growth: the first layers of a 405B Llama as 16,384 ranks would save them. Imports no torch."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.benchmarks.runs import Ended, run
from scripts.benchmarks.workplace import workplace
from scripts.markdown import paragraph, table

RANKS, FEWER = 16384, 8192
STEPS = {
    "read": "python -m scripts.benchmarks.scale_steps read {src}",
    "plan": "python -m scripts.benchmarks.scale_steps consolidate {src}",
    "plan of part 1/4": "python -m scripts.benchmarks.scale_steps consolidate {src} --parts 4",
    "plan of part 1/16": "python -m scripts.benchmarks.scale_steps consolidate {src} --parts 16",
    "consolidate --dry-run": "ckptkit consolidate {src} {out} --dry-run",
    f"reshard --to {FEWER} --dry-run": f"ckptkit reshard {{src}} {{out}} --to {FEWER} --dry-run",
}
HEAD = f"""The first layers of Llama 3.1 405B in bf16, as {RANKS:,} ranks would save them. The files are sparse, so
    every tensor contains zeros. torch pickled the metadata, and each chunk has its own archive with a CRC-32, as in a
    real save. `read` opens and checks the checkpoint. `plan` also locates every byte in a Hugging Face model, or in one
    of 4 or 16 parts of it. The dry runs are whole commands; the dry run of `reshard` also makes the new metadata. Each
    step ran once, in its own process with one thread. A cell has the time, in brackets the microseconds per chunk, and
    then the peak memory of the process."""


def scale(layers: list[int]) -> None:
    """Measure reading, planning and dry runs of a 405B model of 16,384 ranks by its number of layers: 15 minutes."""
    print(paragraph(HEAD))
    rows = [["layers", "chunks", *STEPS]]
    for count in layers:
        with workplace() as home:
            rows.append(measure(home, count))
            print(*rows[-1], sep="  ", file=sys.stderr)
    print(table(rows))


def measure(home: Path, layers: int) -> list[str]:
    """Return the row of a model with so many layers."""
    src, out = home / "src", home / "out"
    run(f"python -m scripts.benchmarks.scale_steps make {{src}} --layers {layers} --ranks {RANKS}", src, out)
    chunks = int(run(STEPS["read"], src, out).told["chunks"])  # and the files' ends are in the page cache from now on
    cells = [describe(take(command, src, out), chunks) for command in STEPS.values()]
    return [str(layers), f"{chunks:,}", *cells]


def take(command: str, src: Path, out: Path) -> Ended:
    """Take a step: of ours count what it tells, of a command all."""
    ended = run(command, src, out)
    return Ended(ended.told["seconds"], ended.told["peak"], ended.said) if "_steps " in command else ended


def describe(ended: Ended, chunks: int) -> str:
    """Return what a step took, as a cell of the table."""
    return f"{ended.seconds:.1f} s ({ended.seconds / chunks * 1e6:.0f}), {ended.peak:,.0f} MiB"
