"""Measure reading what trainers leave beside the tools that they bring. Imports no torch: a child would inherit it."""

from __future__ import annotations

from pathlib import Path

from scripts.benchmarks.rank_files import contenders, save_rank_files
from scripts.benchmarks.runs import Contender, measure, table
from scripts.benchmarks.workplace import make, size_of, workplace
from scripts.markdown import paragraph

INPUTS = "scripts.benchmarks.trainer_inputs"
TO_FP32 = (
    "DS_ACCELERATOR=cpu python -m deepspeed.utils.zero_to_fp32 {src}/.. {out}/model --tag global_step1 "
    "--safe_serialization"
)
TO_UNIVERSAL = (
    "DS_ACCELERATOR=cpu python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state "
    "--input_folder {src} --output_folder {out}/universal"
)
WEIGHTS = 0.25  # of what lies on the disk, at least, are the masters


def trainers(size_gb: float, runs: int) -> None:
    """Measure turning checkpoints of trainers into a model, and into others, beside the trainers' own tools."""
    with workplace() as home:
        two, three = (save_zero(home, size_gb, stage) for stage in (2, 3))
        by_rank = save_rank_files(home, size_gb)
        results = measure(
            [
                *pair("ZeRO 2", "zero_to_fp32", TO_FP32, "consolidate {src} {out}/model", two, WEIGHTS),
                *pair("ZeRO 3", "zero_to_fp32", TO_FP32, "consolidate {src} {out}/model", three, WEIGHTS),
                *pair("ZeRO 2", "ds_to_universal", TO_UNIVERSAL, "convert {src} {out}/model --to universal", two),
                *pair("ZeRO 3", "ds_to_universal", TO_UNIVERSAL, "convert {src} {out}/model --to universal", three),
                *contenders(by_rank),
            ],
            home / "out",
            runs=runs,
            modes=("warm",),
        )
        sizes = " and ".join(map(size_of, (two, three)))
        files = size_of(by_rank)
    print(
        paragraph(
            f"""{sizes} of 2 ranks, and {files} in a file for each of 4 ranks; medians of {runs} runs. The reference is
            the trainer's own tool, which compares no checksum and does not sync. Both write safetensors in fp32, or a
            universal checkpoint. `torch.load of all` loads the files of all ranks and joins each tensor, as verl's
            merger does, but keeps fp32."""
        )
    )
    print(table(results))


def save_zero(home: Path, size_gb: float, stage: int) -> Path:
    """Let DeepSpeed save a checkpoint of a stage of ZeRO; return the directory with the files."""
    make(2, f"zero --size-gb {size_gb} --stage {stage}", home / f"zero{stage}", INPUTS)
    return home / f"zero{stage}" / "global_step1"


def pair(kind: str, tool: str, command: str, ours: str, src: Path, least: float = 0.45) -> list[Contender]:
    """Return a trainer's tool, and ckptkit doing the same, with and without waiting for the disk."""
    name = f"{kind}: {tool}"
    options = {"": "", ", no sync": " --no-sync"}
    verb = ours.split(" ", maxsplit=1)[0]
    return [
        Contender(name, command, src, name, least=least),
        *(
            Contender(f"{kind}: ckptkit {verb}{word}", f"ckptkit {ours}{flag}", src, name, least=least)
            for word, flag in options.items()
        ),
    ]
