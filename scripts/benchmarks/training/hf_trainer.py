"""Train the benchmark's model with the Trainer of Hugging Face, by FSDP2 or DDP. Run by torchrun, a rank each.

`TrainingArguments(fsdp=True)` is not what shards here: Accelerate (1.15) knows FSDP on accelerators only, and makes DDP
of it on the CPU without a word. Models of transformers (5.23) can be sharded by FSDP2 as they are loaded, which the
Trainer knows and leaves as it is; that works on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

from scripts.benchmarks.training.watch import Watch


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences in the order in which they are trained on, each with the targets that are its own."""

    def __init__(self, path: Path) -> None:
        self.inputs, self.targets = torch.load(path)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        targets = self.targets[place]
        # `shift_labels` are shifted already, and so count all; of `labels` alone the first would be lost
        return {"input_ids": self.inputs[place], "labels": targets, "shift_labels": targets}


class Watched(Trainer):  # type: ignore[misc]
    """A Trainer that keeps what its steps returned: this rank's part of the mean loss over all."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts: list[Tensor] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take a step."""
        loss: Tensor = super().training_step(*args, **kwargs)
        self.parts.append(loss)
        return loss


class Ends(TrainerCallback):  # type: ignore[misc]
    """A callback that tells a watch when a step has ended, its optimizer's part too."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Tell the watch."""
        self.watch.note(0.0)


def train(home: Path, settings: dict[str, Any], *, sharded: bool) -> None:
    """Train, and leave a report."""
    ranks = int(os.environ["WORLD_SIZE"])
    arguments = TrainingArguments(
        output_dir=str(home / "run"),
        use_cpu=True,
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["batch_size"] // ranks,
        train_sampling_strategy="sequential",
        learning_rate=settings["lr"],
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=settings["warmup"],
        weight_decay=settings["weight_decay"],
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=settings["clip"],
        optim="adamw_torch_fused",
        seed=settings["seed"],
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    watch = Watch()
    shards = {"distributed_config": DistributedConfig(fsdp_size=ranks)} if sharded else {}
    model = LlamaForCausalLM.from_pretrained(home / "model", dtype=torch.float32, attn_implementation="sdpa", **shards)
    trainer = Watched(model, arguments, train_dataset=Sequences(home / "sequences.pt"), callbacks=[Ends(watch)])
    trainer.train()
    require(trainer, sharded=sharded)
    parts = torch.stack(trainer.parts)
    dist.all_reduce(parts, dist.ReduceOp.AVG)
    watch.losses = parts.tolist()
    watch.tell(home)


def require(trainer: Trainer, *, sharded: bool) -> None:
    """Raise unless the model was trained by what the table says that it was trained by."""
    model = trainer.model_wrapped
    kind = FSDPModule if sharded else DistributedDataParallel
    for unit in (model, *model.model.layers) if sharded else (model,):
        if not isinstance(unit, kind):
            raise SystemExit(f"the Trainer trained a {type(unit).__name__}, which is no {kind.__name__}")


def main() -> None:
    """Train as one of torchrun's ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["fsdp2", "ddp"])
    parser.add_argument("settings", type=Path)
    options = parser.parse_args()
    settings = tomllib.loads(options.settings.read_text())
    train(options.settings.parent, settings, sharded=options.kind == "fsdp2")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads, which DTensor keeps alive, now and then abort a process that ends by itself


if __name__ == "__main__":
    main()
