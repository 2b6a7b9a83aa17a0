"""Measure loading and saving through `ckptkit.storage` beside torch's own. Imports no torch: see `__main__`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.benchmarks.runs import Contender, Result, measure, table
from scripts.benchmarks.workplace import ckptkit, make, size_of, workplace
from scripts.markdown import paragraph

DTYPE = "bfloat16"
FLOOR = "preadv of as many bytes, nothing else"
LOADS = {"dcp": "torch dcp.load", "ckptkit": "ckptkit.storage.Reader", "preadv": FLOOR}
HF_LOADS = {"hf": "torch HuggingFaceStorageReader", "ckptkit": "ckptkit.storage.Reader", "preadv": FLOOR}
SAVES = {
    "dcp": "torch dcp.save",
    "ckptkit": "ckptkit.storage.Writer, hf",
    "hf": "torch HuggingFaceStorageWriter, consolidating",
    "hf-later": "torch HuggingFaceStorageWriter, then 2 files by 2 ranks",
}
UNSYNCED = {"dcp": "torch dcp.save, no sync", "ckptkit": "ckptkit.storage.Writer, hf, no sync"}


def load(size_gb: float, runs: int) -> None:
    """Measure loading an 8-rank checkpoint, and a Hugging Face model, on 2 ranks and on 4. Takes about 5 minutes."""
    with workplace() as home:
        src, model = home / "dcp", home / "hf"
        make(8, f"sharded --size-gb {size_gb} --dtype {DTYPE}", src)
        ckptkit("consolidate", src, model)
        contenders = [loads(name, src, number, size_gb) for number in (2, 4) for name in LOADS]
        contenders += [loads(name, model, number, size_gb) for number in (2, 4) for name in HF_LOADS]
        results = measure(contenders, home / "out", runs=runs, modes=("warm",))
        say(results, runs, f"{size_of(src)} saved by 8 ranks, or the same in one safetensors file.")


def loads(name: str, src: Path, number: int, size_gb: float) -> Contender:
    """Return a load by so many ranks, to be compared with torch's own of the same."""
    titles = LOADS if src.name == "dcp" else HF_LOADS
    before = f"{'8' if src.name == 'dcp' else 'hf'} to {number}: "
    command = f"{ranks('load', number, size_gb, DTYPE)} {{src}} --by {name}"
    floor = before + next(iter(titles.values()))
    return Contender(before + titles[name], command, src, floor, only_reads=True, tells=True)


def save(size_gb: float, runs: int) -> None:
    """Measure saving a model from 2 ranks as a Hugging Face model, beside dcp.save. Takes about 5 minutes."""
    with workplace() as home:
        src = home / "dcp"
        make(2, f"sharded --size-gb {size_gb} --dtype {DTYPE}", src)
        contenders = [saves(SAVES[name], name, src, size_gb, SAVES["dcp"]) for name in SAVES]
        contenders += [saves(UNSYNCED[name], f"{name} --no-sync", src, size_gb, UNSYNCED["dcp"]) for name in UNSYNCED]
        results = measure(contenders, home / "out", runs=runs, modes=("warm",))
        say(
            results,
            runs,
            f"{size_of(src)}, sharded over 2 ranks. torch does not sync its consolidated files.",
        )


def saves(title: str, options: str, src: Path, size_gb: float, floor: str) -> Contender:
    """Return a save by 2 ranks of what they have loaded before."""
    return Contender(
        title, f"{ranks('save', 2, size_gb, DTYPE)} {{src}} {{out}} --by {options}", src, floor, tells=True
    )


def ranks(what: str, number: int, size_gb: float, dtype: str) -> str:
    """Return the start of a command that so many ranks do together, of one thread each."""
    start = "OMP_NUM_THREADS=1 python -m scripts.benchmarks.ranks"
    return f"{start} {what} --ranks {number} --size-gb {size_gb} --dtype {dtype}"


def say(results: Sequence[Result], runs: int, what: str) -> None:
    """Print a table, and what it is to be read with."""
    print(
        paragraph(
            f"""{what} Medians of {runs} runs in fresh processes, warm. The reference is torch's own call. The time is
            that of the call alone, from the start of all ranks to the end of the last. Memory is the sum over the
            ranks, with the libraries in each."""
        )
    )
    print(table(results))
