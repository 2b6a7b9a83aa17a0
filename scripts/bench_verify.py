"""Verifying, beside reading and hashing the same files. Imports no torch, as a child would inherit its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.bench_place import make, size_of, workplace
from scripts.bench_runs import Contender, measure, table


def verify(size_gb: float, runs: int) -> None:
    """Verification of an 8-rank checkpoint and of safetensors, against reading and hashing their bytes."""
    with workplace() as home:
        dcp, known, hf = home / "dcp", home / "known", home / "hf"
        make(8, f"sharded --size-gb {size_gb} --dtype bfloat16", dcp)
        ckptkit("consolidate", dcp, hf)
        ckptkit("reshard", dcp, known, "--to", "8")
        contenders = [
            reader(words, command, src, floor=None if command.startswith("cat") else f"cat {words}")
            for words, src in (("DCP", dcp), ("DCP with manifest", known), ("safetensors", hf))
            for command in ("cat {src}/* > /dev/null", "ckptkit verify {src}", "sha256sum {src}/*")
        ]
        results = measure(contenders, home / "out", runs=runs, modes=("warm", "cold"))
        nbytes = size_of(dcp)
    print(f"{nbytes / 1e9:.2f} GB of 8 ranks on {os.cpu_count()} cores; medians of {runs} runs, taken in turns.")
    print("In brackets: times what cat took. Warm: the input was in the page cache; cold: its pages were dropped")
    print("(posix_fadvise DONTNEED) before each run. Peak RSS of the largest process.\n")
    print(table(results))


def reader(words: str, command: str, src: Path, floor: str | None) -> Contender:
    """A program that writes nothing."""
    name = " ".join([*command.split()[: 2 if command.startswith("ckptkit") else 1], words])
    return Contender(name, command, src, floor, only_reads=True)


def ckptkit(*args: object) -> None:
    """Make an input."""
    subprocess.run([sys.executable, "-m", "ckptkit", *map(str, args)], check=True, stdout=subprocess.DEVNULL)
