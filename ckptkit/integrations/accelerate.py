"""Save and load the checkpoints of Accelerate's `save_state` in the background, and in a store.

accelerator = BackgroundAccelerator(keep_last=3)
accelerator.save_state("run/step_500")
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType, checkpointing

from ckptkit.checkpoints.replaceable import unknown_entries
from ckptkit.checks.make_manifest import make_manifest
from ckptkit.errors import Corrupt, Mismatch, NotACheckpoint, Unsafe, Unsupported, Usage, too_small_error, warn
from ckptkit.integrations.background import BackgroundSaver, attribute_replaced, delete_manifests
from ckptkit.io.destination import to_destination
from ckptkit.io.file import list_directories
from ckptkit.io.path import is_remote
from ckptkit.runs.prune import execute_prune, prune
from ckptkit.runs.run_backend import open_run_backend
from ckptkit.training.saving.run import failed_deletions_as_warnings

_OWN_SAVES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
_AUTOMATIC_NAME = re.compile(r"checkpoint_(\d+)")


class BackgroundAccelerator(Accelerator):  # type: ignore[misc]
    """Accelerate's Accelerator, whose `save_state` waits only for a copy of the state, and not until it is written.

    A checkpoint has the same files as one of Accelerate, whose own `load_state` loads it, and a manifest with checksums
    in each directory of tensors. It appears under its name when all ranks have written it. Until then each rank holds a
    copy of what it writes in memory. `save_state` and `load_state` also take a URL such as s3://bucket/run/step_500.

    `keep_last` keeps so many of the newest checkpoints in the directory of the one that was saved, by the rules of
    `ckptkit prune`. With `automatic_checkpoint_naming`, the default is Accelerate's `total_limit`. An older checkpoint
    is deleted only when the new one is visible. The one just saved stays, too, if the training was rewound. Names
    without a step, such as epoch_1, do not count, with a warning.

    A save that fails raises in the next save or load, or in `end_training`. With DeepSpeed, Megatron-LM, XLA,
    FULL_STATE_DICT or `save_on_each_node`, and to a directory that contains other files, Accelerate itself saves, with
    a warning.
    """

    def __init__(self, *arguments: Any, keep_last: int | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if keep_last is not None and keep_last < 1:
            raise too_small_error("keep_last", 1, keep_last)
        self._keep_last = keep_last
        self._saver = BackgroundSaver()

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is visible. Raises the error of any rank on all ranks."""
        self._saver.wait()

    def end_training(self) -> None:
        """Wait for the last save, and end the training as Accelerate does."""
        self.wait_for_save()
        super().end_training()

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> Any:
        """Save the state, as Accelerate does, and return its path. Raises a `CkptError` on all ranks."""
        self.wait_for_save()
        project = self.project_configuration
        is_named = project.automatic_checkpoint_naming
        if is_named:
            directory: str | os.PathLike[str] = f"{self.project_dir}/checkpoints/checkpoint_{self.save_iteration}"
        elif output_dir is None:
            raise Usage(
                "`output_dir`: expected a directory, found None", hint="pass it, or set automatic_checkpoint_naming"
            )
        else:
            directory = output_dir
        path = to_destination(directory).absolute()
        save = partial(super().save_state, safe_serialization=safe_serialization, **options)
        if reason := self._saver.ranks.run_on_first_rank(lambda: why_not_in_background(self, path)):
            if is_remote(path):
                message = f"{reason}, so Accelerate itself saves, which writes to local directories only"
                hint = f"save to a local directory, and copy that with `ckptkit cp LOCAL {path}`"
                raise Unsupported(message, path=path, hint=hint)
            warn(f"{reason}, so the training waits until {path.name} is written")
            self._saver.ranks.run_on_first_rank(lambda: delete_manifests(path))
            saved = save(output_dir)
            self.wait_for_everyone()
        else:
            saved = path
            self._save_in_background(save, path, overwrite=not is_named)
        keep_last = project.total_limit if self._keep_last is None and is_named else self._keep_last
        if keep_last and (self.is_local_main_process if project.save_on_each_node else self.is_main_process):
            self._saver.then(partial(delete_older_checkpoints, path, keep_last))
        return saved

    def _save_in_background(self, save: Callable[[str], object], path: Path, *, overwrite: bool) -> None:
        is_sharded = self.distributed_type == DistributedType.FSDP

        def write(folder: Path) -> None:
            with ExitStack() as changes:
                changes.enter_context(
                    attribute_replaced(self.project_configuration, "automatic_checkpoint_naming", False)
                )
                changes.enter_context(
                    attribute_replaced(checkpointing, "save", partial(self._defer_file, checkpointing.save))
                )
                if is_sharded:
                    changes.enter_context(without_offload(self.state.fsdp_plugin))
                save(str(folder))
            if self.is_main_process and not is_sharded:
                self._saver.defer(lambda directory, _: add_manifest(directory, path), folder, None)

        self._saver.save(path, write, overwrite=overwrite)

    def _defer_file(self, save: Any, state: Any, file: Any, **options: Any) -> None:
        """Save a file of Accelerate later, in the thread. Takes the place of its `save`."""
        if not isinstance(state, dict):
            save(state, file, **options)  # a sampler, which refers to its data set
        elif self.is_main_process:
            self._saver.defer(lambda path, copy: save(copy, path, **options), Path(file), state)

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *arguments: Any, **options: Any) -> None:
        """Load a state, as Accelerate does, from a directory or a store. Raises a `CkptError` on all ranks."""
        self.wait_for_save()
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            # Accelerate would take hidden entries, such as pins and the files of a killed save, for checkpoints
            folder = Path(self.project_dir, "checkpoints")
            input_dir = self._saver.ranks.run_on_first_rank(lambda: find_newest_checkpoint(folder))
        with self._saver.local_copy(input_dir, is_first_on_machine=self.is_local_main_process) as local:
            super().load_state(local, *arguments, **options)


