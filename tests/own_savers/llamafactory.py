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
"""LLaMA-Factory 0.9.5: full training and a LoRA by `llamafactory-cli train` on 2 ranks with FSDP2, resumed on 1."""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import proof

LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_alpha": 16, "lora_dropout": 0, "lora_target": "q_proj,v_proj"}


def write_config(root: Path, name: str, ranks: int, **more: Any) -> Path:
    """Write the configuration of `llamafactory-cli train`, in JSON, which is YAML too."""
    config = {
        "model_name_or_path": str(root / "base"), "stage": "sft", "do_train": True, "template": "empty",
        "dataset_dir": str(root), "dataset": "rows", "cutoff_len": 32, "output_dir": str(root / name),
        "per_device_train_batch_size": 4 // ranks, "gradient_accumulation_steps": 1, "max_steps": proof.STEPS,
        "save_steps": proof.SAVED, "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True, "report_to": "none",
        "disable_gradient_checkpointing": True, "finetuning_type": "full",
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "version": 2, "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
        **more,
    }  # fmt: skip
    path = root / f"{name}.yaml"
    path.write_text(json.dumps(config, indent=1))
    return path


def train(*configs: Path) -> None:
    """Train on this rank, as `llamafactory-cli train` does, by each configuration in turn; save the trained weights."""
    import torch

    proof.fsdp_on_cpu()
    audio = ModuleType("torchaudio")  # the wheel needs CUDA, and LLaMA-Factory imports it before it looks at the data
    audio.__spec__ = ModuleSpec("torchaudio", None)
    sys.modules["torchaudio"] = audio
    from accelerate.state import AcceleratorState
    from llamafactory.train.tuner import run_exp
    from transformers import TrainerCallback

    class KeepWeights(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
            if state.is_world_process_zero:
                torch.save(weights, Path(args.output_dir) / "trained.pt")
                if hasattr(model, "peft_config"):  # the checkpoints of shards are without it
                    model.peft_config["default"].save_pretrained(args.output_dir)

    setattr(torch.distributed, "destroy_process_group", lambda: None)  # noqa: B010 - the ranks go on with the next one
    for config in configs:
        AcceleratorState._reset_state(reset_partial_state=False)
        run_exp(json.loads(config.read_text()), callbacks=[KeepWeights()])
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort the process at its end


def main() -> None:
    with proof.directory() as root:
        proof.write_llama(root / "base")
        proof.write_rows(root / "rows.jsonl", lambda text: {"instruction": "w1", "input": "", "output": text})
        (root / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.jsonl"}}))
        title = "Accelerate, by transformers' Trainer"
        proof.check_fine_tuning(
            root, write_config, LORA, title=title, base=("--base", root / "base"), depends_on_ranks=True
        )
    print(
        "LLaMA-Factory 0.9.5 (full, LoRA): 2 ranks, FSDP2: inspect, verify, consolidate (logits equal), "
        "reshard to 1 (losses equal to those of its own resume on 1)"
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(*map(Path, sys.argv[1:]))
    else:
        main()
