"""Find the model's entries in a training checkpoint, and what the model calls them. By names only.

The names that a checkpoint was flattened to (`model.model.norm.weight`) do not tell where a wrapper ends and the
model's own names begin; the recorded key paths do: `("model", "model.norm.weight")`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import escape
from itertools import accumulate
from shlex import quote

from ckptkit.errors import Corrupt, Mismatch, SeveralModels
from ckptkit.layout import OWN, KeyPath, Layout
from ckptkit.layout.edits import rename, select
from ckptkit.layout.wrappers import find_average, unwrapped, without_ddp
from ckptkit.words import count

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module")
_FLAX = "params"  # flax's collection of a model's parameters, beside which a TrainState has a step
_MAXTEXT = frozenset({"decoder", "token_embedder"})  # the modules of a MaxText model, whose names are nested keys
_FLAX_OPTIMIZER, _FLAX_STEP = "opt_state", "step"  # what a TrainState has beside them
_TRAINING_STATE = (
    "optim",
    _FLAX_OPTIMIZER,
    "chained_",
    "lr_scheduler",
    "scheduler",
    "dataloader",
    "rng",
    "scaler",
    "train_state",
    OWN,
)
_GENERATOR = re.compile(r"(^|_)rng(_|s?$)|random_state")
JOINED = " + "  # between the names of entries that one tensor came from
OF_ONE = "/shard_"  # what follows tells the objects apart that each layer and rank has under one name

# Why an entry of a checkpoint is not among the model's tensors. Nobody asked to leave out what is UNKNOWN.
TRAINING = "state of the training"
AVERAGE = "counter of the average"
VALUE = "not a tensor"
UNKNOWN = "unknown: perhaps another model"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Entries that are not written: those under `name`, how many, their bytes, and why."""

    name: str
    entries: int
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Weights:
    """The model's tensors under their own names; each `came_from` a name of the checkpoint, of which all is `whole`.

    They lie under the key path `prefix`. `left_out` is why each other entry of the checkpoint is not among them.
    """

    layout: Layout
    prefix: KeyPath
    came_from: dict[str, str]
    left_out: Mapping[str, str]
    whole: Layout

    @property
    def wrapper(self) -> str:
        """Return the keys that the model is under, joined by dots."""
        return ".".join(map(str, self.prefix))

    def origins_of(self, names: Iterable[str]) -> frozenset[str]:
        """Return the entries of the checkpoint that tensors of these names are made of."""
        olds = (self.came_from[name] for name in names if name in self.came_from)
        return frozenset(old for joined in olds for old in joined.split(JOINED))

    def summarize(self) -> tuple[LeftOut, ...]:
        """Count what was left out, by where it lies and why."""
        return summarize(self.whole, self.prefix, self.left_out, self.came_from.values())


def find_weights(layout: Layout) -> Weights:
    """Take the model's tensors out of a checkpoint of whatever nesting. Raises `Mismatch` if there are none."""
    prefix = find_model_key(layout)
    training = training_state(layout, prefix)
    check_ranks_agree(layout, prefix, training)
    below = {name: key[len(prefix) :] for name, key in keys_below(layout, prefix)}
    names = {name: unwrapped(".".join(map(str, key))) for name, key in below.items() if key[0] not in training}
    averaged = averaged_names(layout, prefix, names)
    counters, names = names.keys() - averaged.keys(), without_ddp(averaged)
    weights = rename(select(layout, names.__contains__), names.__getitem__)
    left_out = reasons_for(layout, prefix, [name for name in layout.names if name not in names])
    left_out |= dict.fromkeys(sorted(counters), AVERAGE)
    return Weights(weights, prefix, {new: old for old, new in names.items()}, left_out, layout)


def averaged_names(layout: Layout, prefix: KeyPath, names: Mapping[str, str]) -> dict[str, str]:
    """Return the names in the model of an average by entry, without the prefix and the counters of the average.

    Names that are those of a plain model stay. Raises `SeveralModels` for an average beside the model that it is of.
    """
    average = find_average(names.values())
    if average is None:
        return dict(names)
    models = {entry: name for entry, name in names.items() if name not in average.counters}
    if not all(name.startswith(average.text) for name in models.values()):
        above = "".join(f"{escape(str(step))}." for step in prefix)
        globs = [f"{above}{text}*" for text in (average.text, average.online) if text]
        message = f"the average (`{average.text}`) and its model (`{average.online}`) are both in this checkpoint"
        raise SeveralModels(message, path=layout.path, hint=f"choose with --include {quote(globs[0])}", globs=globs)
    return {entry: name.removeprefix(average.text) for entry, name in models.items()}


