"""Measure verifying beside reading and hashing the same files. Imports no torch: a child would inherit its memory."""

from __future__ import annotations

from scripts.benchmarks.runs import measure, table
from scripts.benchmarks.workplace import ckptkit, make, reader, size_of, workplace
from scripts.markdown import paragraph

PROGRAMS = {
    "cat": "cat {src}/* > /dev/null",
    "ckptkit verify": "ckptkit verify {src}",
    "sha256sum": "sha256sum {src}/*",
}


def verify(size_gb: float, runs: int) -> None:
    """Measure verifying an 8-rank checkpoint and safetensors, against reading and hashing their bytes."""
    with workplace() as home:
        dcp, known, hf = home / "dcp", home / "known", home / "hf"
        make(8, f"sharded --size-gb {size_gb} --dtype bfloat16", dcp)
        ckptkit("consolidate", dcp, hf)
        ckptkit("reshard", dcp, known, "--to", "8")
        contenders = [
            reader(f"{program} {words}", command, src, None if program == "cat" else f"cat {words}")
            for words, src in (("DCP", dcp), ("DCP with manifest", known), ("safetensors", hf))
            for program, command in PROGRAMS.items()
        ]
        results = measure(contenders, home / "out", runs=runs, modes=("warm", "cold"))
        size = size_of(dcp)
    print(paragraph(f"{size} from 8 ranks; medians of {runs} runs."))
    print(table(results))
