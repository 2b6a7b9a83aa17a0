"""Find the model's entries in a training checkpoint, and the model's own names for them.

Flattened names (`model.model.norm.weight`) do not show where a wrapper ends and the model's own names begin; recorded
key paths do: `("model", "model.norm.weight")`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from itertools import accumulate
from shlex import quote

from ckptkit.errors import CkptError, Corrupt, Mismatch, SeveralModels, Unsupported
from ckptkit.formats.archives.non_tensor_entries import has_weights_inside
from ckptkit.layout import OWN, KeyPath, Layout
from ckptkit.layout.edits import select_and_rename_tensors
from ckptkit.layout.wrappers import find_average_kind, without_common_ddp_prefix, without_prefixes_except_ddp
from ckptkit.models.names.copies import find_copies_in
from ckptkit.words import count

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module")
_FLAX = "params"  # flax's collection of model parameters
_MAXTEXT = frozenset({"decoder", "token_embedder"})  # modules of a MaxText model, whose names are nested keys
_FLAX_OPTIMIZER, _FLAX_STEP = "opt_state", "step"  # other entries of flax's TrainState
_TRAINING_STATE = (
    *("optim", _FLAX_OPTIMIZER, "chained_", "lr_scheduler", "scheduler", "dataloader", "rng", "scaler", "train_state"),
    OWN,
)
_GENERATOR = re.compile(r"(^|_)rng(_|s?$)|random_state")
JOINED = " + "  # separator between source names of one tensor
_EXTRA_STATE = "_extra_state"  # of a module: torch's `get_extra_state`, such as the scales of TransformerEngine
OF_ONE = "/shard_"  # the suffix after it distinguishes objects of layers and ranks with one name

# Reasons why an entry does not belong to the model. No option asks to leave out entries that are NOT_ASKED.
TRAINING = "training state"
AVERAGE = "counter of the average"
VALUE = "non-tensor"
UNKNOWN = "unknown: perhaps another model"
COPY = "a copy of the model's weights, such as an average"
INSIDE = "tensors in a non-tensor entry: perhaps another model"
NOT_ASKED = (UNKNOWN, COPY, INSIDE)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Entries that are not written: their common `name`, their number, their bytes, and why."""

    name: str
    entries: int
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Weights:
    """The model's tensors under their own names.

    `came_from` are their names in the checkpoint, `whole` its full layout. The model is under the key path `prefix`.
    `left_out` gives the reason for each other entry of the checkpoint.
    """

    layout: Layout
    prefix: KeyPath
    came_from: dict[str, str]
    left_out: Mapping[str, str]
    whole: Layout

    @property
    def dotted_prefix(self) -> str:
        """Return the keys above the model, joined by dots."""
        return ".".join(map(str, self.prefix))

    def origins_of(self, names: Iterable[str]) -> frozenset[str]:
        """Return the entries of the checkpoint that these tensors are made from."""
        olds = (self.came_from[name] for name in names if name in self.came_from)
        return frozenset(old for joined in olds for old in joined.split(JOINED))

    def origins_by_name(self, names: Iterable[str]) -> dict[str, frozenset[str]]:
        """Return, for each of these tensors, the entries of the checkpoint that it is made from."""
        return {name: self.origins_of([name]) for name in names}

    def summarize_left_out(self) -> tuple[LeftOut, ...]:
        """Count the entries that were left out, by location and reason."""
        return count_left_out_by_location(self.whole, self.prefix, self.left_out, self.came_from.values())


def find_weights(layout: Layout) -> Weights:
    """Return the model's tensors in a checkpoint with any nesting. Raises `Mismatch` if there are none."""
    prefix, training_at = find_model_and_training_keys(layout)
    training = training_at[-1]
    if OWN in training_at[0]:
        require_same_values_across_ranks(layout, prefix, training)
    below = {name: key[len(prefix) :] for name, key in keys_below(layout, prefix)}
    names = {
        name: without_prefixes_except_ddp(".".join(map(str, key)))
        for name, key in below.items()
        if key[0] not in training
    }
    averaged = names_without_average_prefix(layout, prefix, names)
    counters, names = names.keys() - averaged.keys(), without_common_ddp_prefix(averaged)
    weights = select_and_rename_tensors(layout, names)
    others = [name for name in layout.names if name not in names]
    left_out = reasons_not_in_model(layout, prefix, training_at, others)
    left_out |= dict.fromkeys(sorted(counters), AVERAGE)
    of_training = [name for name, why in left_out.items() if why == TRAINING]
    if of_training:
        left_out |= dict.fromkeys(find_copies_in(layout, of_training, weights.shapes), COPY)
    return Weights(weights, prefix, {new: old for old, new in names.items()}, left_out, layout)


