"""Measure deltas beside reading both models, and applying them beside a copy. Imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from scripts.benchmarks.runs import Contender, measure, table
from scripts.benchmarks.workplace import ckptkit, make, size_of, workplace
from scripts.markdown import paragraph

_ONE_IN = 100  # elements that change


def delta(size_gb: float, runs: int) -> None:
    """Measure `delta` of two models of which 1 % of the elements differ, and `apply` of it."""
    with workplace() as home:
        dcp, base, new = home / "dcp", home / "base", home / "new"
        make(8, f"sharded --size-gb {size_gb} --dtype bfloat16", dcp)
        ckptkit("consolidate", dcp, base)
        shutil.copytree(base, new)
        (new / "ckptkit.json").unlink()
        changed = sum(map(change, sorted(new.glob("*.safetensors"))))
        ckptkit("delta", base, new, home / "delta")
        ckptkit("delta", base, new, home / "root", "--format", "disk-delta")
        version = home / "root" / "weight_v000001"
        contenders = [
            Contender("cat of both", f"cat {{src}}/* {new}/* > /dev/null", base, only_reads=True),
            Contender("delta", f"ckptkit delta {{src}} {new} {{out}}/d", base, "cat of both", least=0.005),
            Contender(
                "delta, disk-delta",
                f"ckptkit delta {{src}} {new} {{out}}/d --format disk-delta",
                base,
                "cat of both",
                least=0.005,
            ),
            Contender("cp", "cp -r {src} {out}/o && sync {out}/o/*", base),
            Contender("apply", f"ckptkit apply {{src}} {home / 'delta'} {{out}}/o", base, "cp"),
            Contender("apply of a disk-delta", f"ckptkit apply {{src}} {version} {{out}}/o", base, "cp"),
        ]
        results = measure(contenders, home / "out", runs=runs, modes=("warm", "cold"))
        sizes = {"the model": size_of(base), "the delta": size_of(home / "delta"), "the disk-delta": size_of(version)}
    print(
        paragraph(
            f"""{", ".join(f"{name} {size}" for name, size in sizes.items())}; {changed:,} elements of bfloat16 differ.
            Medians of {runs} runs, taken in turns. In brackets: times what cat or cp took."""
        )
    )
    print(table(results))


def change(path: Path) -> int:
    """Flip the last bit of one element in a hundred of a file of 16-bit tensors; return of how many."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    elements = np.memmap(path, np.uint16, "r+", start)
    elements[::_ONE_IN] ^= 1
    elements.flush()
    return len(elements[::_ONE_IN])
