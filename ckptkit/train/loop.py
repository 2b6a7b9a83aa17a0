"""The loop: batches in, steps and checkpoints out. Every number it reports is the same on all ranks; prints nothing."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from ckptkit.errors import CkptError, Corrupt, Mismatch, Occupied, Usage, translate_os_errors
from ckptkit.runs import Run
from ckptkit.train.config import TrainConfig
from ckptkit.train.data import Batch, Corpus, read_text, share
from ckptkit.train.launch import Report
from ckptkit.train.llama import Llama
from ckptkit.train.model_config import ModelConfig
from ckptkit.train.ranks import Place, on_rank_0, process_group
from ckptkit.train.shard import build_model
from ckptkit.train.state import CONFIG, Progress, load, save

METRICS = "metrics.jsonl"
LAST_LR = 0.1  # of the highest


@dataclass(frozen=True, slots=True)
class Step:
    """One step as all ranks see it: mean loss per token, gradient norm before clipping, tokens since the run began."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_second: float
    checkpoint: str | None


def train(config: TrainConfig, place: Place, report: Report) -> None:
    """Train as one of the ranks; rank 0 reports each `Step`. Resumes from `config.resume`, bit for bit, if given."""
    if config.batch_size < place.world_size:
        raise Usage(f"batch_size {config.batch_size} leaves some of {place.world_size} ranks without a sequence")
    with process_group(place, config.device) as mesh:
        corpus = Corpus(read_text(config.data), config.sequence_length, config.seed)
        model = build_model(config.model, config.seed, mesh)
        optimizer = make_optimizer(model, config)
        progress = resume(config, model, optimizer)
        on_rank_0(partial(prepare, config, progress))
        while progress.step < config.steps:
            step, progress = advance(config, corpus, model, optimizer, progress)
            if place.rank == 0:
                record(config.run, step)
                report(step)


def advance(
    config: TrainConfig, corpus: Corpus, model: Llama, optimizer: Optimizer, progress: Progress
) -> tuple[Step, Progress]:
    """Take one step, and save a checkpoint where one is due."""
    started = time.perf_counter()
    places = range(progress.sequences, progress.sequences + config.batch_size)
    batch = corpus.batch(share(places, dist.get_rank(), dist.get_world_size()))
    lr = learning_rate(progress.step, config)
    loss, norm, tokens = learn(model, optimizer, batch, lr=lr, clip=config.clip)
    seconds = time.perf_counter() - started
    progress = Progress(config.seed, progress.step + 1, places.stop, progress.tokens + tokens)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise CkptError(
            f"step {progress.step}: the loss is {loss} and the gradient norm {norm}; the run stops here",
            path=config.run,
            hint="resume from the latest checkpoint with a lower `--lr` or a longer `--warmup`",
        )
    step = Step(progress.step, loss, norm, lr, progress.tokens, tokens / seconds, None)
    if progress.step == config.steps or (config.save_every and progress.step % config.save_every == 0):
        path = Run(config.run).checkpoint(progress.step)
        save(path, model, optimizer, progress)
        step = replace(step, checkpoint=str(path))
    return step, progress


def learn(model: Llama, optimizer: Optimizer, batch: Batch, *, lr: float, clip: float) -> tuple[float, float, int]:
    """Update the weights by the batches of all ranks; gives their mean loss per token, gradient norm and tokens."""
    device = model.lm_head.weight.device
    batch = batch.to(device)
    logits = model(batch.inputs)
    loss_sum = F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten(), reduction="sum")
    totals = torch.tensor([float(loss_sum.detach()), batch.tokens], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    loss, tokens = float(totals[0] / totals[1]), int(totals[1])
    # A rank's mean would weigh the tokens of a short batch more. FSDP averages over ranks: undo that, divide by tokens.
    (loss_sum * (dist.get_world_size() / tokens)).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return loss, whole(norm), tokens


def whole(norm: Tensor) -> float:
    """The value of a norm over all shards: a collective, so every rank asks."""
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def make_optimizer(model: Llama, config: TrainConfig) -> AdamW:
    """AdamW on the fp32 shards; matrices decay, the norms' weights do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return AdamW(groups, lr=config.lr, betas=(0.9, 0.95))


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of the step that follows `step` steps: a line up over `warmup`, then half a cosine down to a tenth."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (LAST_LR + (1 - LAST_LR) * (1 + math.cos(math.pi * done)) / 2)


def resume(config: TrainConfig, model: Llama, optimizer: Optimizer) -> Progress:
    """Load the checkpoint to go on from, if there is one to; refuse one of another model or seed."""
    if config.resume is None:
        return Progress(config.seed)
    if ModelConfig.read(config.resume / CONFIG) != config.model:
        raise Mismatch("the checkpoint is of another model", path=config.resume / CONFIG)
    progress = load(config.resume, model, optimizer)
    if progress.seed != config.seed:
        raise Mismatch(
            f"the checkpoint was trained with seed {progress.seed}, not {config.seed}: its data has another order",
            path=config.resume,
            hint=f"use `--seed {progress.seed}`",
        )
    optimizer.param_groups[0]["weight_decay"] = config.weight_decay  # as asked for now, not as saved
    return progress


def prepare(config: TrainConfig, progress: Progress) -> None:
    """Make the run directory with its config.json; forget the metrics of steps that will be taken again."""
    metrics = config.run / METRICS
    if config.resume is None and Run(config.run).latest() is not None:
        hint = "go on with `--resume`, or name another run"
        raise Occupied("the run has checkpoints already", path=config.run, hint=hint)
    with translate_os_errors(config.run):
        config.run.mkdir(parents=True, exist_ok=True)
        (config.run / CONFIG).write_text(config.model.to_json())
        kept = [line for line in whole_lines(metrics) if step_of(line, metrics) <= progress.step]
        metrics.with_suffix(".tmp").write_text("".join(kept))
        os.replace(metrics.with_suffix(".tmp"), metrics)


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that were written to their end; none where there is no file."""
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def step_of(line: str, path: Path) -> int:
    """The step whose metrics a line holds."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError) as error:
        hint = "move the file away to go on without the steps so far"
        raise Corrupt(f"not the metrics of a step: {line.strip()[:80]}", path=path, hint=hint) from error


def record(run: Path, step: Step) -> None:
    """Append a step to the run's metrics.jsonl."""
    with translate_os_errors(run), (run / METRICS).open("a") as file:
        file.write(json.dumps(asdict(step)) + "\n")
