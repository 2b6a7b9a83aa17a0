# /// script
# requires-python = ">=3.11"
# dependencies = ["ckptkit-fsdp[hf]", "torch==2.13.0", "nemo-automodel==0.7.0"]
#
# [tool.uv]
# override-dependencies = [
#     "torch==2.13.0",
#     "triton==3.7.1",
#     "flashoptim; sys_platform == 'never'",
#     "quack-kernels; sys_platform == 'never'",
#     "torchaudio; sys_platform == 'never'",
# ]
#
# [tool.uv.sources]
# ckptkit-fsdp = { path = "../..", editable = true }
# ///
"""NeMo Automodel 0.7.0: its fine-tuning recipe with FSDP2 on 2 ranks, as safetensors and as DCP, resumed on 1 rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import proof

FORMATS = ("safetensors", "torch_save")


def recipe(base: Path, output: Path, save_format: str, ranks: int) -> dict[str, Any]:
    """Return the YAML of the recipe. All rows are the same, so that the loss does not depend on the ranks' rows."""
    mock = "nemo_automodel.components.datasets.llm.mock.MockUnpackedDatasetConfig"
    return {
        "step_scheduler": {
            "global_batch_size": 4, "local_batch_size": 4 // ranks, "max_steps": proof.STEPS, "num_epochs": 1,
            "ckpt_every_steps": proof.SAVED,
        },
        "dist_env": {"backend": "gloo", "timeout_minutes": 10},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": str(base),
            "torch_dtype": "float32",
            "force_hf": True,
        },
        "checkpoint": {
            "enabled": True, "checkpoint_dir": str(output), "model_save_format": save_format,
            "save_consolidated": False,
        },
        "distributed": {
            "strategy": "fsdp2",
            "mp_policy": {"param_dtype": "float32", "reduce_dtype": "float32", "output_dtype": "float32"},
        },
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        # `vocab_size` 3 leaves one word
        "dataset": {"_target_": mock, "num_sentences": 64, "mean_len": proof.LENGTH, "std_len": 0, "vocab_size": 3},
        "dataloader": {"collate_fn": "nemo_automodel.components.datasets.utils.default_collater", "shuffle": False},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3},
    }  # fmt: skip


def on_cpu() -> None:
    """Let Automodel build its model on the CPU: it asks for the current GPU without looking for one."""
    from types import ModuleType

    import torch
    from nemo_automodel._transformers import auto_model

    torch.cuda.reset_peak_memory_stats = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    proxy = ModuleType("torch")
    proxy.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]
    proxy.device = lambda _, current: current  # type: ignore[attr-defined]
    auto_model.torch = proxy


def train(base: Path, root: Path, *formats: str) -> None:
    """Train on this rank by the recipe, once for each format; write losses by step, and the logits at the end."""
    import torch

    on_cpu()
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

    for save_format in formats:
        output = root / save_format
        configuration = recipe(base, output, save_format, int(os.environ["WORLD_SIZE"]))
        trainer = TrainFinetuneRecipeForNextTokenPrediction(ConfigNode(configuration))
        trainer.setup()
        trainer.run_train_validation_loop()
        with torch.no_grad():
            logits = trainer.model_parts[0].eval()(torch.arange(proof.LENGTH).unsqueeze(0)).logits
        if int(os.environ["RANK"]) == 0:
            lines = map(json.loads, (output / "training.jsonl").read_text().splitlines())
            (output / "losses.json").write_text(json.dumps({str(line["step"]): line["loss"] for line in lines}))
            torch.save(logits, output / "logits.pt")
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort the process at its end


def main() -> None:
    with proof.directory() as root:
        base = root / "base"
        proof.write_llama(base, dtype="float32")
        proof.ranks(2, base, root / "run", *FORMATS)
        for save_format in FORMATS:
            run, out = (root / name / save_format for name in ("run", "out"))
            first, last = sorted(path for path in run.glob("epoch_*_step_*") if path.is_dir())
            said = proof.ckptkit("inspect", last)
            assert "trainer: NeMo Automodel" in said, said
            proof.ckptkit("verify", last)

            proof.ckptkit("consolidate", last, out, "--base", base)
            proof.check_export(save_format, out, run / "logits.pt")
            proof.ckptkit("reshard", first, root / "resumed" / save_format / first.name, "--to", 1)
        proof.ranks(1, base, root / "resumed", *FORMATS)
        for save_format in FORMATS:
            expected, found = (root / name / save_format / "losses.json" for name in ("run", "resumed"))
            proof.check_losses(save_format, expected, found)
    print(
        f"NeMo Automodel 0.7.0 ({', '.join(FORMATS)}): 2 ranks, FSDP2: inspect, verify, consolidate (logits equal), "
        "reshard to 1 (losses equal)"
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    else:
        main()
