"""Load a model of transformers from any checkpoint without converting it; handle what transformers' Trainer saves.

model = load("run/ckpt-500", dtype="bfloat16")
Trainer(..., callbacks=[CkptkitCallback()])
"""

from __future__ import annotations

import atexit
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import transformers
from transformers import AutoConfig, GenerationConfig, TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ckptkit.checkpoints.checkpoint import Source
from ckptkit.checks.open import HubModel, LazyTensor
from ckptkit.errors import Caution, CkptError, Mismatch, Unsupported, and_more
from ckptkit.formats.safetensors_headers import SPELLINGS
from ckptkit.layout.views import Index
from ckptkit.models.companions import CONFIG
from ckptkit.models.transformers_model import class_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class TensorSlice:
    """A tensor that is read when it is indexed, and no more of it; `[...]` reads all of it and compares its CRC-32."""

    tensor: LazyTensor
    owner: LazyStateDict

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        """Return the dtype as safetensors spells it, such as BF16."""
        return SPELLINGS[self.tensor.dtype]

    @property
    def shape(self) -> torch.Size:
        import torch

        return torch.Size(self.tensor.shape)

    @cached_property
    def dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, self.tensor.dtype)
        return found

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Read the part of the tensor that integers, slices without a step, and an ellipsis choose."""
        try:
            return self.tensor[index].torch()
        except CkptError as error:
            self.owner.error = self.owner.error or error  # loaders may report another one
            raise


class LazyStateDict(Mapping[str, TensorSlice]):
    """The weights of a model under the Hub's names. `error` is the first one that a slice met."""

    def __init__(self, model: HubModel) -> None:
        self.model = model
        self.error: CkptError | None = None

    def __getitem__(self, name: str) -> TensorSlice:
        return TensorSlice(self.model.tensors[name], self)

    def __iter__(self) -> Iterator[str]:
        return iter(self.model.tensors)

    def __len__(self) -> int:
        return len(self.model.tensors)


def lazy_state_dict(source: Source, *, base: str | Path | None = None) -> LazyStateDict:
    """Return the weights of the model in a checkpoint, or in the latest of a run, under the names of the Hub.

    A read-only mapping. Its values have `get_shape`, `get_dtype`, `dtype` and `shape`, and indexing reads a part as a
    tensor on the CPU. They are what `consolidate` would write: names and layout of the Hub, tied weights once, an
    adapter merged into `base`. `base` names the model that has config.json, if the checkpoint does not have it.
    """
    return LazyStateDict(HubModel.open(source, base=base))


__all__ = ["CkptkitCallback", "lazy_state_dict", "load"]

LOG = "ckptkit.log"
SHARDS = "pytorch_model_fsdp_0"  # the directory in a checkpoint that FSDP's shards are in
COMMANDS = ("manifest {ckpt} --overwrite", "verify {ckpt}", "consolidate {ckpt} {out}")
_GENERATION = "generation_config.json"
_logger = logging.getLogger(__name__)


def load(source: Source, *, base: str | Path | None = None, **options: Any) -> Any:
    """Return the model in a checkpoint, or in the latest of a run, as `from_pretrained` loads its consolidated form.

    The class is the one that config.json names. Tensors are read from the checkpoint itself, of any format and family,
    local or remote: nothing is converted or copied first, and under tensor parallelism and FSDP a rank reads its own
    slices only. `base` is a directory, a URL or a Hub id with the config.json, if the checkpoint does not have one; an
    adapter is merged into it. `options` are those of `from_pretrained`, such as `dtype`, `device_map` and
    `distributed_config`.

    Raises a `CkptError`: `Mismatch` without a config.json, and for tensors that the model needs and that are missing,
    which transformers would initialize at random; `Unsupported` for a type of models that transformers does not have;
    `Corrupt` for a damaged tensor.
    """
    state = lazy_state_dict(source, base=base)
    model, found = from_lazy_state_dict(state, options)
    return (model, found) if options.get("output_loading_info") else model


def from_lazy_state_dict(state: LazyStateDict, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model of a state dict, and what transformers says of the tensors in it."""
    opened = state.model
    if is_deepspeed_zero3_enabled():
        hint = "run `ckptkit consolidate SRC OUT` and load OUT with from_pretrained"
        raise Unsupported("ZeRO-3 can only partition whole tensors", path=opened.path, hint=hint)
    for remark in opened.remarks:
        if isinstance(remark, Caution):
            _logger.warning("%s", remark)
    try:
        model_class = class_of(transformers, opened.config)
        config, generation = read_configs(opened)
        asked = {"generation_config": generation, **options, "output_loading_info": True}
        model, found = model_class.from_pretrained(None, config=config, state_dict=state, **asked)
    except CkptError as error:
        raise error.blame(path=opened.path) from error.__cause__
    except Exception as error:
        if state.error is not None:  # transformers collects errors of tensors, and raises another one
            raise state.error from error
        raise
    if state.error is not None:
        raise state.error
    if missing := sorted(found["missing_keys"]):
        message = f"missing: `{type(model).__name__}` needs {', '.join(missing[:4])}{and_more(len(missing) - 4)}"
        hint = "pass base=MODEL, a directory or Hub id with the config.json of this model"
        raise Mismatch(message, path=opened.path, tensor=missing[0], hint=hint)
    model.name_or_path = model.config.name_or_path = str(opened.path)
    return model, found


def read_configs(model: HubModel) -> tuple[Any, Any]:
    """Return the config of a model, and of its text generation, as transformers reads them from files."""
    with TemporaryDirectory() as folder:
        for name in (CONFIG, _GENERATION):
            if name in model.files:
                Path(folder, name).write_bytes(model.files[name])
        config = AutoConfig.from_pretrained(folder)
        more = {} if _GENERATION in model.files else {"config_file_name": CONFIG, "_from_model_config": True}
        return config, GenerationConfig.from_pretrained(folder, **more)


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
