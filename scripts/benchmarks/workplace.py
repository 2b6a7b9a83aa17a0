"""Make a directory to measure in, the checkpoints that are measured, and the `cat` of them to compare with."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.benchmarks.runs import Contender, run
from scripts.markdown import ROOT


@contextmanager
def workplace() -> Iterator[Path]:
    """Give a directory on the disk of the repository, and remove it at the end."""
    home = Path(tempfile.mkdtemp(prefix="bench-", dir=ROOT))
    try:
        yield home
    finally:
        shutil.rmtree(home)


def make(ranks: int, what: str, root: Path, module: str = "scripts.benchmarks.inputs") -> None:
    """Let plain torch, or another library, write a checkpoint on `ranks` processes of one thread each."""
    torchrun = f"OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node {ranks} -m"
    run(f"{torchrun} {module} {what} {{out}}", root, root)


def ckptkit(*args: object) -> None:
    """Run a command of ckptkit to make an input."""
    subprocess.run([sys.executable, "-m", "ckptkit", *map(str, args)], check=True, stdout=subprocess.DEVNULL)


def floors(name: str, src: Path) -> list[Contender]:
    """Return the copies of all shards into one file by cat, with sync and without: no conversion takes less."""
    return [
        Contender(f"{name}: cat", "cat {src}/* > {out}/all", src, f"{name}: cat"),
        Contender(f"{name}: cat, sync", "cat {src}/* > {out}/all && sync {out}/all", src, f"{name}: cat, sync"),
    ]


def reader(name: str, command: str, src: Path, floor: str | None = None) -> Contender:
    """Return a program that writes nothing."""
    return Contender(name, command, src, floor, only_reads=True)


def size_of(root: Path) -> str:
    """Return the size of the files in a directory, in GB."""
    return f"{sum(path.stat().st_size for path in root.iterdir()) / 1e9:.2f} GB"
