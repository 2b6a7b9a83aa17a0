"""Save checkpoints to a run and load them, in any training loop.

run = Run("run", keep_last=3)
step = run.load(model, optimizer) if run.latest() else 0
...
    run.save(step, model, optimizer, scheduler=scheduler)
"""

from __future__ import annotations

import atexit
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter
from torch.optim import Optimizer

from ckptkit.argument_types import with_checked_arguments
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import CkptError, NotACheckpoint, Occupied, Usage, translate_os_errors, warn
from ckptkit.io.destination import to_destination
from ckptkit.io.file import require_plain_file_name
from ckptkit.io.path import drop_cached_listing, is_remote
from ckptkit.io.staging import Stage, errors_naming_destination
from ckptkit.runs.retention import (
    Best,
    Policy,
    decide_retention,
    dump_metrics,
    require_known_metric,
    saved_checkpoints_of,
)
from ckptkit.runs.run_backend import open_run_backend
from ckptkit.storage import RoomWriter
from ckptkit.storage.ranks import Ranks
from ckptkit.storage.store_writer import StoreWriter, require_no_checkpoint_at
from ckptkit.summary import format_call
from ckptkit.trainers.ckptkit import METRICS
from ckptkit.training.config import require_savable_to_store
from ckptkit.training.saving.load import Stored
from ckptkit.training.saving.save import ADAPTER, FORMATS, Saver
from ckptkit.training.saving.state import Training, Tree

_TORCH_WARNINGS = (
    "torch.distributed is disabled, unavailable or uninitialized",  # a single process is a supported use
    "`_get_pg_default_device` will be deprecated",  # FSDP1 without a device mesh
    "Multiple backends are registered with this ProcessGroup",
    "When using ``NO_SHARD`` for ``ShardingStrategy``",
    "Please use DTensor instead",
    "TypedStorage is deprecated",  # torch 2.10 itself uses it to save
)


@contextmanager
def torch_warnings_ignored() -> Iterator[None]:
    """Suppress torch's warnings about its own internals inside the block."""
    with warnings.catch_warnings():
        ignore_torch_warnings()
        yield


def ignore_torch_warnings() -> None:
    """Ignore torch's warnings about its own internals from now on.

    Needed for a background thread: `catch_warnings` is not thread-safe, so a block there would affect other threads.
    """
    for message in _TORCH_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def start_save_thread(find_last: Callable[[], Future[None] | None]) -> ThreadPoolExecutor:
    """Return a thread for saves. `find_last` returns the last save, unless the training has waited for it.

    If that save failed, its error is logged when Python exits, because nothing else would report it.
    """
    ignore_torch_warnings()

    def log_error() -> None:
        last = find_last()
        # Python has waited for the thread, except in a fork of this process, which does not have it
        if last is not None and last.done() and (error := last.exception()) is not None:
            logging.getLogger(__name__).error("the last checkpoint was not saved: %s", error)

    atexit.register(log_error)
    return ThreadPoolExecutor(1, thread_name_prefix="ckptkit")


@contextmanager
def failed_deletions_as_warnings() -> Iterator[None]:
    """Turn errors in the block into warnings: the new checkpoint is complete, so they must not end the training."""
    try:
        yield
    except CkptError as error:
        warn(f"an old checkpoint was not deleted: {error}")