def add_manifest(directory: Path, final_path: Path) -> None:
    """Record the checksums of the checkpoint that will be `final_path`.

    It is complete without them. If ckptkit cannot read it, for example because it has no model, that is a warning.
    """
    try:
        make_manifest(directory)
    except (Corrupt, Mismatch, NotACheckpoint, Unsafe, Unsupported) as error:
        warn(f"{final_path}: saved without a manifest: {error.message}")


def delete_older_checkpoints(saved: Path, keep_last: int) -> None:
    """Delete all but the newest checkpoints of the run, and the one that was just saved.

    That one is not the newest if the training was resumed from an older one.
    """
    with failed_deletions_as_warnings():
        plan = prune(saved.parent, keep_last=keep_last)
        for entry in plan.other:
            if entry.path.name == saved.name:
                warn(f"{saved}: `keep_last` does not count this checkpoint: {entry.reason}")
        keeper = open_run_backend(saved.parent)
        delete = tuple(entry for entry in plan.delete if entry.path.name != saved.name)
        with keeper.pruning():
            execute_prune(replace(plan, delete=delete), keeper, None, None)


def find_newest_checkpoint(folder: Path) -> str:
    """Return the `checkpoint_N` with the highest number. Raises `NotACheckpoint` if there is none."""
    names = [path.name for path in list_directories(folder)] if folder.is_dir() else []
    numbers = [int(match[1]) for name in names if (match := _AUTOMATIC_NAME.fullmatch(name))]
    if not numbers:
        raise NotACheckpoint("expected checkpoint_0, checkpoint_1 ..., found none", path=folder)
    return str(folder / f"checkpoint_{max(numbers)}")


def why_not_in_background(accelerator: Accelerator, path: Path) -> str | None:
    """Return why the state cannot be saved to `path` in the background; None if it can."""
    if accelerator.distributed_type in _OWN_SAVES:
        return f"{accelerator.distributed_type.value} saves its own files"
    if accelerator.project_configuration.save_on_each_node:
        return "save_on_each_node is set"
    if (
        path.is_dir()
        and not is_remote(path)
        and (unknown := list(unknown_entries(path, set(), output_is_training=True)))
    ):
        return f"{path} contains {unknown[0].name}, which ckptkit does not know"
    is_sharded = accelerator.distributed_type == DistributedType.FSDP
    return why_not_sharded(accelerator.state.fsdp_plugin) if is_sharded else None


def why_not_sharded(plugin: Any) -> str | None:
    """Return why FSDP does not save shards through torch.distributed.checkpoint; None if it does."""
    if "SHARDED_STATE_DICT" not in str(plugin.state_dict_type):
        return f"fsdp_config has {plugin.state_dict_type}, not SHARDED_STATE_DICT"
    return None


@contextmanager
def without_offload(plugin: Any) -> Iterator[None]:
    """Let FSDP return its states on the GPU inside the block. `BackgroundSaver` copies them to the CPU itself."""
    with ExitStack() as changes:
        for name in ("state_dict_config", "optim_state_dict_config"):
            changes.enter_context(
                attribute_replaced(plugin, name, replace(getattr(plugin, name), offload_to_cpu=False))
            )
        yield
