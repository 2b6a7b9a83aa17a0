"""Save the checkpoints of transformers' Trainer under FSDP2 in the background.

BackgroundTrainer(...).train(resume_from_checkpoint=True)
"""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from ckptkit.errors import warn
from ckptkit.integrations.accelerate import why_not_sharded, without_offload
from ckptkit.integrations.background import BackgroundSaver
from ckptkit.integrations.transformers import save_config_and_tokenizer

STATE = "trainer_state.json"


class BackgroundTrainer(Trainer):  # type: ignore[misc]
    """transformers' Trainer, which under FSDP2 waits only for a copy of the state, and not until it is written.

    To add this to a subclass of the Trainer: `class MyTrainer(BackgroundTrainer, SFTTrainer)`. A checkpoint has the
    same files as one of the Trainer, and `resume_from_checkpoint` loads it. It also has config.json, the tokenizer and
    a CRC-32 of each tensor. It appears under its name when all ranks have written it, and only then `save_total_limit`
    deletes an older one. Until then each rank holds a copy of its shards in memory. `train` waits for the last save.

    A save that fails raises in the next save, or at the end of the training. The Trainer itself saves, with a warning,
    without FSDP2's SHARDED_STATE_DICT, with `push_to_hub`, and to a directory that exists.
    """

    _run: Path | None = None  # where the Trainer's own code writes during a save

    @cached_property
    def _saver(self) -> BackgroundSaver:
        return BackgroundSaver()

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is visible. Raises the error of any rank on all ranks."""
        self._saver.wait()

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train, and wait for the last save."""
        try:
            return super().train(*arguments, **options)
        finally:
            self.wait_for_save()

    def _finalize_training(self, *arguments: Any, **options: Any) -> Any:
        self.wait_for_save()  # it may load the best checkpoint, or delete all others
        return super()._finalize_training(*arguments, **options)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._run) if self._run else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.wait_for_save()
        run = Path(self._get_output_dir(trial))
        path = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        save = partial(super()._save_checkpoint, model, trial)
        if reason := self._saver.ranks.run_on_first_rank(lambda: why_not_in_background(self, path)):
            warn(f"{reason}, so the training waits until {path.name} is written")
            save()
            return
        self._saver.save(path, lambda folder: self._write_files(save, folder, path))
        if self.is_world_process_zero():
            limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
            self._saver.then(partial(rotate_checkpoints, str(run), limit, best, use_mtime=True))

    def _write_files(self, save: Any, folder: Path, path: Path) -> None:
        """Let the Trainer save into `folder`, which will be `path`."""
        self._run = folder.parent
        try:
            with without_offload(self.accelerator.state.fsdp_plugin):
                save()
        finally:
            self._run = None
        if self.state.best_model_checkpoint == str(folder):
            self.state.best_model_checkpoint = str(path)
        if self.is_world_process_zero():
            self.state.save_to_json(str(folder / STATE))
            save_config_and_tokenizer(folder, {"model": self.model, "processing_class": self.processing_class})


def why_not_in_background(trainer: Any, path: Path) -> str | None:
    """Return why a Trainer's checkpoint at `path` cannot be saved in the background; None if it can."""
    if path.exists():
        return f"{path} exists"
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if plugin is None or plugin.fsdp_version != 2:
        return "this Trainer does not use FSDP2"
    unsupported = [name for name in ("push_to_hub", "save_only_model") if getattr(trainer.args, name)]
    return why_not_sharded(plugin) or (f"{unsupported[0]} is set" if unsupported else None)
