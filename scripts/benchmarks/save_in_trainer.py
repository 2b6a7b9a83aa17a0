"""Measure how long trainers wait for a save, their own and one in the background. Imports no torch."""

from __future__ import annotations

from scripts.benchmarks.runs import Contender, measure, table
from scripts.benchmarks.workplace import workplace
from scripts.markdown import paragraph

LIBRARIES = {
    "trainer": ("transformers' Trainer", "BackgroundTrainer"),
    "accelerate": ("Accelerate's save_state", "BackgroundAccelerator"),
    "lightning": ("Lightning's ModelParallelStrategy", "BackgroundModelParallelStrategy"),
}


def save_in_trainer(size_gb: float, runs: int) -> None:
    """Measure loops on 2 ranks with FSDP2 that save after each step. Takes about 15 minutes."""
    start = "OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m scripts.benchmarks.save_in_trainer_ranks"
    with workplace() as home:
        (home / "none").mkdir()
        contenders = [
            Contender(
                title,
                f"{start} {{out}} --in {library} --by {by} --size-gb {size_gb}",
                home / "none",
                theirs,
                tells=True,
            )
            for library, (theirs, ours) in LIBRARIES.items()
            for by, title in (("itself", theirs), ("background", ours))
        ]
        results = measure(contenders, home / "out", runs=runs, modes=("warm",))
        print(
            paragraph(
                f"""A Llama in fp32 with AdamW, {size_gb:.1f} GB together, on 2 ranks with FSDP2 and sharded state
                dicts. The time is that for which the training waits in one save: the median of 3 saves in each of
                {runs} runs. No save is in progress when it begins. Memory is the sum over the ranks, with the model and
                the libraries."""
            )
        )
        print(table(results))
