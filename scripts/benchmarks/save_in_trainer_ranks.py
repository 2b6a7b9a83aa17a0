"""One rank of `save_in_trainer`: trains a few steps, and says how long the training waited for its saves."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import accelerate
import lightning
import torch
import torch.distributed as dist
import transformers
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from ckptkit.integrations.accelerate import BackgroundAccelerator
from ckptkit.integrations.lightning import BackgroundModelParallelStrategy
from ckptkit.integrations.trainer import BackgroundTrainer
from scripts.benchmarks.shapes import llama_of

SAVES = 3
ROWS: Any = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 16

Timed = Callable[[Callable[..., None], Callable[[], None]], Callable[..., None]]


def make_model(size_gb: float) -> Any:
    """Return a Llama that, with two moments of each parameter, takes so many GB in fp32."""
    shapes = llama_of(size_gb * 1e9 / 12)
    words, hidden = shapes["model.embed_tokens.weight"]
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=hidden, intermediate_size=shapes["model.layers.0.mlp.up_proj.weight"][0],
        num_hidden_layers=sum(name.endswith("input_layernorm.weight") for name in shapes),
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 256,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def use_fsdp2(accelerator: Any) -> None:
    """Make an Accelerator use FSDP2, which it turns on for accelerators only, unless it is told."""
    for state in (accelerate.PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
    )  # fmt: skip


def in_trainer(out: Path, model: Any, timed: Timed, *, in_background: bool) -> None:
    """Train with transformers' Trainer."""
    arguments = transformers.TrainingArguments(
        output_dir=str(out), max_steps=SAVES + 1, save_steps=1, per_device_train_batch_size=1, report_to=[],
        dataloader_pin_memory=False, disable_tqdm=True, use_cpu=True, save_total_limit=1,
    )  # fmt: skip
    kind = BackgroundTrainer if in_background else transformers.Trainer
    trainer: Any = kind(model=model, args=arguments, train_dataset=ROWS)
    use_fsdp2(trainer.accelerator)
    trainer.is_fsdp_enabled = True
    wait = trainer.wait_for_save if in_background else lambda: None
    trainer._save_checkpoint = timed(trainer._save_checkpoint, wait)
    trainer.train()


def in_accelerate(out: Path, model: Any, timed: Timed, *, in_background: bool) -> None:
    """Train in a plain loop with Accelerate."""
    accelerator = BackgroundAccelerator(cpu=True, keep_last=1) if in_background else accelerate.Accelerator(cpu=True)
    use_fsdp2(accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    save = timed(accelerator.save_state, accelerator.wait_for_save if in_background else lambda: None)
    for step in range(SAVES + 1):
        accelerator.backward(model(**{name: row[None] for name, row in ROWS[0].items()}).loss)
        optimizer.step()
        save(str(out / f"step_{step}"))


class Module(lightning.LightningModule):
    """A module around a Llama."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def configure_model(self) -> None:
        for layer in (*self.model.model.layers, self.model):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, batch: Any, _index: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def in_lightning(out: Path, model: Any, timed: Timed, *, in_background: bool) -> None:
    """Train with Lightning's Trainer."""
    kind = BackgroundModelParallelStrategy if in_background else ModelParallelStrategy
    strategy: Any = kind(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(out, every_n_train_steps=1)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_steps=SAVES + 1, logger=False, callbacks=[checkpoints],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    wait = strategy.wait_for_save if in_background else lambda: None
    trainer.save_checkpoint = timed(trainer.save_checkpoint, wait)  # type: ignore[method-assign]
    trainer.fit(Module(model), torch.utils.data.DataLoader(ROWS))


LOOPS = {"trainer": in_trainer, "accelerate": in_accelerate, "lightning": in_lightning}


def main() -> None:
    """Train, and print the median of all saves but the first, and the memory of all ranks."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--in", dest="library", choices=LOOPS)
    parser.add_argument("--by", choices=("itself", "background"))
    parser.add_argument("--size-gb", type=float)
    options = parser.parse_args()
    seconds = []

    def timed(save: Callable[..., None], wait: Callable[[], None]) -> Callable[..., None]:
        """Return a save that is timed, and that waits afterwards, outside of the time, for one in the background."""

        def save_and_wait(*arguments: Any, **more: Any) -> None:
            dist.barrier()
            began = time.perf_counter()
            save(*arguments, **more)
            seconds.append(time.perf_counter() - began)
            wait()

        return save_and_wait

    model = make_model(options.size_gb)
    LOOPS[options.library](options.out, model, timed, in_background=options.by == "background")
    peaks = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": median(seconds[1:]), "peak": sum(peaks)}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process on its way out (torch 2.13)


if __name__ == "__main__":
    main()
