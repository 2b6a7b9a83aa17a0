"""Settings of a training run: validated once, written as TOML and read back.

Each field of `TrainConfig` is a key of the TOML file and an option of `ckptkit train`.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from ckptkit.errors import Usage, hint_on_choices, translate_os_errors
from ckptkit.io.destination import require_multi_process_store
from ckptkit.io.file import read_small
from ckptkit.io.path import drop_cached_listing, is_remote, to_path
from ckptkit.runs.retention import Best
from ckptkit.settings import Help, Setting, settings_of
from ckptkit.training.models.config import require_at_least

SETTINGS = "train.toml"  # in the run's directory: the settings that it was started with
_LIMIT = 1 << 20  # bytes of a settings file; a larger file is not a settings file
Device = Literal["auto", "cpu", "cuda"]
Strategy = Literal["full_shard", "shard_grad_op", "hybrid_shard", "ddp"]
StateDict = Literal["sharded", "full", "hf", "adapter"]
_IN_STORES = ("sharded", "adapter")  # values of `state_dict` that a store supports
SAVED_METRICS = ("loss",)  # fields of `StepMetrics` that each checkpoint contains
AUTO = "auto"  # value of `resume`: continue from the latest checkpoint, if there is one
LORA_ALPHA = 8  # the default of `LoraConfig`
_IN_TOML = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of one training run. Sizes are global: they do not depend on the world size."""

    run: Path
    # the model
    model: Annotated[
        str, Help("A size (tiny, 3m, 60m, 1b, 3b, 8b, 70b), config.json, model directory or Hub id.", "MODEL")
    ] = "tiny"
    untied: Annotated[bool, "Do not share embedding and output weights, if the model is a size such as 8b."] = False
    weights: Annotated[Path | None, "Start from the weights of this checkpoint; any format."] = None
    freeze: Annotated[tuple[str, ...], Help("Do not train parameters that match this glob; repeatable.", "GLOB")] = ()
    lora_rank: Annotated[int | None, "Train LoRA adapters of this rank instead of the model."] = None
    lora_alpha: Annotated[int, "Scale adapters by alpha / rank."] = LORA_ALPHA
    lora_targets: Annotated[
        tuple[str, ...], Help("Linear layers to adapt; repeatable; by default all in the blocks.", "NAME")
    ] = ()
    # the data
    data: Annotated[Path | None, "Text, JSONL or token files; by default the Python library's sources."] = None
    tokenizer: Annotated[
        str | None, Help("A Hugging Face tokenizer; by default the model's own, or bytes.", "MODEL")
    ] = None
    sequence_length: Annotated[int, "Tokens per sequence."] = 256
    batch_size: Annotated[int, "Sequences per step, over all ranks."] = 8
    micro_batch_size: Annotated[
        int, "Sequences per forward pass; the rank accumulates gradients. 0: all sequences of the rank at once."
    ] = 0
    # the optimizer
    steps: Annotated[int, "Steps of the whole run."] = 100
    lr: Annotated[float, "The highest learning rate."] = 1e-3
    warmup: Annotated[int, "Steps until the learning rate reaches its highest value."] = 10
    weight_decay: Annotated[float, "Weight decay of AdamW, for matrices only."] = 0.1
    clip: Annotated[float, "Clip the gradient norm to this value."] = 1.0
    seed: Annotated[
        int, "Seed of weights, data and dropout. Weights and batches are the same for any number of ranks."
    ] = 0
    # the ranks
    device: Annotated[Device, "Where to train."] = "auto"
    fsdp: Annotated[Literal["1", "2"], "The version of FSDP."] = "2"
    strategy: Annotated[Strategy, "What to shard."] = "full_shard"
    replicas: Annotated[int, "Copies of the model with hybrid_shard, each on an equal share of the ranks."] = 1
    wrap: Annotated[Literal["block", "size"], "What FSDP1 wraps: transformer blocks, or modules by size."] = "block"
    wrap_parameters: Annotated[int, "With --wrap size: the smallest unit, in parameters."] = 100_000_000
    prefetch: Annotated[int, "Blocks to gather ahead of the current one."] = 1
    param_dtype: Annotated[
        Literal["auto", "fp32", "bf16"], "Dtype to compute in; auto: bf16 on GPUs that support it."
    ] = "auto"
    reduce_dtype: Annotated[Literal["fp32", "bf16"], "Dtype to reduce gradients in."] = "fp32"
    cpu_offload: Annotated[bool, "Keep shards, gradients and optimizer in host memory."] = False
    recompute_every: Annotated[int, "Recompute the activations of every n-th block in backward; 0: none."] = 0
    compile: Annotated[bool, "Compile the blocks and the loss."] = False
    deterministic: Annotated[bool, "Make results repeatable bit for bit on a GPU, where possible; slower."] = False
    # checkpoints and metrics
    save_every: Annotated[int, "Steps between checkpoints; the last step is always saved. 0: only the last."] = 500
    state_dict: Annotated[StateDict, "What to save: shards, one file, a Hugging Face model, or only adapters."] = (
        "sharded"
    )
    background: Annotated[bool, "Continue training while a checkpoint is written."] = False
    keep_last: Annotated[int | None, "Keep the last N checkpoints; without any --keep option, all."] = None
    keep_every: Annotated[int | None, "Keep checkpoints whose step is a multiple of N."] = None
    keep_best: Annotated[
        str | None, Help("Keep the best checkpoints; the only metric is loss.", "METRIC[:min|max][:N]")
    ] = None
    resume: Annotated[str | None, "Continue from a checkpoint; auto: from the latest, if there is one."] = None
    tensorboard: Annotated[bool, "Also write the metrics for TensorBoard."] = False

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) is not None:
                require_at_least(least, name, getattr(self, name))
        for name, setting in train_settings().items():
            choices = get_args(setting.kind) if get_origin(setting.kind) is Literal else None
            if choices and getattr(self, name) not in choices:
                raise Usage(f"unknown {name} `{getattr(self, name)}`", hint=f"use one of {', '.join(choices)}")
        if self.seed >= 2**32:
            raise Usage(f"--seed: expected less than 2**32, found {self.seed}")
        if not self.clip > 0:
            raise Usage(f"--clip: expected more than 0, found {self.clip}")
        if self.replicas > 1 and self.strategy != "hybrid_shard":
            raise Usage(
                f"--strategy: expected hybrid_shard for {self.replicas} replicas, found {self.strategy}",
                hint="pass --strategy hybrid_shard",
            )
        if self.wrap == "size" and self.fsdp == "2":
            raise Usage("--wrap: expected block for FSDP2, found size", hint="pass --fsdp 1 to wrap by size")
        require_consistent_lora_settings(self)
        require_local_paths(self)
        require_saved_metric(self.keep_best)

    def to_toml(self) -> str:
        """Return the settings as a TOML file; settings that are None are left out."""
        values = {name: getattr(self, name) for name in train_settings()}
        return "".join(f"{name} = {toml_value(value)}\n" for name, value in values.items() if value is not None)


