"""The benchmarks: which programs run on which checkpoints, and the tables they end in.

Imports no torch: a child's peak memory is never counted as less than what its parent had.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.bench_plan import plan
from scripts.bench_runs import Contender, measure, run, table
from scripts.bench_train import add_options, train

ROOT = Path(__file__).parents[1]

TORCH_TO_PT = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {src} {out}/model.pt"
TORCH_TO_SAFETENSORS = """python -c '
import sys
from pathlib import Path
from safetensors import safe_open
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
src, out = sys.argv[1:]
names = safe_open(next(Path(src).iterdir()), "pt").keys()
consolidate_safetensors_files(src, out, dict.fromkeys(names, 1), num_threads=2)
' {src} {out}"""
TORCH_METADATA = """python -c '
import sys
from torch.distributed.checkpoint import FileSystemReader
FileSystemReader(sys.argv[1]).read_metadata()
' {src}"""


def consolidate(size_gb: float, runs: int) -> None:
    """Consolidation of an 8-rank checkpoint against copying its bytes, and against other tools."""
    with workplace() as home:
        bf16, fp32, shards = (home / name for name in ("bf16", "fp32", "shards"))
        make(8, f"sharded --size-gb {size_gb} --dtype bfloat16", bf16)
        make(8, f"sharded --size-gb {size_gb} --dtype float32", fp32)
        make(8, f"hf-shards --size-gb {size_gb} --dtype bfloat16", shards)
        results = measure(
            [
                *floors("bf16", bf16),
                ours("bf16", bf16),
                ours("bf16", bf16, " --no-sync"),
                Contender("accelerate merge-weights", "accelerate merge-weights {src} {out}", bf16, "bf16: cat"),
                Contender("torch dcp_to_torch_save", TORCH_TO_PT, bf16, "bf16: cat"),
                Contender("torch consolidate_safetensors_files", TORCH_TO_SAFETENSORS, shards, "bf16: cat"),
                *floors("fp32", fp32),
                ours("fp32", fp32, " --dtype bf16"),
                ours("fp32", fp32, " --dtype bf16 --no-sync"),
            ],
            home / "out",
            runs=runs,
            modes=("warm", "cold"),
        )
        nbytes = sum(path.stat().st_size for path in bf16.iterdir())
    print(f"{nbytes / 1e9:.2f} GB from 8 ranks on {os.cpu_count()} cores; medians of {runs} runs, taken in turns.")
    print("In brackets: times what cat took, with sync where the program syncs. Warm: the input was in the page cache;")
    print("cold: its pages were dropped (posix_fadvise DONTNEED) before each run. Peak RSS of the largest process.\n")
    print(table(results))


def floors(name: str, src: Path) -> list[Contender]:
    """Copying the shards into one file, by cat: what any conversion takes at least."""
    return [
        Contender(f"{name}: cat", "cat {src}/* > {out}/all", src, f"{name}: cat"),
        Contender(f"{name}: cat, sync", "cat {src}/* > {out}/all && sync {out}/all", src, f"{name}: cat, sync"),
    ]


def ours(name: str, src: Path, options: str = "") -> Contender:
    """`ckptkit consolidate`, held against the floor that makes the same promise."""
    floor = f"{name}: cat" if "--no-sync" in options else f"{name}: cat, sync"
    return Contender(f"ckptkit consolidate{options}", "ckptkit consolidate {src} {out}/model" + options, src, floor)


def inspect(runs: int) -> None:
    """The time to look at a checkpoint, interpreter and imports included."""
    with workplace() as home:
        small, large = home / "small", home / "large"
        make(1, "sharded --size-gb 0.01", small)
        make(1, "many-chunks --chunks 100000", large)
        results = measure(
            [
                Contender("python -c 'import torch'", "python -c 'import torch'", small),
                Contender("ckptkit inspect, small", "ckptkit inspect {src}", small),
                Contender("torch read_metadata, small", TORCH_METADATA, small),
                Contender("ckptkit inspect, 100,000 chunks", "ckptkit inspect {src}", large),
                Contender("torch read_metadata, 100,000 chunks", TORCH_METADATA, large),
            ],
            home / "out",
            runs=runs,
            modes=("warm",),
        )
    print(f"Medians of {runs} runs, taken in turns; interpreter start and imports included.\n")
    print(table(results))


@contextmanager
def workplace() -> Iterator[Path]:
    """A directory on the disk of the repository, removed at the end."""
    home = Path(tempfile.mkdtemp(prefix="bench-", dir=ROOT))
    try:
        yield home
    finally:
        shutil.rmtree(home)


def make(ranks: int, what: str, root: Path) -> None:
    """Let plain torch write a checkpoint on `ranks` processes."""
    torchrun = f"OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node {ranks} -m scripts.bench_inputs"
    run(f"{torchrun} {what} {{out}}", root, root)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure ckptkit beside other tools.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (consolidate, inspect, plan):
        options = commands.add_parser(command.__name__, help=command.__doc__)
        options.add_argument("--runs", type=int, default=5, help="runs of each program, 5 by default")
        if command is consolidate:
            options.add_argument("--size-gb", type=float, default=1.6, help="size of the checkpoint, 1.6 by default")
    options = commands.add_parser("train", help=train.__doc__)
    add_options(options)
    arguments = parser.parse_args()
    if arguments.command == "consolidate":
        consolidate(arguments.size_gb, arguments.runs)
    elif arguments.command == "train":
        with workplace() as home:
            train(home, arguments)
    else:
        {"inspect": inspect, "plan": plan}[arguments.command](arguments.runs)


if __name__ == "__main__":
    main()
