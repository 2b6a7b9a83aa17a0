"""Save to a run and load from it: three lines in anybody's loop. Says what is visible and when; looks into no tensor.

run = Run("run", keep_last=3)
step = run.load(model, optimizer) if run.latest() else 0
...
    run.save(step, model, optimizer, scheduler=scheduler)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from ckptkit.arguments import checked
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import CkptError, NotACheckpoint, Occupied, Usage, translate_os_errors, warn
from ckptkit.io.destination import to_destination
from ckptkit.io.file import check_name
from ckptkit.io.path import is_remote, refresh
from ckptkit.runs.keeper import keeper_of
from ckptkit.runs.retention import Best, Policy, check_metric, decide, find_saved, write_metrics
from ckptkit.storage.ranks import Ranks
from ckptkit.summary import as_call
from ckptkit.trainers.ckptkit import METRICS
from ckptkit.training.places import require_storable
from ckptkit.training.saving.load import Stored
from ckptkit.training.saving.places import SavePlace, StagedPlace, StorePlace
from ckptkit.training.saving.save import ADAPTER, FORMATS, PendingState, Saver
from ckptkit.training.saving.state import Training

_INSIDES = (
    "torch.distributed is disabled, unavailable or uninitialized",  # one process is what is meant
    "`_get_pg_default_device` will be deprecated",  # FSDP1 without a device mesh
    "Multiple backends are registered with this ProcessGroup",
    "When using ``NO_SHARD`` for ``ShardingStrategy``",
    "Please use DTensor instead",
    "TypedStorage is deprecated",  # torch 2.10 saves by it
)


@contextmanager
def quiet() -> Iterator[None]:
    """Let torch save and load without a word about how it does."""
    with warnings.catch_warnings():
        silence()
        yield


def silence() -> None:
    """Silence them for the rest of the process: for a thread, whose warnings no block can catch without others'."""
    for message in _INSIDES:
        warnings.filterwarnings("ignore", message=message)


