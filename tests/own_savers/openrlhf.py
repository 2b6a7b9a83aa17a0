# /// script
# requires-python = ">=3.11"
# dependencies = ["ckptkit-fsdp", "torch==2.13.0", "openrlhf==0.11.2", "setuptools"]
#
# [tool.uv]
# override-dependencies = [
#     "torch==2.13.0",
#     "flash-attn; sys_platform == 'never'",
#     "bitsandbytes; sys_platform == 'never'",
#     "ray; sys_platform == 'never'",
#     "wandb; sys_platform == 'never'",
# ]
#
# [tool.uv.sources]
# ckptkit-fsdp = { path = "../..", editable = true }
# ///
"""OpenRLHF 0.11: `openrlhf.cli.train_sft` on 2 ranks with DeepSpeed's ZeRO 2 and ZeRO 3, resumed on 1 rank."""

from __future__ import annotations

import json
import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import proof

STAGES = (2, 3)


def on_cpu() -> None:
    """Let OpenRLHF train on a CPU: it asks for GPUs, for flash-attn and for a fused AdamW without looking for them."""
    import deepspeed
    import torch
    from torch.distributed import device_mesh

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.set_device = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    init_mesh, initialize = device_mesh.init_device_mesh, deepspeed.initialize

    def initialize_with_torchs_adamw(*, config: dict[str, Any], **options: Any) -> Any:
        config["optimizer"]["params"]["torch_adam"] = True
        return initialize(config=config, **options)

    device_mesh.init_device_mesh = lambda _, *shape, **options: init_mesh("cpu", *shape, **options)
    deepspeed.initialize = initialize_with_torchs_adamw
    unused = ("index_first_axis", "pad_input", "rearrange", "unpad_input", "all_gather")
    for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
        sys.modules[name].__dict__.update(dict.fromkeys(unused))


def train(root: Path, output: Path, stage: str, *resumed: Path) -> None:
    """Train on this rank, as `python -m openrlhf.cli.train_sft` does; OpenRLHF logs the losses and saves the model."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    on_cpu()
    import torch

    options = {
        "model.model_name_or_path": root / "base", "data.dataset": root / "rows.jsonl", "data.input_key": "input",
        "data.output_key": "output", "data.input_template": "{} ", "data.max_len": 32, "data.max_samples": 16,
        "train.max_epochs": 1, "train.batch_size": 4, "train.micro_batch_size": 4 // int(os.environ["WORLD_SIZE"]),
        "ckpt.output_dir": output / "model", "ckpt.path": resumed[0] if resumed else output / "ckpt",
        "ckpt.save_steps": proof.SAVED, "logger.tensorboard_dir": output, "logger.wandb.run_name": "losses",
        "ds.zero_stage": stage, "ds.attn_implementation": "eager", "adam.lr": 1e-2,
    }  # fmt: skip
    sys.argv[1:] = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    sys.argv += ["--ckpt.load_enable", "--ds.use_universal_ckpt", "--ckpt.disable_ds"] if resumed else []
    runpy.run_module("openrlhf.cli.train_sft", run_name="__main__", alter_sys=True)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort the process at its end


def logged_losses(run: Path) -> Path:
    """Write the losses that OpenRLHF logged for tensorboard, by step, and return the file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(run / "losses")).Reload()
    losses = {str(event.step): event.value for event in log.Scalars("train/gpt_loss")}
    (run / "losses.json").write_text(json.dumps(losses))
    return run / "losses.json"


def check_export(stage: int, run: Path, out: Path) -> None:
    """Compare the model that ckptkit writes with the one that OpenRLHF saved at the end."""
    import torch
    from safetensors.torch import load_file

    expected, found = (load_file(place / "model.safetensors") for place in (run / "model", out))
    assert expected.keys() == found.keys(), f"ZeRO {stage}: names differ: {expected.keys() ^ found.keys()}"
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), f"ZeRO {stage}: {name}: OpenRLHF's model and consolidate differ"


def main() -> None:
    with proof.directory() as root:
        proof.write_llama(root / "base")
        proof.write_rows(root / "rows.jsonl", lambda text: {"input": "w1", "output": text})
        for stage in STAGES:
            run, resumed, universal = (root / f"{name}-{stage}" for name in ("run", "resumed", "universal"))
            proof.ranks(2, root, run, stage)
            saved, last = (run / "ckpt" / f"global_step{step}" for step in (proof.SAVED, proof.STEPS))
            said = proof.ckptkit("inspect", last)
            assert "trainer: OpenRLHF" in said, said
            proof.ckptkit("verify", last)
            proof.ckptkit("consolidate", last, root / f"out-{stage}", "--base", root / "base", "--dtype", "bf16")
            check_export(stage, run, root / f"out-{stage}")
            proof.ckptkit("convert", saved, universal, "--to", "universal")
            proof.ranks(1, root, resumed, stage, universal)
            # in bf16, sums depend on the number of ranks
            proof.check_losses(f"ZeRO {stage}", logged_losses(run), logged_losses(resumed), tolerance=1e-3)
    print(
        "OpenRLHF 0.11.2: 2 ranks, ZeRO 2 and 3: inspect, verify, consolidate (tensors equal), convert to universal, "
        "resumed on 1 (losses equal in bf16)"
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], *map(Path, sys.argv[4:]))
    else:
        main()