class Run:
    """A training directory with its checkpoints. Every rank makes the same calls to save and to load.

    `root` is a local directory or a prefix in an object store. Only one training may save to a store prefix at a time:
    a save there replaces the files of an interrupted save of the same step. A store supports only the formats
    "sharded" and "adapter".

    `state_dict` is the format of the checkpoints:

    - "sharded": a DCP directory.
    - "full": one torch.save file.
    - "hf": a Hugging Face model, with the training state in a DCP directory inside it.
    - "adapter": like "sharded", but without the base weights. Load it into a model that already has them.

    In every format each rank writes its own shards. With `background`, `save` returns when the state is copied, and a
    thread writes it: call `wait` at the end, or use the run as a context manager.

    Retention keeps the `keep_last` newest checkpoints, checkpoints whose step is a multiple of `keep_every`, and the
    best by `keep_best`, which is METRIC[:min|max][:N]. Without any of these, all checkpoints stay. `files` are written
    into every checkpoint; pass config.json as one of them.
    """

    @with_checked_arguments
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        state_dict: str = "sharded",
        background: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        if state_dict not in FORMATS:
            raise Usage(f"unknown state dict `{state_dict}`", hint=f"use one of {', '.join(FORMATS)}")
        self.root = to_destination(root)
        require_savable_to_store(self.root, state_dict)
        self.state_dict = state_dict
        self._policy = Policy(keep_last, keep_every, None if keep_best is None else Best.parse(keep_best))
        self._files = dict(files or {})
        for name in self._files:
            require_plain_file_name(name, self.root)
        self._thread = start_save_thread(lambda: self._saving) if background else None
        self._saving: Future[None] | None = None
        self._replaced: set[Path] = set()

    def __repr__(self) -> str:
        best = self._policy.best
        rules = {"keep_last": self._policy.last, "keep_every": self._policy.every, "keep_best": best and str(best)}
        return format_call(self, self.root, state_dict=self.state_dict, background=self._thread is not None, **rules)

    # Both are created on first use, because a script may create the run before the process group.

    @cached_property
    def _ranks(self) -> Ranks:
        return Ranks.in_separate_group()

    @cached_property
    def _saver(self) -> Saver:
        return Saver(self._ranks, self.state_dict, self._files)

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`, which need not exist yet."""
        return RunFolder(self.root).checkpoint(step)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the complete checkpoints, oldest first."""
        return self._fresh_run_folder().checkpoints()

    def latest(self) -> Checkpoint | None:
        """Return the complete checkpoint with the highest step, or None."""
        return self._fresh_run_folder().latest()

    def replace(self, checkpoint: Path) -> None:
        """Allow the next save of this step to overwrite `checkpoint` in a store. Call it on all ranks."""
        self._replaced.add(checkpoint)

    def _fresh_run_folder(self) -> RunFolder:
        return RunFolder(drop_cached_listing(self.root))

    @with_checked_arguments
    @torch_warnings_ignored()
    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        **state: Stateful | dict[Any, Any],
    ) -> Path:
        """Save a checkpoint and return its directory. It becomes visible once all ranks have written it.

        Each value of `state` is a dict, or has `state_dict()` and `load_state_dict()`; only rank 0's copy is saved.

        A failure on any rank raises on all ranks and leaves no visible checkpoint: `Occupied` if this step already has
        a checkpoint, `IOFailure` if a write fails, `Usage` if the state could not be loaded again. A failure in the
        background is raised by the next `save`, `load` or `wait`.
        """
        self.wait()
        if step < 0:
            raise Usage(f"`step`: expected at least 0, found {step}")
        training = Training(model, optimizer, state, self._ranks, is_adapter=self.state_dict == ADAPTER)
        files = self._files if metrics is None else {**self._files, METRICS: dump_metrics(step, metrics)}
        path = self.checkpoint(step)
        stage = None if is_remote(path) else Stage(path)
        try:
            room = self._ranks.run_on_first_rank(partial(self._reserve_destination, path, stage))
            entries, tied = self._saver.prepare_state(
                {"step": step, **training.take_state()}, copy=self._thread is not None
            )
            writer = (
                StoreWriter(path, files=files, overwrite=path in self._replaced, takes_over=True)
                if is_remote(path)
                else RoomWriter(room, self._saver.format, files=files, tied=tied)
            )
        except BaseException as error:
            if stage is not None:
                stage.discard()
            if isinstance(error, Occupied):
                error.path, error.hint = (
                    path,
                    "save another step, or delete this checkpoint if no other job saves to this run",
                )
            raise
        finish = partial(self._write_and_publish, path, stage, writer, entries)
        if self._thread is None:
            finish()
        else:
            self._saving = self._thread.submit(finish)
        return path

    def _reserve_destination(self, path: Path, stage: Stage | None) -> Path:
        """Return where the ranks write: the hidden directory of `stage`, or `path` itself in a store.

        Raises `Occupied` if there is a checkpoint that may not be overwritten.
        """
        if stage is not None:
            return stage.open().path
        if is_remote(path) and path not in self._replaced:
            require_no_checkpoint_at(path)
        return path

    def _write_and_publish(self, path: Path, stage: Stage | None, writer: StorageWriter, entries: Tree) -> None:
        """Write the state, make it visible, and apply the retention rules. Runs in a thread with `background`.

        In a store the writer itself makes the finished checkpoint visible. A failed save there leaves its claim and the
        uploaded objects: readers ignore them, and the next save of the step replaces them.
        """
        try:
            with errors_naming_destination(path):
                self._saver.write_state(writer, entries, path)
                if stage is not None:
                    self._ranks.run_on_first_rank(stage.commit)
        except BaseException:
            if stage is not None:
                stage.discard()
            raise
        self._replaced.discard(path)
        self._ranks.run_on_first_rank(partial(self._apply_retention, path if stage is None else stage.dst))

    def _apply_retention(self, saved: Path) -> None:
        root = saved.parent  # absolute: a thread may get here after the training has changed its directory
        if self._policy.is_keeping_all and is_remote(root):
            return
        with failed_deletions_as_warnings():
            keeper = open_run_backend(root)
            with translate_os_errors(root), keeper.pruning():
                for leftover in keeper.unfinished_deletions():
                    keeper.delete_checkpoint(leftover)
                run = RunFolder(drop_cached_listing(root))
                checkpoints = [] if self._policy.is_keeping_all else saved_checkpoints_of(run)
                require_known_metric(root, checkpoints, self._policy)
                for verdict in decide_retention(checkpoints, self._policy):
                    path = verdict.saved.path
                    # The checkpoint just saved is not the newest if the run was resumed from an older one: keep it.
                    if not verdict.is_kept and path != saved:
                        keeper.delete_checkpoint(path)

    @with_checked_arguments
    @torch_warnings_ignored()
    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        path: str | Path | None = None,
        **state: Stateful | dict[Any, Any],
    ) -> int:
        """Load the latest checkpoint, or the checkpoint at `path`, and return its step. Any world size can load it.

        Raises, on all ranks, `NotACheckpoint` if there is no checkpoint, `Mismatch` if it lacks a requested entry or a
        tensor has another shape or dtype, and `Corrupt` or `IOFailure` if its files cannot be read. After an error
        the model and the optimizer may be partly overwritten: build them again.
        """
        self.wait()
        self._fresh_run_folder()
        training = Training(model, optimizer, state, self._ranks)
        chosen = self._ranks.run_on_first_rank(lambda: self._choose_checkpoint(path))
        try:
            stored = Stored(chosen, self._ranks)
            wanted = training.prepare_entries_to_load(stored.load_state_on_meta())
            stored.read_into(wanted)
            training.restore_state(wanted)
        except CkptError as error:
            error.blame(path=chosen)
            raise
        return int(wanted["step"])

    def _choose_checkpoint(self, path: str | Path | None) -> Path:
        if path is None:
            latest = self.latest()
            if latest is None:
                raise NotACheckpoint("no complete checkpoint in the run", path=self.root)
            path = latest.path
        checkpoint = Checkpoint.open(path)
        checkpoint.require_resumable()
        return checkpoint.path

    def wait(self) -> None:
        """Wait until a save in the background is visible. Raises the error of any rank on all ranks."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and the save in the background failed: {failure}")
