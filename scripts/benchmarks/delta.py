"""Measure deltas beside reading both models, other tools' patches, and a copy. Imports no torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from scripts.benchmarks.runs import Contender, measure, run, table
from scripts.benchmarks.workplace import ckptkit, make, size_of, workplace
from scripts.markdown import paragraph
from scripts.markdown import table as rows_of

_PERCENTS = (0.1, 1, 3, 30)  # of the elements that change
_APPLIED = 1  # the percentage of which the delta is applied
_LEAST = 0.0001  # of the input's size: what a patch has at least
_BLOCK = 1 << 24  # elements that are changed at once


def delta(size_gb: float, runs: int) -> None:
    """Measure `delta` of models of which 0.1 to 30% of the elements differ, and `apply`, beside patches and copies."""
    with workplace() as home:
        dcp, base = home / "dcp", home / "base"
        make(8, f"sharded --size-gb {size_gb} --dtype bfloat16", dcp)
        ckptkit("consolidate", dcp, base)
        sizes: list[list[str]] = []
        contenders: list[Contender] = []
        for percent in _PERCENTS:
            new = home / f"new-{percent}"
            shutil.copytree(base, new)
            (new / "ckptkit.json").unlink()
            changed = sum(in_child(partial(change, density=percent / 100), sorted(new.glob("*.safetensors"))))
            reading, *writers = contenders_of(percent, base, new)
            sizes.append([f"{percent}%", f"{changed:,}", *(made_by(one, home / "out") for one in writers)])
            contenders += [reading, *writers]
        contenders += list(appliers(base, home / f"new-{_APPLIED}", home))
        results = measure(contenders, home / "out", runs=runs, modes=("warm",))
        model = size_of(base)
    programs = [one.name.removesuffix(f", {_PERCENTS[-1]}%") for one in writers]
    print(rows_of([["changed", "elements", *programs], *sizes]), end="\n\n")
    print(
        paragraph(
            f"""The table above has the sizes for a bfloat16 model of {model}, in which the last bit of random elements
            differs. The table below has medians of {runs} runs; the reference is `cat` or `cp`."""
        )
    )
    print(table(results))


def contenders_of(percent: float, base: Path, new: Path) -> list[Contender]:
    """Return the `cat` of two models, and all that write what differs; xdelta3 where it is installed."""
    floor = f"cat of both, {percent}%"
    commands = {
        "delta": f"ckptkit delta {{src}} {new} {{out}}/d --force",
        "zstd --patch-from": for_each("zstd -q --long=31 --patch-from=$f $new -o $out", new),
    }
    if shutil.which("xdelta3"):
        commands["xdelta3"] = for_each("xdelta3 -e -s $f $new $out", new)
    return [
        Contender(floor, f"cat {{src}}/* {new}/* > /dev/null", base, only_reads=True),
        *(Contender(f"{name}, {percent}%", line, base, floor, least=_LEAST) for name, line in commands.items()),
    ]


def for_each(command: str, new: Path) -> str:
    """Return a command for each file `$f` of a model, the `$new` one of its name, and the patch `$out`."""
    names = f"new={new}/${{{{f##*/}}}} out={{out}}/${{{{f##*/}}}}"
    return f"set -e; for f in {{src}}/*.safetensors; do {names}; {command}; done"


def appliers(base: Path, new: Path, home: Path) -> Iterator[Contender]:
    """Yield a copy of a model, and `apply` of deltas to it, which this writes first."""
    ckptkit("delta", base, new, home / "delta")
    yield Contender("cp", "cp -r {src} {out}/o && sync {out}/o/*", base)
    yield Contender(f"apply, {_APPLIED}%", f"ckptkit apply {{src}} {home / 'delta'} {{out}}/o", base, "cp")


def made_by(contender: Contender, out: Path) -> str:
    """Run a program once, and return the size of the files that it makes, in MB."""
    out.mkdir()
    run(contender.command, contender.src, out)
    nbytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    shutil.rmtree(out)
    return f"{nbytes / 1e6:,.1f} MB"


def in_child(work: Callable[[Path], int], paths: Sequence[Path]) -> list[int]:
    """Do some work on files in another process: a program that this one starts counts at least its memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return list(pool.map(work, paths))


def change(path: Path, density: float) -> int:
    """Flip the last bit of random elements of a file of 16-bit tensors; return of how many."""
    import numpy as np

    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    elements = np.memmap(path, np.uint16, "r+", start)
    random = np.random.default_rng(0)
    changed = 0
    for first in range(0, len(elements), _BLOCK):
        block = elements[first : first + _BLOCK]
        differ = random.random(len(block), np.float32) < density
        block ^= differ.astype(np.uint16)
        changed += int(differ.sum())
    elements.flush()
    return changed
