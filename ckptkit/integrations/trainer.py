"""Save the checkpoints of transformers' Trainer under FSDP2 in the background.

BackgroundTrainer(...).train(resume_from_checkpoint=True)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from ckptkit.errors import warn
from ckptkit.integrations.transformers import SHARDS, save_config_and_tokenizer
from ckptkit.io.staging import Stage, errors_naming_destination
from ckptkit.storage import RoomWriter
from ckptkit.storage.ranks import Ranks
from ckptkit.training.saving.run import ignore_torch_warnings
from ckptkit.training.saving.save import Saver, copy_to_cpu
from ckptkit.training.saving.state import Tree, take_optimizer_state

OPTIMIZER = "optimizer_0"  # directory in a Trainer checkpoint that has the optimizer's shards
SCHEDULER, STATE = "scheduler.pt", "trainer_state.json"  # files in it


class BackgroundTrainer(Trainer):  # type: ignore[misc]
    """transformers' Trainer, which under FSDP2 waits only for a copy of the state, and not until it is written.

    To add this to a subclass of the Trainer: `class MyTrainer(BackgroundTrainer, SFTTrainer)`. A checkpoint has the
    same files as one of the Trainer, and `resume_from_checkpoint` loads it. It also has config.json, the tokenizer and
    a CRC-32 of each tensor. It appears under its name when all ranks have written it, and only then `save_total_limit`
    deletes an older one. Until then each rank holds a copy of its shards in memory. `train` waits for the last save.

    A save that fails raises in the next save, or at the end of the training. The Trainer itself saves, with a warning,
    without FSDP2's SHARDED_STATE_DICT, with `push_to_hub`, and to a directory that exists.
    """

    _saving: Future[None] | None = None
    _folder: Path | None = None  # where the Trainer's own code writes during a save

    @cached_property
    def _ranks(self) -> Ranks:
        ignore_torch_warnings()
        return Ranks.in_separate_group()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="ckptkit")

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is visible. Raises the error of any rank on all ranks."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

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
        return str(self._folder) if self._folder else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.wait_for_save()
        run = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if reason := self._ranks.run_on_first_rank(lambda: why_not_in_background(self, run / name)):
            warn(f"{reason}, so the training waits until {name} is written")
            super()._save_checkpoint(model, trial)
            return
        stage = Stage(run / name)
        try:
            self._folder = self._ranks.run_on_first_rank(lambda: stage.open().path)
            folder = self._folder / name
            self._ranks.run_on_first_rank(folder.mkdir)
            super()._save_checkpoint(model, trial)
            if self.state.best_model_checkpoint == str(folder):
                self.state.best_model_checkpoint = str(run / name)
            if self.is_world_process_zero():
                self.state.save_to_json(str(folder / STATE))
                save_config_and_tokenizer(folder, {"model": self.model, "processing_class": self.processing_class})
            pending = copy_to_cpu(self._state_to_write())
        except BaseException:
            stage.discard()
            raise
        finally:
            self._folder = None
        rotate = partial(rotate_checkpoints, str(run), self.args.save_total_limit, self.state.best_model_checkpoint)
        self._saving = self._thread.submit(self._write_and_publish, stage, folder, pending, rotate)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._folder is None:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    def _state_to_write(self) -> Tree:
        """Return what the Trainer saves: the model's state, or that of its adapter, and the optimizer's."""
        peft = sys.modules.get("peft")
        if peft and isinstance(self.model, peft.PeftModel):
            model = peft.get_peft_model_state_dict(self.model, adapter_name=self.model.active_adapter)
        else:
            model = get_model_state_dict(self.model)
        return {"model": model, "optimizer": take_optimizer_state(self.model, self.optimizer, self._ranks)}

    def _write_and_publish(self, stage: Stage, folder: Path, pending: Tree, rotate: Callable[[], None]) -> None:
        """Write the state and make the checkpoint visible. Runs in a thread."""
        saver = Saver(self._ranks, "sharded", {})
        try:
            with errors_naming_destination(stage.dst):
                for name, entry in ((SHARDS, "model"), (OPTIMIZER, "optimizer")):
                    self._ranks.run_on_first_rank((stage.path / name).mkdir)
                    writer = RoomWriter(stage.path / name, "dcp")
                    saver.write_state(writer, {entry: pending[entry]}, stage.dst / name)
                self._ranks.run_on_first_rank(partial(publish_folder, stage, folder))
        except BaseException:
            stage.discard()
            raise
        if self.is_world_process_zero():
            rotate()


def publish_folder(stage: Stage, folder: Path) -> None:
    """Make the files in `folder` the output of the stage that contains it."""
    for file in folder.iterdir():
        file.rename(stage.path / file.name)
    folder.rmdir()
    stage.commit()


def why_not_in_background(trainer: Any, path: Path) -> str | None:
    """Return why a Trainer's checkpoint at `path` cannot be saved in the background; None if it can."""
    if path.exists():
        return f"{path} exists"
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if plugin is None or plugin.fsdp_version != 2:
        return "this Trainer does not use FSDP2"
    if "SHARDED_STATE_DICT" not in str(plugin.state_dict_type):
        return f"fsdp_config has {plugin.state_dict_type}, not SHARDED_STATE_DICT"
    unsupported = [name for name in ("push_to_hub", "save_only_model") if getattr(trainer.args, name)]
    return f"{unsupported[0]} is set" if unsupported else None