def reasons_for(layout: Layout, prefix: KeyPath, names: Iterable[str]) -> dict[str, str]:
    """Return why entries are not among the tensors of the model under `prefix`."""
    training = [training_state(layout, prefix[:depth]) for depth in range(len(prefix) + 1)]

    def reason(name: str) -> str:
        key = layout.key(name)
        if key[0] == OWN and name in layout.tensors:  # a rank's own: a state of the training, or anything else
            is_state = any(str(step).startswith(_TRAINING_STATE) for step in key[2:3]) or is_generator(key)
            return TRAINING if is_state else UNKNOWN
        depth = depth_shared(key, prefix)
        if depth < len(key) and (key[depth] in training[depth] or is_generator(key)):
            return TRAINING
        return VALUE if name in layout.blobs else UNKNOWN

    return {name: reason(name) for name in names}


def is_generator(key: KeyPath) -> bool:
    """Return whether a step of a key path says that a state of a random generator lies there."""
    return any(_GENERATOR.search(step) for step in key if isinstance(step, str))


def depth_shared(key: KeyPath, prefix: KeyPath) -> int:
    """Return how many first steps two key paths have in common."""
    pairs = enumerate(zip(key, prefix, strict=False))
    return next((depth for depth, (a, b) in pairs if a != b), min(len(key), len(prefix)))


def check_ranks_agree(layout: Layout, prefix: KeyPath, training: Collection[str | int]) -> None:
    """Raise `Corrupt` if a tensor of the model is there once for each rank, as ranks saved different values."""
    for name, key in keys_below(layout, (OWN,)):
        own, below = key[2:], key[2 + len(prefix) :]
        is_of_model = own[: len(prefix)] == prefix and below and below[0] not in training
        if is_of_model and (prefix or layout.tensors[name].spec.dtype.kind == "float"):
            if (tensor := ".".join(map(str, own))) in layout.tensors:
                continue
            path = layout.root / layout.tensors[name].chunks[0].path
            hint = "move the `__N.metadata` of the other ranks away to keep the values of one rank"
            raise Corrupt("the ranks saved different values", path=path, tensor=tensor, hint=hint)


def has_weights(layout: Layout) -> bool:
    """Return whether there is anything but a training's state: an optimizer may have a directory to itself."""
    training = training_state(layout, ())
    return any(layout.key(name)[0] not in training for name in layout.tensors)


def may_have_weights(layout: Layout) -> bool:
    """Return whether any tensor may be a model's: one with axes that is no state of a training or of a generator."""
    training = training_state(layout, ())
    keys = (layout.key(name) for name, tensor in layout.tensors.items() if tensor.spec.shape)
    return any(key[0] not in training and not is_generator(key) for key in keys)


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
        elif branches.keys() == {_FLAX}:
            prefix = (*prefix, _FLAX)
        elif branches.keys() >= _MAXTEXT or len(branches) < len({key[0] for key in below}):
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
    return found | {_FLAX_STEP} if _FLAX_OPTIMIZER in found else found


def no_model(layout: Layout, branches: Iterable[str | int]) -> Mismatch | SeveralModels:
    """Return the error for a checkpoint in which the model cannot be found."""
    candidates = sorted(map(str, branches))
    if candidates:
        message = f"several entries could be the model: {', '.join(candidates)}"
        globs = [f"{escape(candidate)}.*" for candidate in candidates]
        return SeveralModels(message, path=layout.path, hint=f"choose with --include {quote(globs[0])}", globs=globs)
    tops = Counter(str(layout.key(name)[0]) for name in (*layout.tensors, *layout.blobs))
    held = ", ".join(f"{count(n, 'entry')} under `{name}`" for name, n in tops.most_common(4)) or "no tensors"
    return Mismatch(
        f"expected model weights, found only {held}",
        path=layout.path,
        hint="look for the model in a directory beside it",
    )


def summarize(
    layout: Layout, prefix: KeyPath, left_out: Mapping[str, str], written: Iterable[str]
) -> tuple[LeftOut, ...]:
    """Count entries by why they are left out and where they lie; objects of layers as one.

    That is where their key path leaves `prefix`, or where the last name in it differs from all that are `written`.
    """
    taken = {head for name in written for head in heads_of(name)} if left_out else frozenset()
    entries: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for name, why in left_out.items():
        key = layout.key(name)
        way = key[: depth_shared(key, prefix) + 1]
        group = ".".join(map(str, way))
        if way == key:
            group = next((head for head in heads_of(group) if head not in taken), group)
        group = group.partition(OF_ONE)[0]
        entries[group, why] += 1
        nbytes[group, why] += layout.tensors[name].spec.nbytes if name in layout.tensors else layout.blobs[name].length
    return tuple(LeftOut(group, count, nbytes[group, why], why) for (group, why), count in entries.items())


def heads_of(name: str) -> Iterator[str]:
    """Yield the parts of a dotted name before each of its dots, the shortest first."""
    dots = (match.start() for match in re.finditer(r"\.", name))
    return (name[:dot] for dot in dots)
