"""Load a transformers model from any checkpoint without a conversion, and process checkpoints of its Trainer.

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
from ckptkit.checks.open import HubModel, Index, LazyTensor
from ckptkit.errors import Caution, CkptError, Mismatch, Unsupported, and_more
from ckptkit.formats.safetensors_headers import SPELLINGS
from ckptkit.models.companions import CONFIG
from ckptkit.models.transformers_model import model_class_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class TensorSlice:
    """A lazy tensor: indexing reads only the selected slice. `[...]` reads the full tensor and verifies its CRC-32."""

    tensor: LazyTensor
    owner: LazyStateDict

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        """Return the dtype in the spelling of safetensors, such as BF16."""
        return SPELLINGS[self.tensor.dtype]

    @property
    def shape(self) -> torch.Size:
        import torch

        return torch.Size(self.tensor.shape)

    @cached_property
    def dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.tensor.dtype)
        return dtype

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Return the slice for integers, slices without a step, and an ellipsis, on the CPU. Raises a `CkptError`."""
        try:
            return self.tensor[index].torch()
        except CkptError as error:
            self.owner.error = self.owner.error or error  # transformers may swallow it and raise another error
            raise


class LazyStateDict(Mapping[str, TensorSlice]):
    """The weights of a model by their names on the Hub. `error` is the first error that occurred in a read."""

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
    """Return the weights of the model in a checkpoint, or in a run's latest checkpoint, by their names on the Hub.

    The result is a read-only mapping. Its values have `get_shape`, `get_dtype`, `dtype` and `shape`; indexing reads a
    slice as a CPU tensor. The weights are equal to the output of `consolidate`: names and layout of the Hub, tied
    weights once, an adapter merged into `base`. `base` is the model with config.json, if the checkpoint has none.
    """
    return LazyStateDict(HubModel.open(source, base=base))


__all__ = ["CkptkitCallback", "lazy_state_dict", "load"]

LOG = "ckptkit.log"
SHARDS = "pytorch_model_fsdp_0"  # directory in a Trainer checkpoint that has the shards of FSDP
COMMANDS = ("manifest {ckpt} --overwrite", "verify {ckpt}", "consolidate {ckpt} {out}")
_GENERATION = "generation_config.json"
_logger = logging.getLogger(__name__)


def load(source: Source, *, base: str | Path | None = None, **options: Any) -> Any:
    """Return the transformers model in a checkpoint, or in a run's latest checkpoint, like `from_pretrained`.

    The class comes from config.json. Tensors are read directly from the checkpoint, in any format and family, local or
    remote, without a conversion or copy. Under tensor parallelism and FSDP, a rank reads only its own slices. `base` is
    a directory, a URL or a Hub id with the config.json, if the checkpoint does not have it; an adapter is merged into
    it. `options` are passed to `from_pretrained`, such as `dtype`, `device_map` and `distributed_config`.

    Raises `Mismatch` without a config.json, and for missing tensors, which transformers would initialize at random;
    `Unsupported` for a model type that transformers does not have; `Corrupt` for a damaged tensor.
    """
    state = lazy_state_dict(source, base=base)
    model, loading_info = from_lazy_state_dict(state, options)
    return (model, loading_info) if options.get("output_loading_info") else model


