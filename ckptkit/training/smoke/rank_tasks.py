"""Do the work of a smoke run's ranks, and report from each what no checkpoint shows. Judges nothing."""

from __future__ import annotations

import signal
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptkit.training.config import TrainConfig
from ckptkit.training.launch import Report
from ckptkit.training.loop import Asked, advance
from ckptkit.training.metrics import Log, Step
from ckptkit.training.parallel.precision import param_dtype
from ckptkit.training.parallel.ranks import Place, process_group
from ckptkit.training.start import start
from ckptkit.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step as one rank saw it."""

    rank: int
    step: Step


@dataclass(frozen=True, slots=True)
class StateReport:
    """The state of a rank after a step: its scheduler, and its place in the data."""

    rank: int
    step: int
    scheduler: dict[str, Any]
    progress: dict[str, int]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The bytes that a rank holds of parameters and of the optimizer's moments; its GPU's peak (None on the CPU)."""

    rank: int
    parameters: int
    optimizer: int
    peak: int | None
    computes_in: str


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The CRC-32 of all that a rank holds of the parameters."""

    rank: int
    crc32: int


def train_and_report(config: TrainConfig, place: Place, report: Report) -> None:
    """Train a run to its end, as `ckptkit.training.loop` does, and report each step, state and the memory."""
    with process_group(place, config.device, deterministic=True) as mesh:
        trainer, run = start(config, mesh)
        report(report_state(trainer))
        peak = 0
        with run, Log(config, place.rank) as log:
            for step in advance(config, trainer, run, Asked(signal.SIGTERM)):
                log.write(step)
                report(StepReport(place.rank, step))
                if step.checkpoint:
                    report(report_state(trainer))
                peak = max(peak, step.memory_allocated or 0)
        report(report_memory(trainer, peak or None))


def load_and_save(config: TrainConfig, place: Place, report: Report) -> None:
    """Load the checkpoint that the configuration resumes from, and save it unchanged, as one of its own run."""
    with process_group(place, config.device) as mesh:
        trainer, run = start(config, mesh)
        with run:
            trainer.save(run)
        report(report_state(trainer))


def train_replica(config: TrainConfig, place: Place, report: Report) -> None:
    """Take the steps of a configuration, and report the CRC-32 of the parameters."""
    with process_group(place, config.device) as mesh:
        trainer, _ = start(config, mesh)
        while trainer.progress.step < config.steps:
            trainer.step()
        report(ReplicaReport(place.rank, checksum(trainer.model.parameters())))


def step_from_each(config: TrainConfig, checkpoints: Sequence[Path], place: Place, report: Report) -> None:
    """Resume each of some checkpoints for one step, and report it. Saves nothing."""
    with process_group(place, config.device, deterministic=True) as mesh:
        for checkpoint in checkpoints:
            trainer, _ = start(replace(config, resume=str(checkpoint)), mesh)
            report(StepReport(place.rank, trainer.step()))


def report_state(trainer: Trainer) -> StateReport:
    """Return the state of a trainer."""
    progress = trainer.progress
    return StateReport(trainer.rank, progress.step, trainer.scheduler.state_dict(), progress.state_dict())


def report_memory(trainer: Trainer, peak: int | None) -> MemoryReport:
    """Return the bytes that a trainer holds."""
    moments = [state[name] for state in trainer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    dtype = str(param_dtype(trainer.config, trainer.device.type)).removeprefix("torch.")
    return MemoryReport(trainer.rank, nbytes(trainer.model.parameters()), nbytes(moments), peak, dtype)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's part of all tensors."""
    return sum(local(tensor).nbytes for tensor in tensors)


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return the CRC-32 of this rank's part of all tensors."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(local(tensor).detach().cpu().contiguous().view(torch.uint8).numpy().data, crc)
    return crc


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
