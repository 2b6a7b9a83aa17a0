"""Find the model's entries in a training checkpoint, and what the model calls them. By names only.

The names that a checkpoint was flattened to (`model.model.norm.weight`) do not tell where a wrapper ends and the
model's own names begin; the recorded key paths do: `("model", "model.norm.weight")`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import escape
from itertools import accumulate
from shlex import quote

from ckptkit.errors import Mismatch, SeveralModels
from ckptkit.layout import KeyPath, Layout
from ckptkit.layout.edits import rename, select
from ckptkit.names.wrappers import unwrapped, without_ddp

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module")
_TRAINING_STATE = ("optim", "chained_", "lr_scheduler", "scheduler", "dataloader", "rng", "scaler", "train_state")
OF_ONE = "/shard_"  # what follows tells the objects apart that each layer and rank has under one name


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Entries that are not the model's: those under `name`, how many, and their bytes."""

    name: str
    entries: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Weights:
    """The model's tensors under their own names; each `came_from` a name of the checkpoint, of which all is `whole`."""

    layout: Layout
    wrapper: str
    came_from: dict[str, str]
    left_out: tuple[LeftOut, ...]
    whole: Layout


def find_weights(layout: Layout) -> Weights:
    """Take the model's tensors out of a checkpoint of whatever nesting. Raises `Mismatch` if there are none."""
    prefix = find_model_key(layout)
    training = training_state(layout, prefix)
    below = {name: key[len(prefix) :] for name, key in keys_below(layout, prefix)}
    names = {name: unwrapped(".".join(map(str, key))) for name, key in below.items() if key[0] not in training}
    names = without_ddp(names)
    weights = rename(select(layout, names.__contains__), names.__getitem__)
    left_out = summarise(layout, prefix, [name for name in (*layout.tensors, *layout.blobs) if name not in names])
    return Weights(weights, ".".join(map(str, prefix)), {new: old for old, new in names.items()}, left_out, layout)


def has_weights(layout: Layout) -> bool:
    """Return whether there is anything but a training's state: an optimizer may have a directory to itself."""
    training = training_state(layout, ())
    return any(layout.key(name)[0] not in training for name in layout.tensors)


def find_model_key(layout: Layout) -> KeyPath:
    """Return the key path under which the model lies: through `state`, `app`, `model`, to where tensors have names."""
    prefix: KeyPath = ()
    while True:
        training = training_state(layout, prefix)
        below = [key[len(prefix) :] for _, key in keys_below(layout, prefix) if key[len(prefix)] not in training]
        branches = Counter(key[0] for key in below if len(key) > 1)
        known = next((name for name in _MODEL_KEYS if name in branches), None)
        if known is not None:
            prefix = (*prefix, known)
        elif len(branches) < len({key[0] for key in below}):
            return prefix
        elif len(branches) == 1:
            prefix = (*prefix, *branches)
        else:
            raise no_model(layout, branches)


def keys_below(layout: Layout, prefix: KeyPath) -> Iterator[tuple[str, KeyPath]]:
    """Name and key path of every tensor under `prefix`."""
    for name in layout.tensors:
        key = layout.key(name)
        if key[: len(prefix)] == prefix and len(key) > len(prefix):
            yield name, key


def names_of_training(layout: Layout) -> set[str]:
    """Return the tensors that belong to a training's state, at any depth, as `training_state` knows it at one."""
    keys = {name: layout.key(name) for name in layout.names}
    optimizers = {
        key[:at] for key in keys.values() for at, step in enumerate(key) if at and str(step).startswith("param_groups")
    }
    return {
        name
        for name in layout.tensors
        if any(
            key_path in optimizers or str(key_path[-1]).startswith(_TRAINING_STATE)
            for key_path in accumulate((step,) for step in keys[name][:-1])
        )
        or is_in_flat_optimizer(layout, name)
    }


def is_in_flat_optimizer(layout: Layout, name: str) -> bool:
    """Return whether a name without a key path begins as an optimizer's do."""
    return not layout.keys and name.startswith(("optim.", "optimizer."))


def training_state(layout: Layout, prefix: KeyPath) -> set[str | int]:
    """Return the steps below `prefix` that lead to a training's state, by name or because `param_groups` follow."""
    found: set[str | int] = set()
    at = len(prefix)
    for name in (*layout.tensors, *layout.blobs):
        key = layout.key(name)
        if key[:at] != prefix or len(key) <= at:
            continue
        leads_on = len(key) > at + 1
        is_named = leads_on and str(key[at]).startswith(_TRAINING_STATE)
        has_groups = leads_on and str(key[at + 1]).startswith("param_groups")
        if is_in_flat_optimizer(layout, name) or is_named or has_groups:
            found.add(key[at])
    return found


def no_model(layout: Layout, branches: Iterable[str | int]) -> Mismatch | SeveralModels:
    """Return the error for a checkpoint in which the model cannot be found."""
    candidates = sorted(map(str, branches))
    if candidates:
        message = f"which of these is the model: {', '.join(candidates)}?"
        globs = [f"{escape(candidate)}.*" for candidate in candidates]
        return SeveralModels(message, path=layout.root, hint=f"choose with --include {quote(globs[0])}", globs=globs)
    tops = Counter(str(layout.key(name)[0]) for name in (*layout.tensors, *layout.blobs))
    held = ", ".join(f"{count} under `{name}`" for name, count in tops.most_common(4)) or "no tensors"
    return Mismatch(
        f"no model weights here, only {held}", path=layout.root, hint="is the model in a directory beside it?"
    )


def summarise(layout: Layout, prefix: KeyPath, names: Iterable[str]) -> tuple[LeftOut, ...]:
    """Count entries by where their key path leaves that of the model; objects of layers and ranks by what they are."""
    entries: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for name in names:
        key = layout.key(name)
        shared = next(
            (i for i, (a, b) in enumerate(zip(key, prefix, strict=False)) if a != b), min(len(key), len(prefix))
        )
        group = ".".join(map(str, key[: shared + 1])).partition(OF_ONE)[0]
        entries[group] += 1
        nbytes[group] += layout.tensors[name].spec.nbytes if name in layout.tensors else layout.blobs[name].length
    return tuple(LeftOut(group, count, nbytes[group]) for group, count in entries.items())
