"""The training runs of a smoke test, each executed on first access, and comparisons of their results.

torch alone reads the results, so that the comparisons do not depend on ckptkit's readers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckptkit.checkpoints.run import RunFolder
from ckptkit.conversion.convert import reshard
from ckptkit.training.config import Device, TrainConfig
from ckptkit.training.launch import launch
from ckptkit.training.metrics import StepMetrics
from ckptkit.training.models.config import ModelConfig
from ckptkit.training.models.llama import Llama, LlamaBlueprint
from ckptkit.training.models.lora import Lora, LoraBlueprint
from ckptkit.training.saving.state import tensors_by_dotted_key
from ckptkit.training.smoke.rank_tasks import RankAccount, load_and_save, take_step_from_each, train_and_report
from ckptkit.training.smoke.run_check import CheckFailed


def require_equal_checkpoints(one: Path, other: Path, name_prefix: str = "") -> str:
    """Compare all tensors of two checkpoints, read by torch. Raises `CheckFailed` if they differ.

    With `name_prefix`, only tensors of the first checkpoint whose name starts with `name_prefix` are expected in the
    second.
    """
    expected = {name: tensor for name, tensor in read_tensors_by_torch(one).items() if name.startswith(name_prefix)}
    count = require_equal_tensors(expected, read_tensors_by_torch(other))
    return f"{count} tensors of {name_prefix or 'model and optimizer'} equal, bit for bit"


def require_equal_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> int:
    """Compare tensors by name, and return their number. Raises `CheckFailed` if names or values differ."""
    if found.keys() != expected.keys():
        raise CheckFailed(f"names that only one side has: {sorted(found.keys() ^ expected.keys())}")
    wrong = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {len(expected)} tensors differ, first `{wrong[0]}`")
    return len(expected)


def steps_of_rank_0(accounts: list[RankAccount]) -> list[StepMetrics]:
    return [step for account in accounts[:1] for step in account.steps]


STEPS, SAVED = 8, 4  # the run has 8 steps, with checkpoints at steps 4 and 8
ADAPTED = 4  # steps of the LoRA training, which saves in the middle and at the end
SIZES = (3, 16, 1)  # world sizes to reshard to, one after the other


@dataclass(frozen=True)
class SmokeRuns:
    """The run under test, the runs derived from it, and their results, each computed on first access.

    `out` is the directory of the export, `scratch` a directory for the derived runs.
    """

    config: TrainConfig
    nproc: int
    out: Path
    scratch: Path

    @cached_property
    def first_accounts(self) -> list[RankAccount]:
        return run_ranks(partial(train_and_report, self.config), self.nproc)

    @cached_property
    def resumed_accounts(self) -> list[RankAccount]:
        return run_ranks(partial(train_and_report, self._resumed_config("resumed", self.config.run, SAVED)), self.nproc)

    @cached_property
    def replicated_accounts(self) -> list[RankAccount]:
        config = replace(self.config, run=self.scratch / "ddp", strategy="ddp", steps=2)
        return run_ranks(partial(train_and_report, config), self.nproc)

    @cached_property
    def other_world_size_path(self) -> Path:
        """Return the last checkpoint, loaded by one more rank and saved as one file."""
        config = replace(
            self._resumed_config("other", self.config.run, STEPS), state_dict="full", device=self._any_device
        )
        run_ranks(partial(load_and_save, config), self.nproc + 1)
        return RunFolder(config.run).checkpoint(STEPS)

    @cached_property
    def path_resharded_from_full(self) -> Path:
        """Return the checkpoint `other_world_size_path`, loaded and saved as shards again."""
        config = self._resumed_config("back", self.other_world_size_path.parent, STEPS)
        run_ranks(partial(load_and_save, config), self.nproc)
        return RunFolder(config.run).checkpoint(STEPS)

    @cached_property
    def resharded_paths(self) -> list[Path]:
        """Return the last checkpoint resharded to the world sizes `SIZES`, each from the previous result."""
        checkpoints = [self.last_checkpoint_path]
        for size in SIZES:
            checkpoints.append(reshard(checkpoints[-1], self.scratch / f"for-{size}", to=size).output)
        return checkpoints[1:]

    @cached_property
    def original_and_resharded_steps(self) -> list[RankAccount]:
        """Return reports of `nproc + 1` ranks that take the step after the first checkpoint.

        Each report has two steps: from the original checkpoint, and from the resharded checkpoint.
        """
        original = RunFolder(self.config.run).checkpoint(SAVED)
        size = self.nproc + 1
        resharded = reshard(original, self.scratch / "resharded", to=size).output
        config = replace(self.config, run=self.scratch / "stepped", device=self._any_device)
        return run_ranks(partial(take_step_from_each, config, [original, resharded]), size)

    @property
    def _any_device(self) -> Device:
        return "auto" if self.config.device == "cuda" else self.config.device  # one more rank may not have a GPU

    def _resumed_config(self, name: str, run: Path, step: int) -> TrainConfig:
        return replace(self.config, run=self.scratch / name, resume=str(RunFolder(run).checkpoint(step)))

    @property
    def last_checkpoint_path(self) -> Path:
        latest = RunFolder(self.config.run).latest()
        if latest is None:
            raise CheckFailed(f"no checkpoint in {self.config.run}")
        return latest.path

    @cached_property
    def trained_model(self) -> Llama:
        """Return the built-in model with the weights of the last checkpoint, read by torch alone."""
        model = Llama(ModelConfig.from_config_json(self.last_checkpoint_path / "config.json"))
        with warnings.catch_warnings(action="ignore"):  # torch warns about no_dist, which is intended
            state_dict_loader.load({"model": model.state_dict()}, checkpoint_id=self.last_checkpoint_path, no_dist=True)
        return model

    @property
    def _lora_config(self) -> TrainConfig:
        return replace(
            self.config, run=self.scratch / "adapters", weights=self.out, steps=ADAPTED, save_every=ADAPTED // 2,
            lora_rank=4, state_dict="adapter",
        )  # fmt: skip

    @cached_property
    def lora_accounts(self) -> list[RankAccount]:
        return run_ranks(partial(train_and_report, self._lora_config), self.nproc)

    @cached_property
    def resumed_lora_accounts(self) -> list[RankAccount]:
        """Return the ranks' reports of the LoRA training, resumed in the middle."""
        middle = RunFolder(self._lora_config.run).checkpoint(ADAPTED // 2)
        config = replace(self._lora_config, run=self.scratch / "adapters-again", resume=str(middle))
        return run_ranks(partial(train_and_report, config), self.nproc)

    @property
    def adapter_checkpoint_path(self) -> Path:
        return RunFolder(self._lora_config.run).checkpoint(self.lora_accounts[0].steps[-1].step)

    @cached_property
    def model_with_adapters(self) -> nn.Module:
        """Return the built-in model with the exported weights and the trained adapters, read without ckptkit."""
        config = self._lora_config
        lora = Lora(config.lora_rank or 0, config.lora_alpha, config.lora_targets)
        base = LlamaBlueprint(ModelConfig.from_config_json(self.out / "config.json"))
        model = LoraBlueprint(base, lora, torch.float32, None).build()
        adapters = {
            name.removeprefix("model."): tensor
            for name, tensor in read_tensors_by_torch(self.adapter_checkpoint_path).items()
        }
        _, unexpected = model.load_state_dict(self.exported_tensors | adapters, strict=False)
        if any(not name.startswith("optim.") for name in unexpected):
            raise CheckFailed(f"the built-in model does not have the tensors {unexpected}")
        return model

    @cached_property
    def exported_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the export by name."""
        files = sorted(self.out.glob("*.safetensors"))
        if not files:
            raise CheckFailed(f"no safetensors in {self.out}")
        return {name: tensor for path in files for name, tensor in load_file(path).items()}

    @cached_property
    def prompt_tokens(self) -> Tensor:
        """Return tokens to compare logits on: int64 [4, sequence_length]."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(
            self.trained_model.config.vocab_size, (4, self.config.sequence_length), generator=generator
        )


def run_ranks(task: Callable[..., None], nproc: int) -> list[RankAccount]:
    """Run a task on `nproc` ranks, and return their reports in the order of ranks."""
    accounts: list[RankAccount] = []
    launch(task, nproc, accounts.append)
    return sorted(accounts, key=lambda account: account.rank)


def read_tensors_by_torch(checkpoint: Path) -> dict[str, Tensor]:
    """Return all tensors of a sharded or full checkpoint by their dotted names, read by torch alone."""
    if (checkpoint / "state.pt").exists():
        return dict(tensors_by_dotted_key(torch.load(checkpoint / "state.pt", weights_only=True)))
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings(action="ignore"):
        state_dict_loader.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    return tensors
