# /// script
# requires-python = ">=3.12"
# dependencies = ["ckptkit-fsdp[hf]", "axolotl==0.21.0"]
#
# [tool.uv.sources]
# ckptkit-fsdp = { path = "../..", editable = true }
#
# [[tool.uv.dependency-metadata]] # without what needs a GPU
# name = "axolotl"
# version = "0.21.0"
# requires-python = ">=3.12"
# requires-dist = [
#     "torch==2.14.1", "accelerate==1.15.0", "datasets==5.0.1", "peft==0.21.2", "tokenizers==0.23.3",
#     "transformers==5.20.1", "trl==1.14.1", "addict", "art", "axolotl-contribs-lgpl==0.0.7",
#     "axolotl-contribs-mit==0.0.6", "bitsandbytes==0.50.2", "colorama", "einops", "evaluate==0.4.1", "fire",
#     "kernels>=0.17.2,<0.18", "langdetect==1.0.9", "mistral-common==1.12.0", "numba", "optimum==1.16.2",
#     "posthog==6.7.11", "pydantic==2.13.5", "python-dotenv==1.0.1", "requests", "schedulefree==1.4.1", "scipy",
#     "sentencepiece", "tensorboard", "fastcore", "torchao==0.18.0", "wandb", "zstandard==0.22.0",
# ]
# ///
"""axolotl 0.21: full training and a LoRA on 2 ranks with FSDP2 and SHARDED_STATE_DICT, resumed on 1 rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import proof

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
LORA = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 16,
    "lora_dropout": 0,
    "lora_target_modules": ["q_proj", "v_proj"],
}


def write_config(root: Path, name: str, ranks: int, **more: Any) -> Path:
    """Write a configuration of axolotl, in JSON, which is YAML too."""
    config = {
        "base_model": str(root / "base"), "output_dir": str(root / name),
        "datasets": [{"path": str(root / "rows.jsonl"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(root / "prepared"), "sequence_len": 32, "val_set_size": 0,
        "micro_batch_size": 4 // ranks, "gradient_accumulation_steps": 1,
        "max_steps": proof.STEPS, "save_steps": proof.SAVED, "logging_steps": 1, "learning_rate": 1e-2,
        "lr_scheduler": "linear", "optimizer": "adamw_torch", "seed": 3,
        "bf16": False, "fp16": False, "tf32": False, "flash_attention": False, "sample_packing": False,
        "fsdp_version": 2,
        "fsdp_config": {
            "state_dict_type": "SHARDED_STATE_DICT", "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "reshard_after_forward": True,
        },
        **more,
    }  # fmt: skip
    path = root / f"{name}.yaml"
    path.write_text(json.dumps(config, indent=1))
    return path


def train(*configs: Path) -> None:
    """Train on this rank, as `axolotl train` does, by each configuration in turn; save the trained weights."""
    import torch

    proof.fsdp_on_cpu()
    import axolotl.train as training
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState, PartialState
    from axolotl.cli.train import do_cli

    save = training.save_trained_model

    def keep_weights(cfg: Any, trainer: Any, model: Any) -> None:
        state = {name: value.full_tensor() for name, value in trainer.model.state_dict().items()}
        if trainer.is_world_process_zero():
            torch.save(state, Path(cfg.output_dir) / "trained.pt")
        save(cfg, trainer, model)

    torch.cuda.can_device_access_peer = lambda *_: True  # axolotl asks GPUs without looking for them
    build = ParallelismConfig.build_device_mesh
    ParallelismConfig.build_device_mesh = lambda self, _: build(self, "cpu")  # axolotl asks for "cuda"
    training.save_trained_model = keep_weights
    training.cleanup_distributed = lambda: None  # the ranks go on with the next configuration
    os.environ["ACCELERATE_USE_CPU"] = "true"
    PartialState(cpu=True)
    del sys.argv[1:]
    for config in configs:
        AcceleratorState._reset_state(reset_partial_state=False)
        do_cli(str(config))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort the process at its end


def check_merge(root: Path) -> None:
    """Compare the model in bf16 with the one that axolotl merged."""
    import torch
    from safetensors.torch import load_file

    program = Path(sys.executable).with_name("axolotl")
    proof.call(program, "merge-sharded-fsdp-weights", root / "full.yaml", "--launcher", "python")
    proof.ckptkit("consolidate", root / "full" / f"checkpoint-{proof.STEPS}", root / "bf16", "--dtype", "bf16")
    merged, ours = (load_file(place / "model.safetensors") for place in (root / "full/merged", root / "bf16"))
    assert merged.keys() == ours.keys(), f"names differ: {merged.keys() ^ ours.keys()}"
    for name, tensor in merged.items():
        assert torch.equal(tensor, ours[name]), f"{name}: axolotl's merge and consolidate differ"


def main() -> None:
    with proof.directory() as root:
        proof.write_llama(root / "base")
        proof.write_rows(root / "rows.jsonl", lambda text: {"text": text})
        proof.check_fine_tuning(root, write_config, LORA, title="axolotl, by transformers' Trainer")
        check_merge(root)
    print(
        "axolotl 0.21.0 (full, LoRA): 2 ranks, FSDP2: inspect, verify, consolidate (logits equal, in bf16 the tensors "
        "of merge-sharded-fsdp-weights), reshard to 1 (losses equal)"
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(*map(Path, sys.argv[1:]))
    else:
        main()
