"""Tasks that the ranks of a smoke test run. They report facts that a checkpoint does not contain."""

from __future__ import annotations

import signal
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckptkit.storage.terms import local_shards
from ckptkit.training.config import TrainConfig
from ckptkit.training.launch import RankPlace, Report, process_group
from ckptkit.training.loop import DeferredSignal, take_steps
from ckptkit.training.metrics import Log, StepMetrics
from ckptkit.training.shard import param_dtype
from ckptkit.training.start import build_trainer_and_run
from ckptkit.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class RankAccount:
    """The report of a rank about a run: its steps, and its state at the end.

    `states` has the states of the scheduler and of `Progress` by step: at the start and at each checkpoint.
    `parameters` and `optimizer` are the sizes of this rank's shards in bytes, `peak` is the peak memory of its GPU in
    bytes (None on the CPU), and `crc32` is the checksum of its parameter shards.
    """

    rank: int
    steps: tuple[StepMetrics, ...] = ()
    states: Mapping[int, tuple[dict[str, Any], dict[str, int]]] = field(default_factory=dict)
    parameters: int = 0
    optimizer: int = 0
    peak: int | None = None
    computes_in: str = "float32"
    crc32: int = 0


def train_and_report(config: TrainConfig, place: RankPlace, report: Report) -> None:
    """Train a run to its last step, like `ckptkit.training.loop`, and report a `RankAccount`."""
    with process_group(place, config.device, deterministic=True) as mesh:
        trainer, run = build_trainer_and_run(config, mesh)
        states = {trainer.progress.step: scheduler_and_progress_state(trainer)}
        steps = []
        with run, Log(config, place.rank) as log:
            for step in take_steps(config, trainer, run, DeferredSignal(signal.SIGTERM)):
                log.write_step(step)
                steps.append(step)
                if step.checkpoint:
                    states[step.step] = scheduler_and_progress_state(trainer)
        crc = 0
        for part in (part for tensor in trainer.model.parameters() for part in local_shards(tensor)):
            crc = zlib.crc32(part.detach().cpu().contiguous().view(torch.uint8).numpy().data, crc)
        averages = [state[name] for state in trainer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        report(
            RankAccount(
                place.rank,
                tuple(steps),
                states,
                nbytes_of_shards(trainer.model.parameters()),
                nbytes_of_shards(averages),
                max((step.memory_allocated or 0 for step in steps), default=0) or None,
                str(param_dtype(config, trainer.device.type)).removeprefix("torch."),
                crc,
            )
        )


def load_and_save(config: TrainConfig, place: RankPlace, _report: Report) -> None:
    """Load the checkpoint that the configuration resumes from, and save it unchanged into the configuration's run."""
    with process_group(place, config.device) as mesh:
        trainer, run = build_trainer_and_run(config, mesh)
        with run:
            trainer.save(run)


def take_step_from_each(config: TrainConfig, checkpoints: Sequence[Path], place: RankPlace, report: Report) -> None:
    """Resume from each checkpoint for one step, and report the steps. Saves nothing."""
    with process_group(place, config.device, deterministic=True) as mesh:
        trainers = (
            build_trainer_and_run(replace(config, resume=str(checkpoint)), mesh)[0] for checkpoint in checkpoints
        )
        report(RankAccount(place.rank, tuple(trainer.step() for trainer in trainers)))


def scheduler_and_progress_state(trainer: Trainer) -> tuple[dict[str, Any], dict[str, int]]:
    return trainer.scheduler.state_dict(), trainer.progress.state_dict()


def nbytes_of_shards(tensors: Iterable[Tensor]) -> int:
    return sum(part.nbytes for tensor in tensors for part in local_shards(tensor))
