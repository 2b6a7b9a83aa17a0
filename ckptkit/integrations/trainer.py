"""Save the checkpoints of transformers' Trainer under FSDP2 in the background.

BackgroundTrainer(...).train(resume_from_checkpoint=True)
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import Unsupported, warn
from ckptkit.integrations.accelerate import add_manifest, why_not_sharded, without_offload
from ckptkit.integrations.background import BackgroundSaver, attribute_replaced, delete_in_store, delete_manifests
from ckptkit.integrations.transformers import save_config_and_tokenizer
from ckptkit.io.destination import to_destination
from ckptkit.io.path import is_remote

STATE = "trainer_state.json"


class BackgroundTrainer(Trainer):  # type: ignore[misc]
    """transformers' Trainer, which under FSDP2 waits only for a copy of the state, and not until it is written.

    To add this to a subclass of the Trainer: `class MyTrainer(BackgroundTrainer, SFTTrainer)`. A checkpoint has the
    same files as one of the Trainer, and `resume_from_checkpoint` loads it. It also has config.json, the tokenizer and
    a CRC-32 of each tensor. It appears under its name when all ranks have written it, and only then `save_total_limit`
    deletes an older one. Until then each rank holds a copy of its shards in memory. `train` waits for the last save.

    If `output_dir` is a URL such as s3://bucket/my-run, checkpoints are saved there and everything else to ./my-run.
    `resume_from_checkpoint` also takes the URL of a checkpoint, or of a run for its latest one.

    A save that fails raises in the next save, or at the end of the training. The Trainer itself saves, with a warning,
    without FSDP2's SHARDED_STATE_DICT, with `push_to_hub`, and to a directory that exists.
    """

    _run: Path | None = None  # where the Trainer's own code writes during a save
    _store: Path | None = None  # the output_dir if it is a URL

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(
            *map(self._with_local_output_dir, arguments),
            **{k: self._with_local_output_dir(v) for k, v in options.items()},
        )

    def _with_local_output_dir(self, argument: Any) -> Any:
        """Return the TrainingArguments with a local `output_dir`, and any other argument unchanged."""
        if not isinstance(argument, TrainingArguments) or not is_remote(store := to_destination(argument.output_dir)):
            return argument
        if argument.push_to_hub:
            hint = "set output_dir to a local directory"
            raise Unsupported("push_to_hub needs a local output_dir", path=store, hint=hint)
        self._store, local = store, copy(argument)
        local.output_dir = store.name
        return local

    @cached_property
    def _saver(self) -> BackgroundSaver:
        return BackgroundSaver()

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is visible. Raises the error of any rank on all ranks."""
        self._saver.wait()

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        """Train, and wait for the last save."""
        source = self._store if self._store and resume_from_checkpoint is True else resume_from_checkpoint
        try:
            with self._local_copy(source) as local:
                return super().train(local, *arguments, **options)
        finally:
            self.wait_for_save()

    def _local_copy(self, source: Any) -> Any:
        return self._saver.local_copy(source, is_first_on_machine=self.is_local_process_zero())

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        step = self.state.best_global_step
        if self._store and step and (best := self._store / f"{PREFIX_CHECKPOINT_DIR}-{step}").exists():
            self.state.best_model_checkpoint = str(best)  # which the Trainer took for a directory that is gone

    def _load_best_model(self) -> None:
        with (
            self._local_copy(self.state.best_model_checkpoint) as local,
            attribute_replaced(self.state, "best_model_checkpoint", local),
        ):
            super()._load_best_model()

    def _finalize_training(self, *arguments: Any, **options: Any) -> Any:
        self.wait_for_save()  # it may load the best checkpoint, or delete all others
        return super()._finalize_training(*arguments, **options)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._run) if self._run else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.wait_for_save()
        run = Path(self._get_output_dir(trial))
        if self._store:
            run = self._store / run.relative_to(self.args.output_dir)
        path = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        save = partial(super()._save_checkpoint, model, trial)
        if reason := self._saver.ranks.run_on_first_rank(lambda: why_not_in_background(self, path)):
            warn(f"{reason}, so the training waits until {path.name} is written")
            if not self._store:
                self._saver.ranks.run_on_first_rank(lambda: delete_manifests(path))
                save()
                return
        write = partial(self._write_files, save, path=path, is_sharded=not reason)
        self._saver.save(path, write, overwrite=self._store is not None)
        if self.is_world_process_zero():
            limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
            if not self._store:
                # absolute, because the training may change its directory before the thread gets there
                root, best = str(run.absolute()), best and str(Path(best).absolute())
                self._saver.then(partial(rotate_checkpoints, root, limit, best, use_mtime=True))
            elif limit:
                self._saver.then(partial(delete_in_store, run, partial(checkpoints_over_limit, path, limit, best)))

    def _write_files(self, save: Any, folder: Path, *, path: Path, is_sharded: bool) -> None:
        """Let the Trainer save into `folder`, which will be `path`."""
        self._run = folder.parent
        try:
            with without_offload(self.accelerator.state.fsdp_plugin) if is_sharded else nullcontext():
                save()
        finally:
            self._run = None
        if self.state.best_model_checkpoint == str(folder):
            self.state.best_model_checkpoint = str(path)
        if self.is_world_process_zero():
            self.state.save_to_json(str(folder / STATE))
            if is_sharded:
                save_config_and_tokenizer(folder, {"model": self.model, "processing_class": self.processing_class})
            else:
                self._saver.defer(lambda directory, _: add_manifest(directory, path), folder, None)


def checkpoints_over_limit(saved: Path, limit: int, best: str | None) -> list[Path]:
    """Return the oldest checkpoints above `limit`, as the Trainer's `rotate_checkpoints` would delete them."""
    names = {saved.name, Path(best or saved).name}
    paths = [checkpoint.path for checkpoint in RunFolder(saved.parent).checkpoints()]
    checkpoints = [path for path in paths if path.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")]
    others = [path for path in checkpoints if path.name not in names]
    return others[: max(0, len(checkpoints) - max(limit, len(names)))]


def why_not_in_background(trainer: Any, path: Path) -> str | None:
    """Return why a Trainer's checkpoint at `path` cannot be saved in the background; None if it can."""
    if not is_remote(path) and path.exists():
        return f"{path} exists"
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if plugin is None or plugin.fsdp_version != 2:
        return "this Trainer does not use FSDP2"
    unsupported = [name for name in ("push_to_hub", "save_only_model") if getattr(trainer.args, name)]
    return why_not_sharded(plugin) or (f"{unsupported[0]} is set" if unsupported else None)
