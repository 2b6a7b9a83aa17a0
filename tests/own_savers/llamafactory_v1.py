# /// script
# requires-python = ">=3.11"
# dependencies = ["ckptkit-fsdp", "torch==2.13.0", "llamafactory==0.9.5"]
#
# [tool.uv]
# override-dependencies = [
#     "torch==2.13.0",
#     "torchaudio; sys_platform == 'never'",
#     "torchvision; sys_platform == 'never'",
#     "gradio; sys_platform == 'never'",
#     "huggingface-hub>=1.26,<2",
#     "typer>=0.26",
# ]
#
# [tool.uv.sources]
# ckptkit-fsdp = { path = "../..", editable = true }
# ///
"""LLaMA-Factory 0.9.5, its new trainer (`USE_V1=1 llamafactory-cli sft`): 2 ranks with FSDP2, resumed on 1 rank.

On another number of ranks it trains on the rows in another order. So its resume from the resharded checkpoint is
compared with its resume from its own checkpoint on the same number of ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import proof

WORDS, STEPS, SAVED = 200, 4, 2


def write_base(root: Path) -> None:
    """Write the model that training starts from, and rows of one length: the loss does not depend on their ranks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "base")
    proof.write_tokenizer(root / "base", WORDS)
    rows = (" ".join(f"w{(row * 31 + place * 7) % (WORDS - 4)}" for place in range(8)) for row in range(32))
    (root / "rows.json").write_text(json.dumps([{"instruction": "w1", "output": row} for row in rows]))


def write_config(root: Path, name: str, ranks: int, **more: Any) -> Path:
    """Write the configuration of `llamafactory-cli sft`."""
    config = {
        "model": str(root / "base"), "template": "qwen3_nothink", "train_dataset": str(root / "data.yaml"),
        "output_dir": str(root / name), "micro_batch_size": 4 // ranks, "global_batch_size": 4, "cutoff_len": 32,
        "batching_workers": 0, "bf16": False, "enable_activation_checkpointing": False, "max_steps": STEPS,
        "save_steps": SAVED, "learning_rate": 1e-2, "dist_config": {"name": "fsdp2"}, **more,
    }  # fmt: skip
    rows = {"path": str(root / "rows.json"), "source": "local", "converter": "alpaca"}
    (root / "data.yaml").write_text(json.dumps({"rows": rows}))
    path = root / f"{name}.yaml"
    path.write_text(json.dumps(config, indent=1))
    return path


def train(config: Path) -> None:
    """Train on this rank, as `llamafactory-cli sft` does."""
    import torch

    torch.accelerator.synchronize = lambda device=None, /: None  # which LLaMA-Factory calls on a CPU too
    from llamafactory.v1.trainers.sft_trainer import run_sft

    run_sft(json.loads(config.read_text()))
    os._exit(0)  # gloo's threads may abort the process at its end


def check_logits(name: str, expected: Any, found: Any, *, tolerance: float = 0) -> None:
    import torch

    tokens = torch.arange(4, 12).unsqueeze(0)
    with torch.no_grad():
        difference = (expected.eval()(tokens).logits - found.eval()(tokens).logits).abs().max().item()
    assert difference <= tolerance, f"{name}: logits differ by {difference}"


def logged_losses(run: Path, output: Path) -> Path:
    lines = map(json.loads, (run / "trainer_log.jsonl").read_text().splitlines())
    output.write_text(json.dumps({str(line["step"]): line["loss"] for line in lines}))
    return output


def main() -> None:
    from transformers import AutoModelForCausalLM

    with proof.directory() as root:
        write_base(root)
        proof.ranks(2, write_config(root, "run", 2))
        last = root / "run" / f"checkpoint-{STEPS}"
        said = proof.ckptkit("inspect", last)
        assert "trainer: LLaMA-Factory" in said, said
        proof.ckptkit("verify", last)
        proof.ckptkit("consolidate", last, root / "out")
        check_logits("out", *map(AutoModelForCausalLM.from_pretrained, (root / "run", root / "out")))
        saved = root / "run" / f"checkpoint-{SAVED}"
        proof.ckptkit("reshard", saved, root / "on-1", "--to", 1)
        for name, source in {"own": saved, "resharded": root / "on-1"}.items():
            proof.ranks(1, write_config(root, name, 1, resume_from_checkpoint=str(source)))
        expected, found = (logged_losses(root / name, root / f"{name}.json") for name in ("own", "resharded"))
        proof.check_losses("losses", expected, found)
    print(
        "LLaMA-Factory 0.9.5 (v1): 2 ranks, FSDP2: inspect, verify, consolidate (logits equal), "
        "reshard to 1 (losses equal to those of its own resume on 1)"
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]))
    else:
        main()