def find_weights_or_none(layout: Layout) -> Weights | None:
    """Return the model's tensors; None if there are none, or several models."""
    try:
        return find_weights(layout)
    except (Mismatch, Unsupported):
        return None


def names_without_average_prefix(layout: Layout, prefix: KeyPath, names: Mapping[str, str]) -> dict[str, str]:
    """Return the model's names by entry, without the prefix and the counters of a weight average (such as EMA).

    Names of a plain model do not change. Raises `SeveralModels` if both the average and the model are present.
    """
    average = find_average_kind(names.values())
    if average is None:
        return dict(names)
    models = {entry: name for entry, name in names.items() if name not in average.counters}
    if not all(name.startswith(average.text) for name in models.values()):
        above = "".join(f"{escape(str(step))}." for step in prefix)
        globs = [f"{above}{text}*" for text in (average.text, average.online) if text]
        message = f"the average (`{average.text}`) and its model (`{average.online}`) are both in this checkpoint"
        raise SeveralModels(message, path=layout.path, hint=f"choose with --include {quote(globs[0])}", globs=globs)
    return {entry: name.removeprefix(average.text) for entry, name in models.items()}


def reasons_not_in_model(
    layout: Layout, prefix: KeyPath, training_at: Sequence[Container[str | int]], names: Iterable[str]
) -> dict[str, str]:
    """Return why entries do not belong to the model under `prefix`, with the training state's keys at each depth."""

    def reason(name: str) -> str:
        key = layout.key(name)
        if key[0] == OWN and name in layout.tensors:  # per-rank state may contain any tensor
            is_state = any(str(step).startswith(_TRAINING_STATE) for step in key[2:3]) or is_rng_state(key)
            return TRAINING if is_state else UNKNOWN
        depth = shared_depth(key, prefix)
        if depth < len(key) and (key[depth] in training_at[depth] or is_rng_state(key)):
            return TRAINING
        return VALUE if name in layout.blobs else UNKNOWN

    return {name: reason(name) for name in names}


