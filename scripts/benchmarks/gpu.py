"""Measure what needs a GPU or many cores: conversions by threads, loads into the GPU, training. Imports no torch.

On a machine that has torch, without the set-up of `scripts/bench`: `python -m scripts.benchmarks gpu`.
"""

from __future__ import annotations

import os
from pathlib import Path

from scripts.benchmarks.loss import loss
from scripts.benchmarks.merge import save
from scripts.benchmarks.runs import Contender, measure, table
from scripts.benchmarks.storage import ranks
from scripts.benchmarks.training.compare import train
from scripts.benchmarks.workplace import ckptkit, floors, make, reader, size_of, workplace
from scripts.markdown import paragraph

LOOPS = ("plain", "--compile --recompute-every 1", "saves")


def gpu(size_gb: float, runs: int, device: str) -> None:
    """Measure conversions by 1 thread and more, loads into a GPU, and training on it. Takes about 8 minutes."""
    with workplace() as home:
        conversions(home, size_gb, runs)
    with workplace() as home:
        loads(home, size_gb / 3, runs, device)
    loss(3, device)
    train(LOOPS)


def conversions(home: Path, size_gb: float, runs: int) -> None:
    """Measure consolidate, reshard and verify by threads, beside one `cat` of the same files."""
    src, cores = home / "src", len(os.sched_getaffinity(0))
    make(8, f"training --size-gb {size_gb} --dtype float32", src)
    cat, _ = floors("all", src)
    contenders = [cat]
    for command in ("consolidate {src} {out}/new --no-sync", "reshard {src} {out}/new --to 16 --no-sync"):
        for jobs in sorted({1, min(4, cores), min(8, cores), cores}):
            name = f"ckptkit {command.split()[0]} --jobs {jobs}"
            contenders.append(Contender(name, f"ckptkit {command} --jobs {jobs}", src, cat.name, least=0.3))
    contenders.append(reader("ckptkit verify", "ckptkit verify {src}", src, cat.name))
    results = measure(contenders, home / "out", runs=runs, modes=("warm",))
    what = f"""{size_of(src)} from 8 ranks (fp32 model and AdamW's state), of which `consolidate` reads and writes a
        third; medians of {runs} runs, warm, without sync."""
    print(paragraph(what))
    print(table(results))


def loads(home: Path, size_gb: float, runs: int, device: str) -> None:
    """Measure loads of shards into the memory of a device: by torch and Reader, and into a transformers model."""
    src, base, shards = home / "src", home / "base", home / "shards"
    make(8, f"sharded --size-gb {size_gb} --dtype float32", src)
    save(home, size_gb, rank=0)
    ckptkit("convert", base, shards, "--to", "dcp", "--world-size", 8)
    contenders = []
    for by, title in (("dcp", "torch dcp.load"), ("ckptkit", "ckptkit.storage.Reader")):
        command = f"{ranks('load', 1, size_gb, 'float32')} {{src}} --by {by} --device {device}"
        contenders.append(Contender(title, command, src, "torch dcp.load", only_reads=True, tells=True))
    command = f"python -m scripts.benchmarks.gpu_load {{src}} --device {device}"
    export = "transformers from_pretrained of the export"
    contenders.append(Contender(export, command, base, export, only_reads=True, tells=True))
    ours = "ckptkit.integrations.transformers.load of the shards"
    contenders.append(Contender(ours, f"{command} --base {base}", shards, export, only_reads=True, tells=True))
    results = measure(contenders, home / "out", runs=runs, modes=("warm",))
    what = f"""A model of {size_of(src)} in fp32, saved by 8 ranks, and a Llama of {size_of(base)} in bf16, both loaded
        into `{device}` by one process; medians of {runs} runs, warm. The time is that of the call alone. Memory is that
        of the process on the CPU."""
    print(paragraph(what))
    print(table(results))
