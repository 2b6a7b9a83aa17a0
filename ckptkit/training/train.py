"""Train as the command line does: with settings from a file, or of the run that goes on, and on several processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.run import RunFolder
from ckptkit.io.destination import to_destination
from ckptkit.io.path import refresh, to_path
from ckptkit.training import loop
from ckptkit.training.config import TrainConfig, check_settings, find_settings, settings_in
from ckptkit.training.launch import launch
from ckptkit.training.loop import Note
from ckptkit.training.metrics import StepMetrics


def train(
    run: str | Path = "run",
    *,
    resume: str | None = None,
    config: str | Path | None = None,
    nproc: int | None = None,
    report: Callable[[StepMetrics | Note], None] | None = None,
    **settings: Any,
) -> Checkpoint | None:
    """Train a causal language model with FSDP, and return the latest complete checkpoint of the run, if it has one.

    `run` is a local directory or `s3://bucket/prefix`. `settings` are fields of `TrainConfig`; `config` is a TOML file
    of them. `resume` is "auto" or a checkpoint: the run then keeps the settings that it was started with, unless you
    pass others. Starts `nproc` processes, by default one per GPU, or one; under torchrun this process is one of the
    ranks. `report` gets each step of rank 0 and other events. Raises the `CkptError` of a rank, and after a Ctrl-C
    `KeyboardInterrupt`, when the current step is saved; at the second one at once.
    """
    root = to_destination(run)
    found = find_settings(root, resume) if config is None else settings_in(to_path(config), resume)
    chosen = TrainConfig(run=root, resume=resume, **{**found, **check_settings(settings)})
    heard = Heard(report or (lambda _: None))
    launch(partial(loop.train, chosen), nproc, heard.report, heard.interrupt)
    if heard.was_interrupted:
        raise KeyboardInterrupt
    return RunFolder(refresh(root)).latest()


class Heard:
    """What was heard of the ranks, passed on to `tell`, and whether a Ctrl-C let them save first."""

    def __init__(self, tell: Callable[[StepMetrics | Note], None]) -> None:
        self._tell = tell
        self._has_begun = False
        self.was_interrupted = False

    def report(self, message: StepMetrics | Note) -> None:
        """Pass a message on."""
        self._has_begun = True
        self._tell(message)

    def interrupt(self) -> bool:
        """Return whether the ranks have anything to save, and say so."""
        if self._has_begun:
            self.was_interrupted = True
            text = "saving after this step; press Ctrl-C again to stop without a save"
            # A signal may come while a line is printed: another thread waits for its end, this one could not.
            threading.Thread(target=self._tell, args=(Note(text),)).start()
        return self._has_begun