LEAST = {
    "steps": 1, "batch_size": 1, "sequence_length": 1, "replicas": 1, "wrap_parameters": 1,
    "micro_batch_size": 0, "lr": 0, "warmup": 0, "weight_decay": 0, "seed": 0,
    "save_every": 0, "prefetch": 0, "recompute_every": 0,
    "keep_last": 1, "keep_every": 1, "lora_rank": 1, "lora_alpha": 1,
}  # fmt: skip


def require_local_paths(config: TrainConfig) -> None:
    """Raise `Usage` for a run or data path that is in a store although it must be local."""
    require_savable_to_store(config.run, config.state_dict)
    if config.tensorboard and is_remote(config.run):
        hint = "drop --tensorboard, because metrics.jsonl has the same metrics, or train into a local directory"
        raise Usage("TensorBoard appends to its files, which a store cannot do", path=config.run, hint=hint)
    if is_remote(config.data):
        raise Usage("ckptkit trains on local data only", path=config.data, hint="copy the data to this machine")


def require_savable_to_store(run: Path, state_dict: str) -> None:
    """Raise `Usage` if a run cannot save to a store in this format, because several ranks would write one object."""
    require_multi_process_store(run)
    if is_remote(run) and state_dict not in _IN_STORES:
        message = f"state dict `{state_dict}` cannot go straight to a store: several ranks would write one object"
        hint = f"save `{_IN_STORES[0]}`, then run `ckptkit convert CHECKPOINT OUT`; OUT may be a URL"
        raise Usage(message, path=run, hint=hint)


def require_saved_metric(keep_best: str | None) -> None:
    """Raise `Usage` if `keep_best` names a metric that checkpoints do not contain."""
    if keep_best is None:
        return
    metric = keep_best.partition(":")[0]
    if metric and metric not in SAVED_METRICS:
        names = ", ".join(SAVED_METRICS)
        message = f"--keep-best: expected a metric that checkpoints contain ({names}), found `{metric}`"
        raise Usage(message, hint=f"pass --keep-best {SAVED_METRICS[0]}")
    Best.parse(keep_best)


