"""Measure consolidating and inspecting beside other tools. Imports no torch: a child would inherit its memory."""

from __future__ import annotations

from pathlib import Path

from scripts.benchmarks.runs import Contender, measure, table
from scripts.benchmarks.workplace import floors, make, size_of, workplace
from scripts.markdown import paragraph

TORCH_TO_PT = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {src} {out}/model.pt"
TORCH_TO_SAFETENSORS = """python -c '
import sys
from pathlib import Path
from safetensors import safe_open
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
src, out = sys.argv[1:]
names = safe_open(next(Path(src).iterdir()), "pt").keys()
consolidate_safetensors_files(src, out, dict.fromkeys(names, 1), num_threads=2)
' {src} {out}"""
IMPORT = "python -c 'import torch'"
TORCH_LARGE = "torch read_metadata, 100,000 chunks"
TORCH_METADATA = """python -c '
import sys
from torch.distributed.checkpoint import FileSystemReader
FileSystemReader(sys.argv[1]).read_metadata()
' {src}"""


def consolidate(size_gb: float, runs: int) -> None:
    """Measure consolidating an 8-rank checkpoint against copying its bytes, and against other tools."""
    with workplace() as home:
        bf16, fp32, shards = (home / name for name in ("bf16", "fp32", "shards"))
        make(8, f"sharded --size-gb {size_gb} --dtype bfloat16", bf16)
        make(8, f"sharded --size-gb {size_gb} --dtype float32", fp32)
        make(8, f"hf-shards --size-gb {size_gb} --dtype bfloat16", shards)
        results = measure(
            [
                *floors("bf16", bf16),
                ours("bf16", bf16),
                ours("bf16", bf16, " --no-sync"),
                Contender("accelerate merge-weights", "accelerate merge-weights {src} {out}", bf16, "bf16: cat"),
                Contender("torch dcp_to_torch_save", TORCH_TO_PT, bf16, "bf16: cat"),
                Contender("torch consolidate_safetensors_files", TORCH_TO_SAFETENSORS, shards, "bf16: cat"),
                *floors("fp32", fp32),
                ours("fp32", fp32, " --dtype bf16"),
                ours("fp32", fp32, " --dtype bf16 --no-sync"),
            ],
            home / "out",
            runs=runs,
            modes=("warm", "cold"),
        )
        size = size_of(bf16)
    print(paragraph(f"{size} from 8 ranks; medians of {runs} runs. Of the other programs, only `cat, sync` syncs."))
    print(table(results))


def large(size_gb: float, runs: int) -> None:
    """Measure consolidating a checkpoint beside which what a start takes is nothing, against copying its bytes."""
    with workplace() as home:
        src = home / "bf16"
        make(8, f"sharded --size-gb {size_gb} --dtype bfloat16", src)
        results = measure(
            [*floors("bf16", src), ours("bf16", src), ours("bf16", src, " --no-sync")],
            home / "out",
            runs=runs,
            modes=("warm", "cold"),
        )
        size = size_of(src)
    print(paragraph(f"{size} from 8 ranks; runs: {runs}."))
    print(table(results))


def ours(name: str, src: Path, options: str = "") -> Contender:
    """Return `ckptkit consolidate`, to be compared with the floor that makes the same promise."""
    floor = f"{name}: cat" if "--no-sync" in options else f"{name}: cat, sync"
    return Contender(f"ckptkit consolidate{options}", "ckptkit consolidate {src} {out}/model" + options, src, floor)


def looking(name: str, command: str, src: Path, floor: str) -> Contender:
    """Return a program that writes nothing."""
    return Contender(name, command, src, floor, only_reads=True)


def inspect(runs: int) -> None:
    """Measure looking at a checkpoint, interpreter and imports included."""
    with workplace() as home:
        small, large = home / "small", home / "large"
        make(1, "sharded --size-gb 0.01", small)
        make(1, "many-chunks --chunks 100000", large)
        results = measure(
            [
                Contender("python -c pass", "python -c pass", small),
                Contender(IMPORT, IMPORT, small),
                looking("ckptkit --version", "ckptkit --version", small, IMPORT),
                looking("ckptkit inspect, small", "ckptkit inspect {src}", small, IMPORT),
                looking("torch read_metadata, small", TORCH_METADATA, small, IMPORT),
                Contender(TORCH_LARGE, TORCH_METADATA, large),
                looking("ckptkit inspect, 100,000 chunks", "ckptkit inspect {src}", large, TORCH_LARGE),
            ],
            home / "out",
            runs=runs,
            modes=("warm",),
        )
    print(
        paragraph(
            f"""Medians of {runs} runs, with the start of the interpreter and all imports. The reference is `import
            torch`, or torch's own read of the same metadata."""
        )
    )
    print(table(results))
