# /// script
# requires-python = ">=3.11"
# dependencies = ["ckptkit-fsdp[hf]", "torch==2.13.0", "ms-swift==4.6.0"]
#
# [tool.uv]
# override-dependencies = ["torch==2.13.0"]
#
# [tool.uv.sources]
# ckptkit-fsdp = { path = "../..", editable = true }
# ///
"""ms-swift 4.6: full training and a LoRA by `swift sft --fsdp` on 2 ranks with FSDP2, resumed on 1 rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import proof

LORA = {
    "tuner_type": "lora",
    "lora_rank": 4,
    "lora_alpha": 16,
    "lora_dropout": 0,
    "target_modules": ["q_proj", "v_proj"],
}


def write_config(root: Path, name: str, ranks: int, **more: Any) -> Path:
    """Write the configuration of `swift sft`."""
    fsdp = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT", "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": True,
        },
    }  # fmt: skip
    (root / "fsdp.json").write_text(json.dumps(fsdp))
    config = {
        "model": str(root / "base"), "model_type": "llama", "template": "dummy", "torch_dtype": "float32",
        "dataset": [str(root / "rows.jsonl")], "split_dataset_ratio": 0, "load_from_cache_file": False,
        "output_dir": str(root / name), "add_version": False, "max_length": 32, "max_steps": proof.STEPS,
        "save_steps": proof.SAVED, "logging_steps": 1, "per_device_train_batch_size": 4 // ranks,
        "gradient_accumulation_steps": 1, "learning_rate": 1e-2, "attn_impl": "sdpa", "gradient_checkpointing": False,
        "dataloader_num_workers": 0, "dataset_num_proc": 1, "report_to": "none", "tuner_type": "full",
        "fsdp": str(root / "fsdp.json"), "use_cpu": True, **more,
    }  # fmt: skip
    path = root / f"{name}.json"
    path.write_text(json.dumps(config, indent=1))
    return path


def train(*configs: Path) -> None:
    """Train on this rank, as `swift sft` does, by each configuration in turn; save the trained weights."""
    import torch

    proof.fsdp_on_cpu()
    from accelerate.state import AcceleratorState
    from swift.cli.main import parse_yaml_args
    from swift.pipelines import SwiftSft

    class KeepWeights(SwiftSft):
        def train(self, trainer: Any) -> Any:
            result = super().train(trainer)
            weights = {name: value.full_tensor() for name, value in trainer.model.state_dict().items()}
            if trainer.is_world_process_zero():
                torch.save(weights, Path(self.args.output_dir) / "trained.pt")
                if self.args.tuner_type == "lora":  # the checkpoints of shards are without it
                    trainer.model.peft_config["default"].save_pretrained(self.args.output_dir)
            return result

    for config in configs:
        AcceleratorState._reset_state(reset_partial_state=False)
        arguments = [str(config)]
        parse_yaml_args(arguments)
        KeepWeights(arguments).main()
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort the process at its end


def main() -> None:
    with proof.directory() as root:
        proof.write_llama(root / "base")
        proof.write_rows(root / "rows.jsonl", lambda text: {"query": "w1", "response": text})
        # with a LoRA, ms-swift resumes neither from its own shards: it expects adapter_config.json beside them
        base = ("--base", root / "base")
        proof.check_fine_tuning(root, write_config, LORA, title="ms-swift", base=base, resumes=["full"])
    print(
        "ms-swift 4.6.0 (full, LoRA): 2 ranks, FSDP2: inspect, verify, consolidate (logits equal), "
        "reshard to 1 (full: losses equal)"
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(*map(Path, sys.argv[1:]))
    else:
        main()
