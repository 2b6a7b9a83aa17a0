"""Train from the first step, or the latest checkpoint, to the last step. All ranks run this; it prints nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ckptkit.training.config import SAVED_METRICS, TrainConfig
from ckptkit.training.launch import Report
from ckptkit.training.metrics import Log, StepMetrics
from ckptkit.training.parallel.ranks import RankPlace, process_group
from ckptkit.training.saving.run import Run
from ckptkit.training.start import start
from ckptkit.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Note:
    """An event between steps; `ended_early` if it ended the run before its last step."""

    text: str
    ended_early: bool = False


def train(config: TrainConfig, place: RankPlace, report: Report) -> None:
    """Train as one of the ranks; rank 0 reports the `StepMetrics` of each step, and a `Note` now and then."""
    with process_group(place, config.device, deterministic=config.deterministic) as mesh:
        asked = DeferredSignal(signal.SIGTERM, signal.SIGINT)
        tell = report if place.rank == 0 else lambda _: None
        trainer, run = start(config, mesh, lambda text: tell(Note(text)))
        if trainer.progress.step:
            rest = "resuming" if trainer.progress.step < config.steps else "nothing to do"
            tell(Note(f"{rest}: {run.root} is at step {trainer.progress.step} of {config.steps}"))
        with run, Log(config, place.rank) as log:
            for step in advance(config, trainer, run, asked):
                log.write(step)
                tell(step)
        if trainer.progress.step < config.steps:
            tell(Note("stopped on request, after a save: continue with `--resume auto`", ended_early=True))


def advance(config: TrainConfig, trainer: Trainer, run: Run, asked: DeferredSignal) -> Iterator[StepMetrics]:
    """Take step after step to the last, or until a rank is asked to end; save a checkpoint where one is due."""
    stop = False
    while trainer.progress.step < config.steps and not stop:
        step = trainer.step()
        stop = asked.on_any_rank(trainer.device)
        if stop or is_due(config, step.step):
            saved = trainer.save(run, **{name: getattr(step, name) for name in SAVED_METRICS})
            step = replace(step, checkpoint=str(saved))
        yield step


def is_due(config: TrainConfig, step: int) -> bool:
    return step == config.steps or bool(config.save_every and step % config.save_every == 0)


class DeferredSignal:
    """Signals that are remembered, so that the current step is finished and saved first; but for ignored ones."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._asked = False
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self._asked = True

    def on_any_rank(self, device: torch.device) -> bool:
        """Return True on all ranks if any was asked: a collective."""
        asked = torch.tensor(self._asked, dtype=torch.int32, device=device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)
