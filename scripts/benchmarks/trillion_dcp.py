"""Measure plans of a trillion parameters in 70,000 tensors, and predict their conversion. Imports no torch."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.benchmarks.runs import Ended, run
from scripts.benchmarks.scale import take
from scripts.benchmarks.workplace import workplace
from scripts.markdown import paragraph, table

NODES = (1, 8, 64)
SPEEDS = (2, 7, 20)  # GB/s
FEWER = 1024
_OF_LAST = f"--part 1/{NODES[-1]} --dry-run"
_READ, _PART = "read", "plan of part 1/{}"
_TORCH = "python -m scripts.benchmarks.trillion_steps read-by-torch {src}"
_PLAN = "python -m scripts.benchmarks.scale_steps consolidate {src} --parts"
STEPS = {
    "torch's `read_metadata`": _TORCH,
    _READ: "python -m scripts.benchmarks.scale_steps read {src}",
    **{_PART.format(nodes): f"{_PLAN} {nodes}" for nodes in NODES},
    "inspect": "ckptkit inspect {src}",
    "consolidate --dry-run": "ckptkit consolidate {src} {out} --dry-run",
    f"consolidate {_OF_LAST}": f"ckptkit consolidate {{src}} {{out}} {_OF_LAST}",
    f"reshard --to {FEWER} --dry-run": f"ckptkit reshard {{src}} {{out}} --to {FEWER} --dry-run",
}
MEASURED = """Measured: each step ran once, in its own process. The files are sparse, so every tensor contains zeros.
    torch pickled the metadata, and each chunk has its own archive with a CRC-32, as in a real save. In each of 16
    pipeline stages of 128 ranks, an expert is whole on one rank, and 16 ranks shard the other tensors. `read` opens and
    checks the metadata. `plan of part` then locates every byte of one part of a Hugging Face model; its time does not
    include `read`. torch's time does not include its import; its memory does. The other rows are whole commands. Their
    dry runs check the headers of a sample of the chunks; with `--part`, they check no headers."""
PREDICTED = """Predicted, not measured: the time of `consolidate` with a part on each node, without `finalize`. It is
    the sum of three times: `read` and the plan of one part, from the table above, and the bytes of that part divided by
    the disk speed. The prediction assumes that each disk reads and writes at this speed at the same time, and that the
    processors keep up with it. Every node reads all metadata, so more nodes shorten only the plan."""


def trillion(layers: int) -> None:
    """Measure plans of 1T parameters that 2,048 ranks saved with parallel experts, and predict times on 64 nodes."""
    with workplace() as home:
        src, out = home / "src", home / "out"
        run(f"python -m scripts.benchmarks.trillion_steps make {{src}} --layers {layers}", src, out)
        size = (src / ".metadata").stat().st_size
        model = run(_TORCH, src, out).told  # and the files' ends are in the page cache from now on
        taken = {step: measure(step, src, out) for step in STEPS}
    print(
        paragraph(
            f"""A model like Kimi K2 in bf16: {model["parameters"] / 1e9:,.0f} billion parameters in
            {model["tensors"]:,} tensors and {model["chunks"]:,} chunks, saved by 2,048 ranks. `.metadata` has
            {size / 1e6:.1f} MB."""
        )
    )
    print(paragraph(MEASURED))
    print(table([["", "time", "peak RSS"], *([step, *describe(ended)] for step, ended in taken.items())]), end="\n\n")
    print(paragraph(PREDICTED))
    plans = {nodes: taken[_PART.format(nodes)] for nodes in NODES}
    rows = [predict(nodes, taken[_READ].seconds + plan.seconds, plan.told["nbytes"]) for nodes, plan in plans.items()]
    print(table([["nodes", "a part", "serial", *(f"{speed} GB/s" for speed in SPEEDS)], *rows]))


def measure(step: str, src: Path, out: Path) -> Ended:
    """Take a step, and say on stderr what it took."""
    ended = take(STEPS[step], src, out)
    print(step, *describe(ended), sep="  ", file=sys.stderr)
    return ended


def describe(ended: Ended) -> tuple[str, str]:
    """Return time and memory as cells of the table."""
    return f"{ended.seconds:.1f} s", f"{ended.peak:,.0f} MiB"


def predict(nodes: int, serial: float, nbytes: float) -> list[str]:
    """Return the row for so many nodes: bytes of a part, serial seconds, and the whole time at each disk speed."""
    times = (serial + nbytes / (speed * 1e9) for speed in SPEEDS)
    return [str(nodes), f"{nbytes / 1e9:,.1f} GB", f"{serial:.1f} s", *(f"{time:,.0f} s" for time in times)]
