"""Handle each checkpoint that transformers' Trainer saves, beside the training: manifest, verification, consolidation.

Trainer(..., callbacks=[CkptkitCallback()])
"""

from __future__ import annotations

import atexit
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

LOG = "ckptkit.log"
SHARDS = "pytorch_model_fsdp_0"  # the directory in a checkpoint that FSDP's shards are in
COMMANDS = ("manifest {ckpt} --overwrite", "verify {ckpt}", "consolidate {ckpt} {out}")
_logger = logging.getLogger(__name__)


class CkptkitCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that lets `ckptkit watch` handle each checkpoint in a process of its own, by `commands` of ckptkit.

    By default each gets a manifest, is verified, and becomes a Hugging Face model in `exported` of the output
    directory, or in `out`. It happens on the first of all ranks alone, and off the training's path: a save only starts
    the process. The end of the training waits for it; that of several ranks does not, as the others may need the first,
    but its process does when it ends. What fails is tried again, and is then a warning in the log of the training; it
    never ends the training. What the commands print is in `ckptkit.log` of the output directory.
    """

    def __init__(self, commands: Sequence[str] = COMMANDS, *, out: str | Path | None = None) -> None:
        self.commands = tuple(commands)
        self.out = out
        self._process: subprocess.Popen[bytes] | None = None

    def on_save(self, args: Any, state: Any, _control: Any, **parts: Any) -> None:
        """Start handling what has been saved, unless that of an earlier save still goes on."""
        if not state.is_world_process_zero:
            return
        describe_model(Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"), parts)
        if self._process is None or self._process.poll() is not None:
            self._report(args.output_dir)
            self._start(args.output_dir)

    def on_train_end(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Wait until all checkpoints have been handled; as one of several ranks, when this process ends."""
        if not state.is_world_process_zero:
            return
        if args.world_size == 1:
            self._finish(args.output_dir)
        else:
            atexit.unregister(self._finish)
            atexit.register(self._finish, str(Path(args.output_dir).absolute()))

    def _finish(self, run: str) -> None:
        """Wait until all checkpoints have been handled, those too that were saved meanwhile."""
        self._report(run)
        self._start(run)  # for what was saved while that was at work
        self._report(run)

    def _start(self, run: str) -> None:
        words = [sys.executable, "-m", "ckptkit", "watch", run, "--once", "--every", "1"]
        words += [word for command in self.commands for word in ("--do", command)]
        words += [] if self.out is None else ["--out", str(self.out)]
        try:
            with Path(run, LOG).open("ab") as log:
                self._process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            _logger.warning("ckptkit did not start, and nothing was done with the checkpoints of %s: %s", run, error)

    def _report(self, run: str) -> None:
        """Wait for the process that is at work, if any, and say so if it failed."""
        process, self._process = self._process, None
        if process is not None and process.wait() != 0:
            _logger.warning("ckptkit could not handle a checkpoint: %s says why", Path(run, LOG))


def describe_model(checkpoint: Path, parts: Mapping[str, Any]) -> None:
    """Put config and tokenizer beside a model in shards, as the Trainer itself does beside a whole one.

    Without them what is made of it would be weights that nothing loads. A failure is a warning.
    """
    if not (checkpoint / SHARDS).is_dir() or (checkpoint / "config.json").exists():
        return
    try:
        model = parts["model"]
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]  # which FSDP2 puts before it
        for part in (config, parts.get("processing_class")):
            if part is not None:
                part.save_pretrained(checkpoint)
    except Exception as error:  # noqa: BLE001 - of any model; on one rank alone, for which the others would wait
        _logger.warning("no config.json was put into %s: %s", checkpoint, error)
