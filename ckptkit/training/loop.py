"""Train: `train` starts the ranks; each runs `train_rank` from the first step, or from a checkpoint, to the last."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.run import RunFolder
from ckptkit.io.destination import to_destination
from ckptkit.io.path import drop_cached_listing, to_path
from ckptkit.training.config import (
    SAVED_METRICS,
    TrainConfig,
    parse_settings,
    settings_from_file,
    settings_to_resume_with,
    toml_value,
)
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from ckptkit.training.metrics import Log, StepMetrics
from ckptkit.training.saving.run import Run
from ckptkit.training.start import build_trainer_and_run, locked_run
from ckptkit.training.trainer import Trainer
from ckptkit.words import count


@dataclass(frozen=True, slots=True)
class Note:
    """A message about an event between steps; `ended_early` if the run stops before its last step."""

    text: str
    ended_early: bool = False


def train(
    run: str | Path = "run",
    *,
    resume: str | None = None,
    config: str | Path | None = None,
    nproc: int | None = None,
    report: Callable[[StepMetrics | Note], None] | None = None,
    **settings: Any,
) -> Checkpoint | None:
    """Train a causal language model with FSDP. Returns the latest complete checkpoint of the run, None without one.

    `run` is a local directory or `s3://bucket/prefix`. `settings` are fields of `TrainConfig`; `config` is a TOML file
    with such fields. `resume` is "auto" or a checkpoint: the run then keeps the settings that it was started with,
    unless you pass others.

    Starts `nproc` processes, by default one per GPU, or one without GPUs; under torchrun this process is one of the
    ranks. `report` gets each step of rank 0 and other events.

    Raises the `CkptError` of a rank. The first Ctrl-C raises `KeyboardInterrupt` once the current step is saved, the
    second at once.
    """
    root = to_destination(run)
    file_settings = (
        settings_to_resume_with(root, resume) if config is None else settings_from_file(to_path(config), resume)
    )
    chosen = TrainConfig(run=root, resume=resume, **{**file_settings, **parse_settings(settings)})
    callback = report or (lambda _: None)
    has_begun = was_interrupted = False

    def relay(message: StepMetrics | Note) -> None:
        nonlocal has_begun
        has_begun = True
        callback(message)

    def handle_interrupt() -> bool:
        """Return True if the ranks have begun, so that there is a step to save, and report that they will save it."""
        nonlocal was_interrupted
        if has_begun:
            was_interrupted = True
            note = Note("saving after this step; press Ctrl-C again to stop without a save")
            # The signal may interrupt this thread while it prints and holds a lock: print from another thread.
            threading.Thread(target=callback, args=(note,)).start()
        return has_begun

    launch(partial(train_rank, chosen), nproc, relay, handle_interrupt)
    if was_interrupted:
        raise KeyboardInterrupt
    return RunFolder(drop_cached_listing(root)).latest()


def train_rank(config: TrainConfig, place: RankPlace, report: Report) -> None:
    """Train as one of the ranks. Rank 0 reports the `StepMetrics` of each step, and a `Note` for other events."""
    with process_group(place, config.device, deterministic=config.deterministic) as mesh, locked_run(config.run):
        stop_signal = DeferredSignal(signal.SIGTERM, signal.SIGINT)
        report_once = report if place.rank == 0 else lambda _: None  # only rank 0 reports
        before = settings_to_resume_with(config.run, config.resume)
        trainer, run = build_trainer_and_run(config, mesh, lambda text: report_once(Note(text)))
        if trainer.progress.step:
            position = f"{run.root} is at step {trainer.progress.step} of {config.steps}"
            if trainer.progress.step < config.steps:
                changed = [
                    f"{name} {toml_value(value)} -> {toml_value(getattr(config, name))}"
                    for name, value in before.items()
                    if getattr(config, name) != value
                ]
                changes = f"; changed: {', '.join(changed)}" if changed else ""
                report_once(Note(f"resuming on {count(mesh.size(), 'rank')}: {position}{changes}"))
            else:
                report_once(Note(f"nothing to do: {position}"))
        with run, Log(config, place.rank) as log:
            for step in take_steps(config, trainer, run, stop_signal):
                log.write_step(step)
                report_once(step)
        if trainer.progress.step < config.steps:
            report_once(Note("stopped on request, after a save: continue with --resume auto", ended_early=True))


def take_steps(config: TrainConfig, trainer: Trainer, run: Run, stop_signal: DeferredSignal) -> Iterator[StepMetrics]:
    """Yield each step until the last, or until any rank got a stop signal; save checkpoints when due."""
    while trainer.progress.step < config.steps and not trainer.must_stop:
        step = trainer.step(lambda: stop_signal.is_received)
        is_due = step.step == config.steps or (config.save_every and step.step % config.save_every == 0)
        if trainer.must_stop or is_due:
            saved = trainer.save(run, **{name: getattr(step, name) for name in SAVED_METRICS})
            step = replace(step, checkpoint=str(saved))
        yield step


class DeferredSignal:
    """Records signals, so that the current step can be finished and saved first. Ignored signals stay ignored."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self.is_received = False
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._record)

    def _record(self, *_: object) -> None:
        self.is_received = True
