"""Save the directories of other libraries in the background: the library's own code chooses the files.

The library writes into a hidden directory, as if it were the checkpoint. Its large states are written later, in a
thread: those that it passes to `torch.distributed.checkpoint.save`, and those that the caller defers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.replaceable import check_replaceable, files_in_manifest
from ckptkit.errors import IOFailure, names_and_more, warn
from ckptkit.io.path import drop_cached_listing, is_remote, to_path
from ckptkit.io.staging import Stage, errors_naming_destination
from ckptkit.runs.cp import cp
from ckptkit.runs.retention import dependents_by_checkpoint
from ckptkit.runs.run_backend import open_run_backend
from ckptkit.storage import RoomWriter
from ckptkit.storage.ranks import Ranks
from ckptkit.training.saving.run import failed_deletions_as_warnings, start_save_thread
from ckptkit.training.saving.save import Saver, copy_to_cpu

WriteState = Callable[[Path, Any], object]
_MOST_NAMED = 5


class BackgroundSaver:
    """Saves directories for the ranks of a training; each rank makes the same calls.

    A directory appears under its name when all ranks have written it, so the ranks must share a file system. A
    directory in a store is written to the temporary directory first, and then copied.

    Only `save`, `ranks` and `local_copy` are collective. A rank that fails before the first save can therefore call
    `wait` and `then` alone. Before the first save the saver can be pickled.
    """

    def __init__(self, make_ranks: Callable[[], Ranks] = Ranks.in_separate_group) -> None:
        self._make_ranks = make_ranks
        self._saving: Future[None] | None = None
        self._folder = Path()  # where the library writes during a save
        self._deferred: list[tuple[WriteState, Path, Any]] = []

    @cached_property
    def ranks(self) -> Ranks:
        """Return the ranks. The first use makes a process group, so all ranks must get there."""
        return self._make_ranks()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return start_save_thread(lambda: self._saving)

    def save(self, path: Path, write: Callable[[Path], object], *, overwrite: bool = False) -> None:
        """Save directory `path`: `write` is the library's code, and gets the hidden directory, which has the same name.

        Returns when `write` has returned and each rank has copied its large states. An error of `write` raises on all
        ranks, and leaves no files. `wait`, `then` and the next `save` raise an error of the thread.
        """
        self.wait()
        local = self.ranks.run_on_first_rank(lambda: local_path_for(path, overwrite=overwrite))
        stage = Stage(local, overwrite=overwrite)
        try:
            self._folder = stage.path / path.name
            self.ranks.run_on_first_rank(lambda: stage.open().path.joinpath(path.name).mkdir())
            self.ranks.run_on_all_ranks(lambda: require_shared_directory(self._folder, path, self.ranks.rank))
            # the libraries have no hook for their shards, but look this function up at each save; if one
            # of them stops doing so, it writes its shards now, into the same hidden directory
            with attribute_replaced(dcp, "save", partial(self._defer_shards, dcp.save)):
                copies = self.ranks.run_on_all_ranks(partial(self._write_and_copy_deferred, write))
            writes = [
                partial(write_state, stage.path / name, copy)
                for (write_state, name, _), copy in zip(self._deferred, copies, strict=True)
            ]
        except BaseException:
            discard(stage, path)
            raise
        finally:
            self._deferred.clear()
        self._saving = self._thread.submit(self._finish, stage, path, writes, overwrite=overwrite)

    def defer(self, write_state: WriteState, file: Path, state: Any) -> None:
        """Let the thread call `write_state(file, copy of state)`. For the library's code, during a save."""
        self._deferred.append((write_state, file.relative_to(self._folder), state))

    def then(self, work: Callable[[], object]) -> None:
        """Let the thread call `work` once the directory being saved is visible. Calls it now if none is being saved."""
        saving = self._saving
        if saving is None:
            work()
            return

        def work_after_save() -> None:
            saving.result()
            work()

        self._saving = self._thread.submit(work_after_save)

    def wait(self) -> None:
        """Wait until the directory being saved is visible. Raises the error of any rank on all ranks."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    @contextmanager
    def local_copy(self, source: Any, *, is_first_on_machine: bool) -> Iterator[Any]:
        """Copy a checkpoint, or the latest one of a run, from a store to a temporary directory of each machine.

        The directory exists for the time of the block. A `source` that is not in a store is returned unchanged.
        """
        self.wait()
        path = to_path(source) if isinstance(source, str | os.PathLike) else None
        if not is_remote(path):
            yield source
            return
        folder = Path(self.ranks.run_on_first_rank(lambda: tempfile.mkdtemp(prefix="ckptkit-")))
        local = folder / path.name
        try:
            self.ranks.run_on_all_ranks(lambda: is_first_on_machine and cp(drop_cached_listing(path), local))
            yield str(local)
            # the others may still read it; not after an error, which may be of this rank alone
            self.ranks.run_on_all_ranks(lambda: None)
        finally:
            if is_first_on_machine:
                shutil.rmtree(folder, ignore_errors=True)

    def _write_and_copy_deferred(self, write: Callable[[Path], object]) -> list[Any]:
        """Let the library write, and return copies of the states that it deferred."""
        write(self._folder)
        copies: list[Any] = copy_to_cpu({"states": [state for _, _, state in self._deferred]})["states"]
        return copies

    def _defer_shards(
        self,
        save: Callable[..., Any],
        state_dict: Any,
        *,
        checkpoint_id: Any = None,
        storage_writer: Any = None,
        planner: Any = None,
        **options: Any,
    ) -> Any:
        """Stand in for `torch.distributed.checkpoint.save`.

        A save outside of the hidden directory, with some of the ranks or with a planner of the caller, is torch's own.
        """
        directory = Path(checkpoint_id or getattr(storage_writer, "path", ""))
        is_plain = planner is None or type(planner) is DefaultSavePlanner
        if not (is_plain and directory.is_relative_to(self._folder)) or any(options.values()):
            return save(
                state_dict, checkpoint_id=checkpoint_id, storage_writer=storage_writer, planner=planner, **options
            )
        self.defer(self._write_shards, directory, state_dict)
        return None

    def _write_shards(self, directory: Path, state: Any) -> None:
        """Write a DCP directory from all ranks, beside the files of the library that are in it, if there are any."""
        files = self.ranks.run_on_first_rank(partial(read_and_delete_files, directory))
        writer = RoomWriter(directory, "dcp", files=files)
        Saver(self.ranks, "sharded", {}).write_state(writer, state, directory)

    def _finish(self, stage: Stage, path: Path, writes: Sequence[Callable[[], object]], *, overwrite: bool) -> None:
        """Write the states and make the directory visible. Runs in the thread."""
        try:
            with errors_naming_destination(stage.dst):
                self.ranks.run_on_first_rank(partial(move_contents_up, stage.path / path.name))
                self.ranks.run_on_all_ranks(lambda: [write() for write in writes])
                self.ranks.run_on_first_rank(stage.commit)
            if is_remote(path):
                self.ranks.run_on_first_rank(lambda: copy_to_store(stage.dst, path, overwrite=overwrite))
        finally:
            discard(stage, path)


def local_path_for(path: Path, *, overwrite: bool) -> Path:
    """Return where to write a directory: `path` itself, or a path in a new temporary directory if it is in a store.

    With `overwrite`, raises `Occupied` if the local `path` has entries that ckptkit does not know.
    """
    if is_remote(path):
        return Path(tempfile.mkdtemp(prefix="ckptkit-"), path.name)
    if overwrite:
        check_replaceable(path, output_is_training=True)
    return path


def require_shared_directory(folder: Path, path: Path, rank: int) -> None:
    """Raise `IOFailure` if this rank does not see the hidden directory that rank 0 made to save `path`."""
    if not folder.is_dir():
        where = "set TMPDIR to" if is_remote(path) else "save to"
        raise IOFailure(
            f"rank {rank} does not see the files of rank 0 in this directory",
            path=folder.parent.parent,
            hint=f"{where} a directory that all ranks share",
        )


def move_contents_up(folder: Path) -> None:
    """Move everything in `folder` to its parent, and delete it."""
    for file in folder.iterdir():
        file.rename(folder.parent / file.name)
    folder.rmdir()


def read_and_delete_files(directory: Path) -> dict[str, bytes]:
    """Return the content of the files in a directory, which is made if it does not exist, and delete them."""
    directory.mkdir(exist_ok=True)
    files = {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}
    for name in files:
        (directory / name).unlink()
    return files


def copy_to_store(source: Path, destination: Path, *, overwrite: bool) -> None:
    """Copy a checkpoint to a store. Hidden entries, which `cp` leaves out, are a warning."""
    if left_out := cp(source, destination, overwrite=overwrite).left_behind:
        warn(f"{destination}: not copied: {names_and_more([entry.name for entry in left_out], _MOST_NAMED)}")


def delete_in_store(run: Path, checkpoints: Callable[[], Iterable[Path]]) -> None:
    """Delete those checkpoints of a run in a store that the trainer no longer keeps, unless they are protected.

    An error is a warning.
    """
    with failed_deletions_as_warnings():
        keeper = open_run_backend(run)
        with keeper.pruning():
            readers = dependents_by_checkpoint(run)
            for checkpoint in checkpoints():
                if checkpoint.name not in readers:
                    keeper.delete_checkpoint(checkpoint, by_trainer=True)


def discard(stage: Stage, path: Path) -> None:
    """Delete the unfinished directory, or the temporary directory of a path in a store."""
    stage.discard()
    if is_remote(path):
        shutil.rmtree(stage.dst.parent, ignore_errors=True)


def delete_manifests(directory: Path) -> None:
    """Delete the manifests of an earlier save: they do not describe the files that the library itself writes now.

    A subdirectory with a model that ckptkit converted keeps its manifest: it is not of that save.
    """
    for file in (*directory.glob(MANIFEST), *directory.glob(f"*/{MANIFEST}")):
        if file.parent == directory or not files_in_manifest(file.parent, only_if_converted=True):
            file.unlink()


@contextmanager
def attribute_replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