def require_consistent_lora_settings(config: TrainConfig) -> None:
    """Raise `Usage` for settings that contradict the training of LoRA adapters, or of a full model without LoRA."""
    if config.lora_rank is not None:
        if config.state_dict == "hf":
            hint = "pass --state-dict adapter, and merge the result with `ckptkit consolidate --merge`"
            raise Usage("--state-dict hf: a Hugging Face model cannot store adapters", hint=hint)
        if config.freeze:
            message = "--freeze has no effect: --lora-rank already freezes all other parameters"
            raise Usage(message, hint="drop --freeze")
        if config.wrap == "size":
            message = "--wrap: expected block for adapters, found size: a unit could mix adapters and other parameters"
            raise Usage(message, hint="pass --wrap block")
        return
    if config.state_dict == "adapter":
        raise Usage("--state-dict adapter: expected LoRA adapters to train, found none", hint="pass --lora-rank R")
    if config.lora_targets or config.lora_alpha != LORA_ALPHA:
        raise Usage("--lora-targets and --lora-alpha have no effect without --lora-rank", hint="pass --lora-rank R")
    if config.resume not in (None, AUTO) and config.weights:
        raise Usage(
            "--resume and --weights cannot be combined: a resumed checkpoint already contains weights",
            hint="drop --weights or --resume",
        )


def train_settings() -> dict[str, Setting]:
    """Return the settings by name, without `run` and `resume`, which are different in every run."""
    return {name: setting for name, setting in settings_of(TrainConfig).items() if name != "resume"}


def toml_value(value: object) -> str:
    """Return a value in TOML syntax, which for these types is JSON with DEL (0x7f) escaped."""
    plain = str(value) if isinstance(value, Path) else value
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007F")


def read_settings(path: Path) -> dict[str, Any]:
    """Return keyword arguments of `TrainConfig` from a TOML file.

    Raises `Usage` for an unknown setting or a value of the wrong type.
    """
    try:
        with translate_os_errors(path):
            path.stat()  # reports a missing file as missing
        values = tomllib.loads(read_small(path, _LIMIT).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Usage(f"not a TOML file: {error}", path=path) from error
    return parse_settings(values, path)


def parse_settings(values: Mapping[str, Any], path: Path | None = None) -> dict[str, Any]:
    """Return keyword arguments of `TrainConfig` from settings of a TOML file or a Python call.

    Raises `Usage` for an unknown setting or a value of the wrong type.
    """
    for name in values.keys() - train_settings().keys():
        near = get_close_matches(name, train_settings())
        raise Usage(f"unknown setting `{name}`", path=path, hint=hint_on_choices(near or train_settings()))
    return {name: parse_setting(name, value, path) for name, value in values.items()}


def parse_setting(name: str, value: object, path: Path | None) -> object:
    """Return `value` converted to the type of its setting. Raises `Usage` for another type."""
    kind = train_settings()[name].kind
    if value is None and train_settings()[name].default is None:
        return None
    if kind is float and type(value) is int:
        return float(value)
    if kind is Path and isinstance(value, str | os.PathLike):
        return to_path(value)
    if kind is str and isinstance(value, os.PathLike):  # a path of a model or tokenizer
        return os.fspath(value)
    if isinstance(value, list | tuple) and get_origin(kind) is tuple and all(isinstance(item, str) for item in value):
        return tuple(value)
    if get_origin(kind) is Literal:
        kind = str
    if type(value) is kind:
        return value
    raise Usage(f"{name}: expected {_IN_TOML.get(kind, 'a list of strings')}, found {value!r}", path=path)


def settings_to_resume_with(run: Path, resume: str | None) -> dict[str, Any]:
    """Return the settings that a resumed run was started with; {} for a new run."""
    path = drop_cached_listing(run) / SETTINGS
    return settings_from_file(path, resume) if resume is not None and path.is_file() else {}


def settings_from_file(config: Path, resume: str | None) -> dict[str, Any]:
    """Return the settings in the file `config` for a new run, or for a run that resumes from `resume`.

    `weights` is dropped if `resume` is a checkpoint, except for LoRA: an adapter checkpoint does not contain the base
    weights. With `resume="auto"` it stays, because a run without checkpoints starts from these weights.
    """
    values = read_settings(config)
    if resume not in (None, AUTO) and "lora_rank" not in values:
        values.pop("weights", None)
    return values
