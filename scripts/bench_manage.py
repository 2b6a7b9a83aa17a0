"""Comparing, surveying and averaging, beside the scripts that people write for it. Imports no torch."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from scripts.bench_place import make, size_of, workplace
from scripts.bench_runs import Contender, measure, paragraph, table

SCRIPT = f"{sys.executable} -m scripts.bench_scripts"


def manage(size_gb: float, runs: int) -> None:
    """`diff`, `stats` and `average`, against reading the same files and against scripts with torch."""
    with workplace() as home:
        dcp, hf, others = home / "dcp", home / "hf", [home / "second", home / "third"]
        make(8, f"sharded --size-gb {size_gb} --dtype bfloat16", dcp)
        ckptkit("consolidate", dcp, hf)
        for seed, other in enumerate(others, start=1):
            make(8, f"sharded --size-gb {size_gb} --dtype bfloat16 --seed {seed}", home / "more")
            ckptkit("consolidate", home / "more", other)
            subprocess.run(["rm", "-r", home / "more"], check=True)
        everything = " ".join(shlex.quote(str(path)) for path in (hf, *others))
        contenders = [
            *comparing("the same, DCP", dcp, hf, with_script=False),
            *comparing("the same, safetensors", home / "copy", hf, with_script=True),
            *comparing("different, safetensors", others[0], hf, with_script=True),
            reader("stats: cat", "cat {src}/*.safetensors > /dev/null", hf),
            reader("stats: ckptkit stats", "ckptkit stats {src}", hf, "stats: cat"),
            reader("stats: script", f"{SCRIPT} stats {{src}}", hf, "stats: cat"),
            Contender("average of 3: script", f"{SCRIPT} average {everything} {{out}}/o", hf, "average of 3: script"),
            Contender(
                "average of 3: ckptkit average", f"ckptkit average {everything} {{out}}/o", hf, "average of 3: script"
            ),
            Contender(
                "average of 3: ckptkit average --no-sync",
                f"ckptkit average {everything} {{out}}/o --no-sync",
                hf,
                "average of 3: script",
            ),
        ]
        subprocess.run(["cp", "-r", hf, home / "copy"], check=True)
        results = measure(contenders, home / "out", runs=runs, modes=("warm",))
        nbytes = size_of(hf)
    text = f"""{nbytes / 1e9:.2f} GB of bf16 each, on {os.cpu_count()} cores; medians of {runs} runs, taken in turns,
        with the input in the page cache. In brackets: times what cat took of the same files, and for averages, times
        what the script took. The scripts load with safetensors, and compute with torch; they do not sync."""
    print(paragraph(text))
    print(table(results))


def comparing(words: str, one: Path, other: Path, *, with_script: bool) -> list[Contender]:
    """The programs that compare two checkpoints. A difference is no failure of a program that looks for some."""
    both = f"{{src}} {shlex.quote(str(other))}"
    contenders = [
        reader(f"{words}: cat", f"cat {{src}}/* {shlex.quote(str(other))}/* > /dev/null", one),
        reader(f"{words}: ckptkit diff", f"ckptkit diff {both} || [ $? = 1 ]", one, f"{words}: cat"),
    ]
    script = reader(f"{words}: script", f"{SCRIPT} diff {both}", one, f"{words}: cat")
    return [*contenders, script] if with_script else contenders


def reader(name: str, command: str, src: Path, floor: str | None = None) -> Contender:
    """A program that writes nothing."""
    return Contender(name, command, src, floor, only_reads=True)


def ckptkit(*args: object) -> None:
    """Make an input."""
    subprocess.run([sys.executable, "-m", "ckptkit", *map(str, args)], check=True, stdout=subprocess.DEVNULL)
