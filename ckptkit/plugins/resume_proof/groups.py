"""Tell which group of a training's state an entry of a checkpoint belongs to, by its key path."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
