"""One rank of `save_in_trainer`: trains a few steps, and says how long the Trainer waited for its saves."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType

from ckptkit.integrations.trainer import BackgroundTrainer
from scripts.benchmarks.shapes import llama_of

SAVES = 3
TRAINERS = {"trainer": transformers.Trainer, "background": BackgroundTrainer}


def make_trainer(trainer_class: Any, out: Path, size_gb: float) -> Any:
    """Return a Trainer whose model, with two moments of each parameter, takes so many GB in fp32."""
    shapes = llama_of(size_gb * 1e9 / 12)
    words, hidden = shapes["model.embed_tokens.weight"]
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=hidden, intermediate_size=shapes["model.layers.0.mlp.up_proj.weight"][0],
        num_hidden_layers=sum(name.endswith("input_layernorm.weight") for name in shapes),
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 256,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        output_dir=str(out), max_steps=SAVES + 1, save_steps=1, per_device_train_batch_size=1, report_to=[],
        dataloader_pin_memory=False, disable_tqdm=True, use_cpu=True, save_total_limit=1,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 16
    trainer = trainer_class(model=transformers.LlamaForCausalLM(config), args=arguments, train_dataset=rows)
    state = trainer.accelerator.state  # which turns FSDP on for accelerators only, unless it is told
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
    )  # fmt: skip
    trainer.is_fsdp_enabled = True
    return trainer


def main() -> None:
    """Train, and print the median of all saves but the first, and the memory of all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--by", choices=TRAINERS)
    parser.add_argument("--size-gb", type=float)
    options = parser.parse_args()
    trainer = make_trainer(TRAINERS[options.by], options.out, options.size_gb)
    save, seconds = trainer._save_checkpoint, []

    def timed(*arguments: Any) -> None:
        """Save as the Trainer does, and wait afterwards, outside of the time, for a save in the background."""
        dist.barrier()
        began = time.perf_counter()
        save(*arguments)
        seconds.append(time.perf_counter() - began)
        if options.by == "background":
            trainer.wait_for_save()

    trainer._save_checkpoint = timed
    trainer.train()
    peaks = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": median(seconds[1:]), "peak": sum(peaks)}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process on its way out (torch 2.13)


if __name__ == "__main__":
    main()