def mark_weights_in_blobs(layout: Layout, reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons why entries are left out, with `INSIDE` for non-tensor entries that contain weights.

    Reads the pickles of these entries, except the many states of modules. An unreadable entry keeps its reason.
    """
    found = dict(reasons)
    for name, why in reasons.items():
        if why == VALUE and name in layout.blobs and _EXTRA_STATE not in name:
            with suppress(CkptError):
                found[name] = INSIDE if has_weights_inside(layout.root, layout.blobs[name]) else VALUE
    return found


def find_weights_beside_state(layout: Layout) -> list[str]:
    """Return the entries with weights, at least a matrix of floats, that no key calls training state."""
    reasons = reasons_not_in_model(layout, (), [training_state_keys(layout, ())], layout.names)
    matrices = {name for name, spec in layout.specs.items() if spec.dtype.kind == "float" and len(spec.shape) > 1}
    weights = {UNKNOWN: matrices, INSIDE: layout.blobs}
    return [name for name, why in mark_weights_in_blobs(layout, reasons).items() if name in weights.get(why, ())]


def is_rng_state(key: KeyPath) -> bool:
    return any(_GENERATOR.search(step) for step in key if isinstance(step, str))


def shared_depth(key: KeyPath, prefix: KeyPath) -> int:
    """Return the number of leading steps that two key paths share."""
    pairs = enumerate(zip(key, prefix, strict=False))
    return next((depth for depth, (a, b) in pairs if a != b), min(len(key), len(prefix)))


def require_same_values_across_ranks(layout: Layout, prefix: KeyPath, training: Collection[str | int]) -> None:
    """Raise `Corrupt` if ranks saved different values of a tensor of the model."""
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
    """Return whether there are tensors besides training state. Some trainers save an optimizer alone."""
    training = training_state_keys(layout, ())
    return any(layout.key(name)[0] not in training for name in layout.tensors)


def may_have_weights(layout: Layout) -> bool:
    """Return whether any tensor may belong to a model: it has axes and is no training or generator state."""
    training = training_state_keys(layout, ())
    keys = (layout.key(name) for name, tensor in layout.tensors.items() if tensor.spec.shape)
    return any(key[0] not in training and not is_rng_state(key) for key in keys)


def find_model_key(layout: Layout) -> KeyPath:
    """Return the key path of the model: descends through `state`, `app`, `model` to the level of parameter names."""
    return find_model_and_training_keys(layout)[0]


def find_model_and_training_keys(layout: Layout) -> tuple[KeyPath, list[set[str | int]]]:
    """Return the key path of the model and, for each depth of that path, the keys that lead to training state."""
    prefix: KeyPath = ()
    training_at: list[set[str | int]] = []
    while True:
        training_at.append(training_state_keys(layout, prefix))
        below = [key[len(prefix) :] for _, key in keys_below(layout, prefix) if key[len(prefix)] not in training_at[-1]]
        branches = Counter(key[0] for key in below if len(key) > 1)
        known = next((name for name in _MODEL_KEYS if name in branches), None)
        if known is not None:  # a conventional key such as `model`, even beside other branches
            prefix = (*prefix, known)
        elif branches.keys() == {_FLAX}:
            prefix = (*prefix, _FLAX)
        elif branches.keys() >= _MAXTEXT or len(branches) < len({key[0] for key in below}):
            return prefix, training_at  # some tensors are directly here, so this is the level of parameter names
        elif len(branches) == 1:
            prefix = (*prefix, *branches)
        else:
            raise no_model_error(layout, branches)


def keys_below(layout: Layout, prefix: KeyPath) -> Iterator[tuple[str, KeyPath]]:
    """Yield name and key path of every tensor under `prefix`."""
    for name in layout.tensors:
        key = layout.key(name)
        if len(key) > len(prefix) and key[: len(prefix)] == prefix:
            yield name, key


def training_state_names(layout: Layout) -> set[str]:
    """Return the tensors that belong to training state, at any depth."""
    keys = {name: layout.key(name) for name in layout.names}
    dicts = {key[:-1]: set(accumulate((step,) for step in key[:-1])) for key in keys.values()}  # each with those above
    above = set().union(*dicts.values())
    optimizers = {key[:-1] for key in (*above, *keys.values()) if str(key[-1]).startswith("param_groups")}
    training = {key for key in above if key in optimizers or str(key[-1]).startswith(_TRAINING_STATE)}
    of_training = {key for key, of in dicts.items() if of & training}
    return {name for name in layout.tensors if keys[name][:-1] in of_training or is_in_flat_optimizer(layout, name)}


def is_in_flat_optimizer(layout: Layout, name: str) -> bool:
    """Return whether a name without a recorded key path starts like an optimizer's."""
    return not layout.keys and name.startswith(("optim.", "optimizer."))


def training_state_keys(layout: Layout, prefix: KeyPath) -> set[str | int]:
    """Return the steps below `prefix` that lead to training state: by their name, or because `param_groups` follow."""
    depth = len(prefix)
    keys = [key for key in map(layout.key, layout.names) if len(key) > depth + 1 and key[:depth] == prefix]
    steps = {step for step in {key[depth] for key in keys} if str(step).startswith(_TRAINING_STATE)}
    steps |= {key[depth] for key in keys if str(key[depth + 1]).startswith("param_groups")}
    steps |= {name for name in layout.names if not depth and is_in_flat_optimizer(layout, name)}
    return steps | {_FLAX_STEP} if _FLAX_OPTIMIZER in steps else steps


def no_model_error(layout: Layout, branches: Iterable[str | int]) -> Mismatch | SeveralModels:
    """Return the error for a checkpoint in which no model can be found."""
    candidates = sorted(map(str, branches))
    if candidates:
        message = f"several entries could be the model: {', '.join(candidates)}"
        globs = [f"{escape(candidate)}.*" for candidate in candidates]
        return SeveralModels(message, path=layout.path, hint=f"choose with --include {quote(globs[0])}", globs=globs)
    tops = Counter(str(layout.key(name)[0]) for name in (*layout.tensors, *layout.blobs))
    contents = ", ".join(f"{count(n, 'entry')} under `{name}`" for name, n in tops.most_common(4))
    message = f"expected model weights, found {f'only {contents}' if contents else 'no tensors'}"
    return Mismatch(message, path=layout.path, hint="look for the model in a directory beside it")


def count_left_out_by_location(
    layout: Layout, prefix: KeyPath, left_out: Mapping[str, str], written: Iterable[str]
) -> tuple[LeftOut, ...]:
    """Count entries that are left out, by reason and location; the entries of all layers count as one location.

    The location is the step where a key path leaves `prefix`, or where the last name differs from all `written` names.
    """
    used_heads = {head for name in written for head in dotted_prefixes(name)} if left_out else frozenset()
    entries: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for name, why in left_out.items():
        key = layout.key(name)
        shared = key[: shared_depth(key, prefix) + 1]
        group = ".".join(map(str, shared))
        if shared == key:
            group = next((head for head in dotted_prefixes(group) if head not in used_heads), group)
        group = group.partition(OF_ONE)[0]
        entries[group, why] += 1
        nbytes[group, why] += layout.tensors[name].spec.nbytes if name in layout.tensors else layout.blobs[name].length
    return tuple(LeftOut(group, count, nbytes[group, why], why) for (group, why), count in entries.items())


def dotted_prefixes(name: str) -> Iterator[str]:
    """Yield each prefix of a dotted name that ends before a dot, the shortest first."""
    dots = (match.start() for match in re.finditer(r"\.", name))
    return (name[:dot] for dot in dots)
