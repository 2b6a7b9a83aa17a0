"""Where benchmarks work: a directory that goes away again, the checkpoints made in it, and `cat` of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.bench_runs import Contender, run

ROOT = Path(__file__).parents[1]


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
    run(f"{torchrun(ranks)} scripts.bench_inputs {what} {{out}}", root, root)


def torchrun(ranks: int) -> str:
    """The start of a command whose module is run on so many processes, of one thread each."""
    return f"OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node {ranks} -m"


def floors(name: str, src: Path) -> list[Contender]:
    """Copying the shards into one file, by cat: what any conversion takes at least."""
    return [
        Contender(f"{name}: cat", "cat {src}/* > {out}/all", src, f"{name}: cat"),
        Contender(f"{name}: cat, sync", "cat {src}/* > {out}/all && sync {out}/all", src, f"{name}: cat, sync"),
    ]


def size_of(root: Path) -> int:
    """Bytes of the files in a directory."""
    return sum(path.stat().st_size for path in root.iterdir())