def from_lazy_state_dict(state: LazyStateDict, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model of a state dict, and the loading info of transformers. Raises the errors of `load`."""
    opened = state.model
    if is_deepspeed_zero3_enabled():
        hint = "run `ckptkit consolidate SRC OUT` and load OUT with from_pretrained"
        raise Unsupported("ZeRO 3 can only partition full tensors", path=opened.path, hint=hint)
    for remark in opened.remarks:
        if isinstance(remark, Caution):
            _logger.warning("%s", remark)
    try:
        model_class = model_class_of(transformers, opened.config)
        config, generation = read_configs(opened)
        arguments = {"generation_config": generation, **options, "output_loading_info": True}
        model, loading_info = model_class.from_pretrained(None, config=config, state_dict=state, **arguments)
    except CkptError as error:
        raise error.blame(path=opened.path) from error.__cause__
    except Exception as error:
        if state.error is not None:  # transformers collects the errors of tensors, and raises a less specific error
            raise state.error from error
        raise
    if state.error is not None:
        raise state.error
    if missing := sorted(loading_info["missing_keys"]):
        message = f"missing: `{type(model).__name__}` needs {', '.join(missing[:4])}{and_more(len(missing) - 4)}"
        hint = "pass base=MODEL, a directory or Hub id with the config.json of this model"
        raise Mismatch(message, path=opened.path, tensor=missing[0], hint=hint)
    model.name_or_path = model.config.name_or_path = str(opened.path)
    return model, loading_info


def read_configs(model: HubModel) -> tuple[Any, Any]:
    """Return the config and the generation config of a model, read by transformers from temporary files."""
    with TemporaryDirectory() as folder:
        for name in (CONFIG, _GENERATION):
            if name in model.files:
                Path(folder, name).write_bytes(model.files[name])
        config = AutoConfig.from_pretrained(folder)
        more = {} if _GENERATION in model.files else {"config_file_name": CONFIG, "_from_model_config": True}
        return config, GenerationConfig.from_pretrained(folder, **more)


class CkptkitCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that runs ckptkit `commands` on each checkpoint with `ckptkit watch`, in a separate process.

    By default each checkpoint gets a manifest, is verified, and is converted to a Hugging Face model in `exported` in
    the output directory, or in `out`. Only rank 0 starts the process, and a save does not wait for it.

    With one rank, the end of the training waits for the process. With several ranks, rank 0 waits when its own process
    exits, because the other ranks may need it until then. A command that fails is tried again, and then logged as a
    warning; it never ends the training. The output of the commands is in `ckptkit.log` in the output directory.
    """

    def __init__(self, commands: Sequence[str] = COMMANDS, *, out: str | Path | None = None) -> None:
        self.commands = tuple(commands)
        self.out = out
        self._process: subprocess.Popen[bytes] | None = None

    def on_save(self, args: Any, state: Any, _control: Any, **parts: Any) -> None:
        """Start processing the saved checkpoints, unless the process of an earlier save is still running."""
        if not state.is_world_process_zero:
            return
        checkpoint = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if (checkpoint / SHARDS).is_dir() and not (checkpoint / CONFIG).exists():
            save_config_and_tokenizer(checkpoint, parts)
        if self._process is None or self._process.poll() is not None:
            self._wait_and_warn(args.output_dir)
            self._start_watch(args.output_dir)

    def on_train_end(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Wait until all checkpoints are processed; with several ranks, wait at the exit of this process instead."""
        if not state.is_world_process_zero:
            return
        if args.world_size == 1:
            self._process_remaining(args.output_dir)
        else:
            atexit.unregister(self._process_remaining)
            atexit.register(self._process_remaining, str(Path(args.output_dir).absolute()))

    def _process_remaining(self, run: str) -> None:
        """Wait until all checkpoints are processed."""
        self._wait_and_warn(run)
        self._start_watch(run)  # for checkpoints that were saved while the first process was running
        self._wait_and_warn(run)

    def _start_watch(self, run: str) -> None:
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

    def _wait_and_warn(self, run: str) -> None:
        """Wait for the running process, if there is one, and log a warning if it failed."""
        process, self._process = self._process, None
        if process is not None and process.wait() != 0:
            _logger.warning("ckptkit could not handle a checkpoint: %s says why", Path(run, LOG))


def save_config_and_tokenizer(checkpoint: Path, trainer_parts: Mapping[str, Any]) -> None:
    """Save config and tokenizer into a sharded checkpoint, as the Trainer does only for full checkpoints.

    Without them transformers could not load the converted model. A failure is logged as a warning.
    """
    try:
        model = trainer_parts["model"]
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 adds this prefix to class names
        for part in (config, trainer_parts.get("processing_class")):
            if part is not None:
                part.save_pretrained(checkpoint)
    except Exception as error:  # noqa: BLE001 - an error on rank 0 alone would make the other ranks wait forever
        _logger.warning("could not write config.json into %s: %s", checkpoint, error)
