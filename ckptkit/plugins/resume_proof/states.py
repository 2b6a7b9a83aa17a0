"""Read what a checkpoint contains: every tensor and every number, each with the group of state that it belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checks.open import LazyCheckpoint
from ckptkit.checks.verify import verify
from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats import detect_format
from ckptkit.layout import Layout
from ckptkit.models.companions import FILES
from ckptkit.models.names.weights import find_weights_or_none
from ckptkit.plugins.resume_proof.containers import Container, containers_in_layout, find_container_in, map_scalars

WEIGHTS = "weights"
MOMENTS = "optimizer moments"
OPTIMIZER_STEP = "optimizer step"
OPTIONS = "optimizer options"  # of the parameter groups: the learning rate above all
SCHEDULER = "scheduler"
RANDOM = "random state"
DATA = "data position"
SCALER = "gradient scaler"
EMA = "EMA"
STEP = "step"
OTHER = "other"
SETTINGS = "settings"  # that a run was started with, as a path to resume from: not in GROUPS, so never compared

# The order in which groups are shown.
GROUPS = (WEIGHTS, MOMENTS, OPTIMIZER_STEP, OPTIONS, SCHEDULER, RANDOM, DATA, SCALER, EMA, STEP, OTHER)

# What to do about a group that the script does not restore.
IMPERATIVES = {
    WEIGHTS: "load the weights under the names that the model has, with strict=True",
    MOMENTS: "load the optimizer's state by parameter name, after `fully_shard` and before the first step",
    OPTIMIZER_STEP: "load the whole state dict of the optimizer, with its steps",
    OPTIONS: "load the optimizer after the learning rate is set, or save the scheduler too",
    SCHEDULER: "save `scheduler.state_dict()` and load it after the scheduler is made",
    RANDOM: "save the random state of every rank and restore it as the last thing before the first step",
    DATA: "save the position in the data, or restore it if it is saved, and call `set_epoch` with its epoch",
    SCALER: "save `scaler.state_dict()` and load it before the first step",
    EMA: "save the averaged weights and load them before the first update",
    STEP: "continue with the step after the one in the checkpoint",
    OTHER: "restore the entry, or leave it out of the checkpoint",
}

_LIST = {"log_history", "history", "logs"}  # of what happened; nobody resumes from it
_SETTINGS = {"config", "args", "model_args", "training_args", "hyper_parameters"}
_STEP_NAMES = {
    *("step", "steps", "global_step", "global_steps", "iteration", "iter", "iter_num", "epoch", "current_step"),
    *("train_steps", "num_steps", "consumed_samples", "tokens", "steps_taken", "samples", "sequences"),
}
_BY_WORD = (
    (EMA, re.compile(r"(^|_)ema(_|$)|averaged")),
    (SCALER, re.compile(r"scaler")),
    (SCHEDULER, re.compile(r"sched")),
    (RANDOM, re.compile(r"(^|_)rngs?(_|$)|random|generator|(^|_)seed$")),
    (
        DATA,
        re.compile(r"loader|sampler|dataset|(^|_)data(_|$)|(^|_)loops?$|(^|_)batch(es)?(?!_size)(_|$)|^pos(ition)?$"),
    ),
    ("optimizer", re.compile(r"^optim|optimizer|^opt$")),
)
_OUTPUTS = (".pt", ".pth", ".bin", ".safetensors")
Prefix = tuple[str | int, ...]


def state_group_of(path: Sequence[str | int], *, is_tensor: bool, is_weight: bool = False) -> str:
    """Return the group of an entry, OTHER where nothing in its key path tells.

    The first word of the path decides, so that an optimizer's `step` belongs to the optimizer.
    """
    words = [word.lower() for step in path for word in str(step).split(".")]
    kind = next((kind for word in words for kind, pattern in _BY_WORD if pattern.search(word)), None)
    if is_weight and kind != EMA:
        return WEIGHTS
    if _SETTINGS.intersection(words):
        return SETTINGS
    if _LIST.intersection(words):
        return OTHER
    if kind == "optimizer":
        return group_in_optimizer(words, is_tensor=is_tensor)
    if kind is not None:
        return kind
    return STEP if words and words[-1] in _STEP_NAMES else OTHER


def group_in_optimizer(words: Sequence[str], *, is_tensor: bool) -> str:
    if "param_groups" in words:
        return OTHER if "params" in words or "param_names" in words else OPTIONS
    if words[-1] == "step":
        return OPTIMIZER_STEP
    return MOMENTS if is_tensor else OTHER


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint: its group, and its name in the layout that says where it lies."""

    group: str
    layout: Layout
    name: str


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A number, text or bytes in a checkpoint: its group, and the way to it in the container that it lies in."""

    group: str
    value: Any
    container: Container
    path: Prefix


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """All of a checkpoint by dotted names. `unread` has a line for each file that could not be read."""

    path: Path
    trainer: str | None
    formats: tuple[str, ...]
    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, SavedValue]
    unread: tuple[str, ...]

    @property
    def groups(self) -> list[str]:
        found = {entry.group for entry in self.tensors.values()} | {entry.group for entry in self.values.values()}
        return [group for group in GROUPS if group in found]

    def names_in(self, group: str) -> list[str]:
        """Return the names of the entries in a group, tensors first."""
        entries: dict[str, SavedTensor | SavedValue] = {**self.tensors, **self.values}
        return [name for name, entry in entries.items() if entry.group == group]

    def read_tensor(self, name: str) -> np.ndarray[Any, Any]:
        tensor = self.tensors[name]
        return LazyCheckpoint(tensor.layout)[tensor.name].numpy()


def read_checkpoint_contents(path: Path) -> CheckpointContents:
    """Return what the checkpoint at a path contains; runs no code from it.

    Raises `Unsupported` if no format of ckptkit claims it. Files that cannot be read are named in the result.
    """
    checkpoint = Checkpoint.at(path)
    if not checkpoint.components:
        raise checkpoint.unsupported_files_error or Unsupported("ckptkit does not know this format", path=path)
    tensors: dict[str, SavedTensor] = {}
    containers: list[Container] = []
    unread: list[str] = []
    used: set[Path] = set()
    for component in checkpoint.components:
        prefix: Prefix = (component.place,) if component.place and component.under is None else ()
        try:
            layout = component.layout
        except Unsupported as error:  # its files are read one by one below
            unread.append(error.line)
            continue
        used |= {layout.root / name for name in layout.files}
        weights = find_weight_names(layout) if component.is_model else set()
        tensors.update(saved_tensors_by_prefixed_name(layout, prefix, weights))
        containers += containers_in_layout(layout, prefix)
    for file in state_files_in(path):
        prefix = key_prefix_of_file(file, path)
        if file not in used and (loose := find_layout_of_tensor_file(file)):
            tensors.update(saved_tensors_by_prefixed_name(loose, prefix, find_weight_names(loose) if unread else set()))
        containers += [inside] if (inside := find_container_in(file, prefix)) else []
    values: dict[str, SavedValue] = {}
    for container in containers:
        try:
            values |= saved_values_in(container)
        except (Corrupt, Unsupported) as error:
            unread.append(error.line)
    formats = tuple(dict.fromkeys(component.reader.name for component in checkpoint.components))
    trainer = checkpoint.trainer_by_file_names if unread else checkpoint.trainer
    return CheckpointContents(path, trainer, formats, tensors, values, tuple(unread))


def read_tensors_beside_checkpoints(run: Path, checkpoints: Iterable[Path]) -> CheckpointContents:
    """Return what lies in the files of tensors in a run beside its checkpoints, such as weights saved at its end."""
    tensors: dict[str, SavedTensor] = {}
    inside = set(checkpoints)
    for file in state_files_in(run):
        if (
            file.suffix in _OUTPUTS
            and not inside.intersection((file, *file.parents))
            and (loose := find_layout_of_tensor_file(file))
        ):
            tensors |= dict(saved_tensors_by_prefixed_name(loose, key_prefix_of_file(file, run), set()))
    return CheckpointContents(run, None, (), tensors, {}, ())


def find_weight_names(layout: Layout) -> set[str]:
    found = find_weights_or_none(layout)
    return set(found.origins_of(found.layout.tensors)) if found else set()


def saved_tensors_by_prefixed_name(
    layout: Layout, prefix: Prefix, weights: set[str]
) -> Iterator[tuple[str, SavedTensor]]:
    for name in layout.tensors:
        key = (*prefix, *layout.key(name))
        group = state_group_of(key, is_tensor=True, is_weight=name in weights)
        yield ".".join(map(str, key)), SavedTensor(group, layout, name)


def saved_values_in(container: Container) -> dict[str, SavedValue]:
    made: dict[str, SavedValue] = {}

    def visit(path: Prefix, value: Any) -> Any:
        key = (*container.prefix, *path)
        made[".".join(map(str, key))] = SavedValue(state_group_of(key, is_tensor=False), value, container, path)
        return value

    map_scalars(container.load_value(), visit)
    return made


def state_files_in(path: Path) -> list[Path]:
    """Return the files of a checkpoint that may contain states, in order; a model's config and tokenizer do not."""
    there = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [file for file in there if file.name not in FILES and file.name != MANIFEST and ".index." not in file.name]


def key_prefix_of_file(file: Path, root: Path) -> Prefix:
    """Return the way to the contents of a file: the directories below the checkpoint, and its name."""
    return tuple(file.relative_to(root).with_suffix("").parts) if file != root else ()


def find_layout_of_tensor_file(file: Path) -> Layout | None:
    """Return where the tensors in a file beside the model lie, None if it has none that can be read."""
    reader = detect_format(file)
    try:
        return reader.read(file) if reader else None
    except (Corrupt, Unsupported):
        return None


def list_damage(path: Path) -> list[str]:
    """Return what `ckptkit verify` finds wrong with a checkpoint, a line each."""
    return [problem.line for part in verify(path) for problem in part.problems]
