"""Train ckptkit's Llama in its own loop, or in a plain one without FSDP; prepare what all loops begin with."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from ckptkit.training.config import TrainConfig, read_settings
from ckptkit.training.data.batches import open_corpus
from ckptkit.training.data.tokenizer import choose_tokenizer
from ckptkit.training.data.tokens import prepare_tokens
from ckptkit.training.initial import initialize_model
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from ckptkit.training.loop import DeferredSignal, take_steps
from ckptkit.training.metrics import Log, flops_per_token, peak_flops, peak_memory_since_last_call
from ckptkit.training.models.blueprint import Blueprint, choose_blueprint
from ckptkit.training.shard import compile_blocks, matmul_and_frozen_numel, param_dtype
from ckptkit.training.start import build_trainer_and_run
from ckptkit.training.trainer import make_scheduler
from scripts.benchmarks.training.watch import Watch

FACTS = "facts.json"


def prepare(home: Path, config: TrainConfig) -> None:
    """Make the weights that all loops begin with, and the sequences in ckptkit's order; write down the facts."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    blueprint = choose_blueprint(config.model)
    with torch.device(config.device):
        model = blueprint.build()
    initialize_model(blueprint, model, config.seed)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(weights, home / "model" / "model.safetensors", {"format": "pt"})
    tokens = prepare_tokens(config.data, choose_tokenizer(None), home)
    corpus = open_corpus(tokens, length=config.sequence_length, seed=config.seed)
    sequences = corpus.batch_at(range(config.steps * config.batch_size))
    if sequences.loss_token_count < sequences.inputs.numel():
        raise SystemExit("some targets do not count: the loops would not agree on how many tokens a step has")
    torch.save((sequences.inputs, sequences.targets), home / "sequences.pt")
    (home / FACTS).write_text(json.dumps(describe(config, blueprint, model)))


def describe(config: TrainConfig, blueprint: Blueprint, model: nn.Module) -> dict[str, object]:
    """Return the facts that a table is to be read with."""
    multiplied, _ = matmul_and_frozen_numel(model)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_token": flops_per_token(
            multiplied, blueprint.layers, blueprint.attention_width, config.sequence_length
        ),
        "peak_flops": peak_flops(config.device, param_dtype(config, config.device)),
        "gpu": torch.cuda.get_device_name() if config.device == "cuda" else None,
    }


def ours(home: Path, config: TrainConfig, place: RankPlace, _: Report) -> None:
    """Train as `ckptkit train` does, a rank each, up to the step that would save a checkpoint."""
    with process_group(place, config.device, deterministic=config.deterministic) as mesh:
        watch = Watch()
        trainer, run = build_trainer_and_run(config, mesh)
        with run, Log(config, place.rank) as log:
            for step in islice(take_steps(config, trainer, run, DeferredSignal(signal.SIGTERM)), config.steps - 1):
                log.write_step(step)
                watch.note(step.loss, step.memory_allocated, step.memory_reserved)
        watch.tell(home)


def plain(home: Path, config: TrainConfig) -> None:
    """Train in one process without FSDP: fp32 weights, and where it computes in bf16 a copy of them that does."""
    device, dtype = torch.device(config.device), param_dtype(config, config.device)
    watch = Watch()
    blueprint = choose_blueprint(config.model)
    with device:
        model = blueprint.build()
    model.load_state_dict(load_file(home / "model" / "model.safetensors"), strict=False)  # what is tied is there once
    if config.compile:
        compile_blocks(blueprint.transformer_blocks(model))
    weights = [parameter.detach() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.detach().to(dtype)
    optimizer = make_optimizer(config, weights)
    scheduler = make_scheduler(config, optimizer)
    for inputs, targets in islice(batches(home, config), config.steps - 1):
        loss = learn(model, inputs.to(device), targets.to(device))
        hand_over(model, weights)
        torch.nn.utils.clip_grad_norm_(weights, config.clip)
        optimizer.step()
        scheduler.step()
        if dtype != torch.float32:
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), weights)
        watch.note(loss, *peak_memory_since_last_call(device.type))
    watch.tell(home)


def make_optimizer(config: TrainConfig, weights: list[Tensor]) -> AdamW:
    """Return AdamW as ckptkit's loop has it: matrices decay, norms do not."""
    groups = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [weight for weight in weights if weight.ndim == 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def learn(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Go forward and backward; wait for a GPU where ckptkit's loop does, before the optimizer. Return the mean loss."""
    logits = model(inputs)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss)


def hand_over(model: nn.Module, weights: list[Tensor]) -> None:
    """Give the weights the model's gradients."""
    for weight, parameter in zip(weights, model.parameters(), strict=True):
        weight.grad = None if parameter.grad is None else parameter.grad.float()
        parameter.grad = None


def batches(home: Path, config: TrainConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the global batches of inputs and targets, each int64 [batch_size, sequence_length]."""
    inputs, targets = torch.load(home / "sequences.pt")
    return zip(inputs.split(config.batch_size), targets.split(config.batch_size), strict=True)


def main() -> None:
    """Do one of the works, on the settings of a file that lies in its room."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=["prepare", "ours", "plain"])
    parser.add_argument("settings", type=Path)
    parser.add_argument("--ranks", type=int)
    options = parser.parse_args()
    home = options.settings.parent
    config = TrainConfig(run=home / "run", **read_settings(options.settings))
    if options.work == "ours":
        launch(partial(ours, home, config), options.ranks, lambda _: None)
    else:
        {"prepare": prepare, "plain": plain}[options.work](home, config)


if __name__ == "__main__":
    main()
