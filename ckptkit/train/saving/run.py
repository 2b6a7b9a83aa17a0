"""Runs, to save to and load from: three lines in anybody's loop. Says what is visible and when; looks into no tensor.

run = Run("run", keep_last=3)
step = run.load(model, optimizer) if run.latest() else 0
...
    run.save(step, model, optimizer, scheduler=scheduler)
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from torch import nn
from torch.optim import Optimizer

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.deletion import delete, deleting
from ckptkit.checkpoints.manifest import record_manifest
from ckptkit.checkpoints.retention import Best, Policy, decide, find_holds, find_saved, write_metrics
from ckptkit.checkpoints.run import Run as Directory
from ckptkit.checkpoints.trainers.ckptkit import METRICS, TRAINING
from ckptkit.errors import CkptError, NotACheckpoint, Usage, translate_os_errors
from ckptkit.files.allocation import create_file
from ckptkit.files.file import check_name
from ckptkit.files.staging import Stage, clear_dead
from ckptkit.train.saving.full import FILE, FullForm
from ckptkit.train.saving.huggingface import CONFIG, HuggingFaceForm
from ckptkit.train.saving.peers import Peers
from ckptkit.train.saving.quiet import quiet, silence
from ckptkit.train.saving.sharded import ShardedForm
from ckptkit.train.saving.state import Stateful, Training
from ckptkit.train.saving.trees import Tree

FORMS = ("sharded", "full", "hf")


class Form(Protocol):
    """A form in which states are stored. Every method is for all ranks alike, and raises on all or none."""

    def hold(self, state: Tree, *, copy: bool) -> Tree:
        """The state as it will be written; with `copy`, in memory that the training never touches."""

    def write(self, room: Path, held: Tree) -> None:
        """Write what `hold` gave into a directory."""

    def outline(self, path: Path) -> Tree:
        """The stored state without the data of its tensors."""

    def read(self, path: Path, wanted: Tree) -> None:
        """Read into `wanted`, which is all or some of the outline."""


class Run:
    """A training directory with its checkpoints, to save to and to load from, by all ranks alike.

    `state_dict` is "sharded", a directory of DCP's that all ranks write; "full", one file of torch.save gathered on
    rank 0; or "hf", a Hugging Face model that all ranks write, with the rest in such a directory inside it. All are
    loaded. With `background`, `save` returns when the state is copied, and a thread writes it: end with `wait`, or use
    the run as a context manager. Checkpoints stay that are among the `keep_last` newest, of a step that is a multiple
    of `keep_every`, or the best by `keep_best`, METRIC[:min|max][:N]; all do where none of these is given. `files` are
    put into every checkpoint, as config.json should be.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        state_dict: str = "sharded",
        background: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        if state_dict not in FORMS:
            raise Usage(f"there is no state dict `{state_dict}`", hint=f"use one of {', '.join(FORMS)}")
        self.root = Path(root)
        self.state_dict = state_dict
        self._policy = Policy(keep_last, keep_every, None if keep_best is None else Best.parse(keep_best))
        self._files = dict(files or {})
        for name in self._files:
            check_name(name, self.root)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckptkit") if background else None
        self._saving: Future[None] | None = None
        if background:
            silence()

    # Both are made when first needed: the process group may be younger than the run.

    @cached_property
    def _peers(self) -> Peers:
        return Peers()

    @cached_property
    def _forms(self) -> dict[str, Form]:
        peers = self._peers
        hugging_face = HuggingFaceForm(peers, self._files.get(CONFIG))
        return {"sharded": ShardedForm(peers), "full": FullForm(peers), "hf": hugging_face}

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of `step` lies or will lie."""
        return Directory(self.root).checkpoint(step)

    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, oldest first."""
        return Directory(self.root).checkpoints()

    def latest(self) -> Checkpoint | None:
        """The complete checkpoint with the highest step, or None."""
        return Directory(self.root).latest()

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
        failure on any rank is raised on all, and leaves nothing behind: `Occupied` where there is a checkpoint of
        this step, `IOFailure` where a disk refuses, `Usage` for a state that could not be loaded again. One in the
        background is raised by the next `save`, `load` or `wait`.
        """
        self.wait()
        if step < 0:
            raise Usage(f"step is {step}; it must be at least 0")
        training = Training(model, optimizer, state, self._peers)
        files = self._files if metrics is None else {**self._files, METRICS: write_metrics(step, metrics)}
        stage = Stage(self.checkpoint(step))
        try:
            room = self._peers.on_first(lambda: stage.open().path)
            held = self._form.hold({"step": step, **training.take()}, copy=self._thread is not None)
        except BaseException:
            stage.discard()
            raise
        finish = partial(self._finish, stage, room, held, files)
        if self._thread is None:
            finish()
        else:
            self._saving = self._thread.submit(finish)
        return self.checkpoint(step)

    @property
    def _form(self) -> Form:
        return self._forms[self.state_dict]

    def _finish(self, stage: Stage, room: Path, held: Tree, files: Mapping[str, bytes]) -> None:
        """Write what is held, show it, and delete what need not stay beside it; perhaps in a thread."""
        try:
            self._form.write(room, held)
            self._peers.on_first(lambda: commit(stage, files))
        except BaseException:
            stage.discard()
            raise
        self._peers.on_first(lambda: self._retain(stage.dst))

    def _retain(self, saved: Path) -> None:
        try:
            with translate_os_errors(self.root), deleting(self.root):
                clear_dead(self.root)
                found = [] if self._policy.keeps_all else find_saved(Directory(self.root))
                for verdict in decide(found, self._policy):
                    path = verdict.saved.path
                    # what was saved just now is not the newest where a run was resumed from an older checkpoint;
                    # and somebody may have pinned one while others were being deleted
                    if not verdict.is_kept and path.absolute() != saved and not find_holds(path):
                        delete(path)
        except CkptError as error:  # the new checkpoint is there: no reason to end a training
            warnings.warn(f"an old checkpoint was not deleted: {error.path}: {error}", stacklevel=2)

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
        training = Training(model, optimizer, state, self._peers)
        chosen, name = self._peers.on_first(lambda: self._choose(path))
        form = self._forms[name]
        try:
            wanted = training.prepare(form.outline(chosen))
            form.read(chosen, wanted)
            training.give_back(wanted)
        except CkptError as error:
            error.blame(path=chosen)
            raise
        return int(wanted["step"])

    def _choose(self, path: str | Path | None) -> tuple[Path, str]:
        """The checkpoint to load, and its form."""
        if path is None:
            latest = self.latest()
            if latest is None:
                raise NotACheckpoint("no complete checkpoint in the run", path=self.root)
            path = latest.path
        checkpoint = Checkpoint.open(path)
        checkpoint.require_resumable()
        chosen = checkpoint.path
        marks = {"hf": chosen / TRAINING, "full": chosen / FILE}
        return chosen, next((name for name, mark in marks.items() if mark.exists()), "sharded")

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


def commit(stage: Stage, files: Mapping[str, bytes]) -> None:
    """Complete the hidden directory, with a manifest, and show it."""
    for name, content in files.items():
        create_file(stage.path / name, len(content), [(0, content)])  # none of the state's own
    with translate_os_errors(stage.path):
        for part in Checkpoint.at(stage.path).parts:
            record_manifest(part.path)
    stage.commit()
