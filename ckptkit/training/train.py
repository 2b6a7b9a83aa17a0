"""Train from Python as `ckptkit train` does: settings from a file or the resumed run, on several processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.run import RunFolder
from ckptkit.io.destination import to_destination
from ckptkit.io.path import drop_cached_listing, to_path
from ckptkit.training import loop
from ckptkit.training.config import TrainConfig, parse_settings, settings_from_file, settings_of_resumed_run
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
        settings_of_resumed_run(root, resume) if config is None else settings_from_file(to_path(config), resume)
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

    launch(partial(loop.train_rank, chosen), nproc, relay, handle_interrupt)
    if was_interrupted:
        raise KeyboardInterrupt
    return RunFolder(drop_cached_listing(root)).latest()