class Run:
    """A training directory with its checkpoints, to save to and to load from, by all ranks alike.

    `root` is local, or a prefix in a store, to which only one training saves at a time: a save there replaces what a
    save of the same step left that died, and takes only "sharded" and "adapter".

    `state_dict` is "sharded", a directory of DCP's; "full", one file of torch.save; "hf", a Hugging Face model with the
    rest in a directory of DCP's inside it; or "adapter", which is "sharded" without the weights that adapters are on:
    it is loaded into a model that has these. All ranks write their shards to their place in it. With `background`,
    `save` returns when the state is copied, and a thread writes it: end with `wait`, or use the run as a context
    manager. Checkpoints stay that are among the `keep_last` newest, of a step that is a multiple of `keep_every`, or
    the best by `keep_best`, METRIC[:min|max][:N]; all do where none of these is given. `files` are put into every
    checkpoint, as config.json should be.
    """

    @checked
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
        require_storable(self.root, state_dict)
        self.state_dict = state_dict
        self._policy = Policy(keep_last, keep_every, None if keep_best is None else Best.parse(keep_best))
        self._files = dict(files or {})
        for name in self._files:
            check_name(name, self.root)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckptkit") if background else None
        self._saving: Future[None] | None = None
        self._replaced: set[Path] = set()
        if background:
            silence()

    def __repr__(self) -> str:
        best = self._policy.best
        rules = {"keep_last": self._policy.last, "keep_every": self._policy.every, "keep_best": best and str(best)}
        return as_call(self, self.root, state_dict=self.state_dict, background=self._thread is not None, **rules)

    # Both are made when first needed: the process group may be younger than the run.

    @cached_property
    def _ranks(self) -> Ranks:
        return Ranks.apart()

    @cached_property
    def _saver(self) -> Saver:
        return Saver(self._ranks, self.state_dict, self._files)

    def checkpoint(self, step: int) -> Path:
        """Return where the checkpoint of `step` lies or will lie."""
        return RunFolder(self.root).checkpoint(step)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the complete checkpoints, oldest first."""
        return self._look().checkpoints()

    def latest(self) -> Checkpoint | None:
        """Return the complete checkpoint with the highest step, or None."""
        return self._look().latest()

    def replace(self, checkpoint: Path) -> None:
        """Let a checkpoint in a store be replaced, on all ranks, when the run saves its step."""
        self._replaced.add(checkpoint)

    def _look(self) -> RunFolder:
        """Return the run as it is now."""
        return RunFolder(refresh(self.root))

    @checked
    @quiet()
    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        **state: Stateful | dict[Any, Any],
    ) -> Path:
        """Save a checkpoint and give its directory, which is visible from the moment that all ranks have finished.

        Each of `state` is a dict, or has `state_dict()` and `load_state_dict()`; what rank 0 has of it is saved. A
        failure on any rank is raised on all, and leaves nothing to see: `Occupied` where there is a checkpoint of
        this step, `IOFailure` where a disk refuses, `Usage` for a state that could not be loaded again. One in the
        background is raised by the next `save`, `load` or `wait`.
        """
        self.wait()
        if step < 0:
            raise Usage(f"`step`: expected at least 0, found {step}")
        training = Training(model, optimizer, state, self._ranks, is_adapter=self.state_dict == ADAPTER)
        files = self._files if metrics is None else {**self._files, METRICS: write_metrics(step, metrics)}
        place = self._place(step)
        try:
            place.open()
            held = self._saver.hold({"step": step, **training.take()}, copy=self._thread is not None)
        except BaseException as error:
            place.discard()
            if isinstance(error, Occupied):
                error.path, error.hint = self.checkpoint(step), "save another step, or delete this checkpoint first"
            raise
        finish = partial(self._finish, place, held, files)
        if self._thread is None:
            finish()
        else:
            self._saving = self._thread.submit(finish)
        return self.checkpoint(step)

    def _place(self, step: int) -> SavePlace:
        path = self.checkpoint(step)
        if is_remote(path):
            return StorePlace(path, self._ranks, overwrite=path in self._replaced)
        return StagedPlace(path, self._ranks)

    def _finish(self, place: SavePlace, held: PendingState, files: Mapping[str, bytes]) -> None:
        """Write what is held, show it, and delete what need not stay beside it; perhaps in a thread."""
        try:
            writer = place.writer(self._saver.format, files, held.tied)
            self._saver.write(writer, held, place.room)
            place.show()
        except BaseException:
            place.discard()
            raise
        self._replaced.discard(place.path)
        self._ranks.on_first(lambda: self._retain(place.path))

    def _retain(self, saved: Path) -> None:
        if self._policy.keeps_all and is_remote(self.root):
            return
        try:
            keeper = keeper_of(self.root)
            with translate_os_errors(self.root), keeper.pruning():
                for left in keeper.unfinished():
                    keeper.delete(left)
                found = [] if self._policy.keeps_all else find_saved(self._look())
                check_metric(self.root, found, self._policy)
                for verdict in decide(found, self._policy):
                    path = verdict.saved.path
                    # what was saved just now is not the newest where a run was resumed from an older checkpoint
                    if not verdict.is_kept and path.absolute() != saved:
                        keeper.delete(path)
        except CkptError as error:  # the new checkpoint is there: no reason to end a training
            warn(f"an old checkpoint was not deleted: {error}")

    @checked
    @quiet()
    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        path: str | Path | None = None,
        **state: Stateful | dict[Any, Any],
    ) -> int:
        """Load the latest checkpoint, or the one at `path`, saved by any number of ranks, and give its step.

        Raises, on all ranks, `NotACheckpoint` if there is none, `Mismatch` where it lacks something that is asked for
        or a tensor has another shape or dtype, `Corrupt` and `IOFailure` where its files cannot be read. After an
        error the model and the optimizer may hold parts of both, and are to be made anew.
        """
        self.wait()
        self._look()
        training = Training(model, optimizer, state, self._ranks)
        chosen = self._ranks.on_first(lambda: self._choose(path))
        try:
            stored = Stored(chosen, self._ranks)
            wanted = training.prepare(stored.outline())
            stored.read(wanted)
            training.restore(wanted)
        except CkptError as error:
            error.blame(path=chosen)
            raise
        return int(wanted["step"])

    def _choose(self, path: str | Path | None) -> Path:
        if path is None:
            latest = self.latest()
            if latest is None:
                raise NotACheckpoint("no complete checkpoint in the run", path=self.root)
            path = latest.path
        checkpoint = Checkpoint.open(path)
        checkpoint.require_resumable()
        return checkpoint.path

    def wait(self) -> None:
        """Wait until a save in the background is visible. Raises on all ranks what went wrong on any."""
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
