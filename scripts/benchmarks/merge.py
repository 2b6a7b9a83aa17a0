"""Measure merging an adapter into its base beside PEFT's own. Imports no torch: a child would inherit its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.benchmarks.runs import Contender, measure, table
from scripts.benchmarks.workplace import size_of, workplace
from scripts.markdown import paragraph

INPUTS = "scripts.benchmarks.merge_inputs"
RANK = 16
THEIRS = """python -c '
import sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
torch.set_num_threads(2)
base, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
model = PeftModel.from_pretrained(model, base + "/../adapter").merge_and_unload()
model.save_pretrained(out + "/model")
' {src} {out}"""
OURS = "ckptkit merge {src} {src}/../adapter {out}/model"


def merge(size_gb: float, runs: int) -> None:
    """Measure merging a LoRA into its base against loading both, merging and saving."""
    with workplace() as home:
        save(home, size_gb)
        base = home / "base"
        name = "PEFT: load, merge_and_unload, save"
        results = measure(
            [
                Contender("cat", "cat {src}/*.safetensors > {out}/all", base, "cat"),
                Contender(name, THEIRS, base, name),
                Contender("ckptkit merge", OURS, base, name),
                Contender("ckptkit merge, no sync", f"{OURS} --no-sync", base, name),
            ],
            home / "out",
            runs=runs,
            modes=("warm",),
        )
        size = size_of(base)
    print(
        paragraph(
            f"""A llama of {size} in bfloat16, and a LoRA of rank {RANK} in float32 on all its linear layers; medians of
            {runs} runs. The reference is PEFT, which does not sync."""
        )
    )
    print(table(results))


def save(home: Path, size_gb: float, rank: int = RANK) -> None:
    """Save a base, and an adapter if it has a rank, as transformers and PEFT do."""
    subprocess.run([sys.executable, "-m", INPUTS, str(home), str(size_gb), str(rank)], check=True)
