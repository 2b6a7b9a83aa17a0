"""Measure comparing, surveying and averaging beside the scripts that people write for it. Imports no torch."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from scripts.benchmarks.runs import Contender, measure, table
from scripts.benchmarks.workplace import ckptkit, make, reader, size_of, workplace
from scripts.markdown import paragraph

SCRIPT = f"{sys.executable} -m scripts.benchmarks.by_hand"


def manage(size_gb: float, runs: int) -> None:
    """Measure `diff`, `stats` and `average` against reading the same files, and against scripts with torch."""
    with workplace() as home:
        dcp, hf, others = home / "dcp", home / "hf", [home / "second", home / "third"]
        make(8, f"sharded --size-gb {size_gb} --dtype bfloat16", dcp)
        ckptkit("consolidate", dcp, hf)
        for seed, other in enumerate(others, start=1):
            make(8, f"sharded --size-gb {size_gb} --dtype bfloat16 --seed {seed}", home / "more")
            ckptkit("consolidate", home / "more", other)
            shutil.rmtree(home / "more")
        contenders = [
            *comparing("the same, DCP", dcp, hf, with_script=False),
            *comparing("the same, safetensors", home / "copy", hf, with_script=True),
            *comparing("different, safetensors", others[0], hf, with_script=True),
            reader("stats: cat", "cat {src}/*.safetensors > /dev/null", hf),
            reader("stats: ckptkit stats", "ckptkit stats {src}", hf, "stats: cat"),
            reader("stats: script", f"{SCRIPT} stats {{src}}", hf, "stats: cat"),
            *averaging("average of 3", hf, " ".join(shlex.quote(str(path)) for path in (hf, *others))),
        ]
        shutil.copytree(hf, home / "copy")
        results = measure(contenders, home / "out", runs=runs, modes=("warm",))
        size = size_of(hf)
    text = f"""{size} of bf16 in each checkpoint; medians of {runs} runs, warm. The reference is `cat`, and for averages
        the script. The scripts load with safetensors, compute with torch, and do not sync."""
    print(paragraph(text))
    print(table(results))


def comparing(words: str, one: Path, other: Path, *, with_script: bool) -> list[Contender]:
    """Return the programs that compare two checkpoints. A difference is no failure of a program that looks for some."""
    both = f"{{src}} {shlex.quote(str(other))}"
    contenders = [
        reader(f"{words}: cat", f"cat {{src}}/* {shlex.quote(str(other))}/* > /dev/null", one),
        reader(f"{words}: ckptkit diff", f"ckptkit diff {both} || [ $? = 1 ]", one, f"{words}: cat"),
    ]
    script = reader(f"{words}: script", f"{SCRIPT} diff {both}", one, f"{words}: cat")
    return [*contenders, script] if with_script else contenders


def averaging(words: str, src: Path, sources: str) -> list[Contender]:
    """Return the programs that average checkpoints, each compared with the script."""
    commands = {"script": f"{SCRIPT} average", "ckptkit average": "ckptkit average"}
    return [
        Contender(f"{words}: {name}{option}", f"{command} {sources} {{out}}/o{option}", src, f"{words}: script")
        for name, command in commands.items()
        for option in ("", " --no-sync")
        if not (option and name == "script")
    ]
