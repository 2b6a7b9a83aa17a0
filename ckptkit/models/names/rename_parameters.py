"""Rename a model's parameters wherever they occur in a training checkpoint.

A parameter's name is the last element of its key path. In optimizer state the name is the element after `state`, or the
last element if the entry's name (such as `exp_avg`) comes first. An optimizer may also use parameter indices instead of
names. The state of a parameter may be a list or dict of tensors (`GG.0` in SOAP). In optimizers that torch has
flattened, one element contains both names: `state.<name>.exp_avg`. The parameter groups list the names too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import NamedTuple

from ckptkit.formats.archives.non_tensor_entries import load_value, with_new_value
from ckptkit.layout import Blob, KeyPath, Layout, edits
from ckptkit.layout.wrappers import PARAM_NAMES, parameter_name_in_model

NewName = Callable[[str], str]
FLATTENED = ("state.", "param_groups.")
GROUP_MAP = "param_to_group_meta"  # values of the parameter groups by parameter, instead of a list of groups
BY_PARAMETER = ("state", GROUP_MAP)
# Sources: torch/optim, facebookresearch/schedule_free, NVIDIA/apex, NVIDIA/TransformerEngine and bitsandbytes/optim.
# `master_param` and `fp32_param` are fp32 master weights.
ELEMENTWISE = frozenset(  # states that have one element for each element of their parameter
    [
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "exp_avg_slow", "exp_avg_diff", "exp_avg_res"),
        *("momentum_buffer", "momentum", "square_avg", "acc_delta", "grad_avg", "sum", "ax", "z", "prev", "step_size"),
        "variance",
        *("master_param", "fp32_param", "prev_grad", "previous_grad", "neg_pre_grad", "state1", "state2"),
    ]
)
# some optimizers have one for each row or slice
SECOND_MOMENTS = frozenset(["exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"])
# of optax, google-deepmind/optax/_src and contrib: fields of its states that have the tree of the parameters
OPTAX = frozenset(
    [
        *("mu", "nu", "nu_max", "trace", "v", "v_row", "v_col", "m", "m1", "m2", "sum_of_squares", "acc_grads"),
        *("hessian", "exp_inf", "delta", "grad_sum", "prev_grad", "g_before", "e_g", "e_x"),
    ]
)


class EntryPlace(NamedTuple):
    """The key path of one kind of entry, such as `exp_avg`, in three parts.

    `text` is the element with the parameter's name, which replaces `{}`; `before` and `after` are the other elements.
    """

    before: KeyPath
    text: str = "{}"
    after: KeyPath = ()

    def key_of_parameter(self, name: str) -> KeyPath:
        return (*self.before, self.text.format(name), *self.after)


def find_entry_place(key: KeyPath, own: Container[str] = ()) -> tuple[EntryPlace, str] | None:
    """Return the kind of an optimizer's entry and the parameter that it belongs to; None for any other entry.

    `own` are the names of the model's parameters. They are needed to find the parameter if its state is nested deeper.
    The returned parameter is a number if the optimizer uses parameter indices.
    """
    last = key[-1]
    if isinstance(last, str) and last.startswith(FLATTENED):
        kind, parameter, what = split_flattened_key(last, own)
        return EntryPlace(key[:-1], f"{kind}.{{}}.{what}"), parameter
    at = find_state_index(key, own)
    if at is None:
        return None
    if is_own_parameter(last, own):  # the key path ends with the parameter: the entry's name is in front
        return EntryPlace(key[:-1]), str(last)
    return EntryPlace(key[: at + 1], after=key[at + 2 :]), str(key[at + 1])


def find_state_index(key: KeyPath, own: Container[str]) -> int | None:
    """Return the index of the step `state` (or `GROUP_MAP`) in the key path of an optimizer's state; else None."""
    if len(key) > 2 and key[-3] in BY_PARAMETER:
        return len(key) - 3
    deeper = range(len(key) - 4, -1, -1)
    return next(
        (index for index in deeper if key[index] in BY_PARAMETER and is_own_parameter(key[index + 1], own)), None
    )


def is_own_parameter(component: object, own: Container[str]) -> bool:
    return isinstance(component, str) and parameter_name_in_model(component, own) in own


def split_flattened_key(component: str, own: Container[str] = ()) -> tuple[str, str, str]:
    """Split a step that torch has flattened into `state` or `param_groups`, the parameter, and the entry.

    The `own` names of the model decide where the parameter's name ends, if its state is nested.
    """
    kind, _, rest = component.partition(".")
    dots = [at for at, letter in enumerate(rest) if letter == "."]
    at = next((at for at in reversed(dots) if is_own_parameter(rest[:at], own)), dots[-1] if dots else 0)
    return kind, rest[:at], rest[at + 1 :]


def rename_parameters(layout: Layout, weights: frozenset[str], new_name: NewName) -> tuple[Layout, dict[str, str]]:
    """Return the checkpoint with its parameters renamed, and the new name of each changed entry by its old name.

    `weights` are the entries of the model. The optimizer of another model does not change.
    """
    own = {str(layout.key(name)[-1]) for name in weights}
    others = optimizer_entries_of_other_models(layout, weights)
    keys = {name: layout.key(name) for name in layout.names}
    keys |= {
        name: rename_in_key_path(key, new_name, name in weights, own)
        for name, key in keys.items()
        if name not in others
    }
    changed = {name: new for name, key in keys.items() if (new := ".".join(map(str, key))) != name}
    renamed = rename_in_group_lists(layout, new_name, own, others)
    if not changed and renamed is layout:
        return layout, {}
    return edits.with_new_key_paths(renamed, keys), changed


def optimizer_entries_of_other_models(layout: Layout, weights: Iterable[str]) -> set[str]:
    """Return the entries of optimizers (with names) whose parameters belong to another model than `weights`."""
    entries: dict[KeyPath, set[str]] = {}
    trained: dict[KeyPath, set[str]] = {}
    beside: dict[KeyPath, set[str]] = {}
    own = {name: str(layout.key(name)[-1]) for name in weights}
    own_names = set(own.values())
    for name in layout.names if own else ():
        key = layout.key(name)
        inner_path = key_within_optimizer(key, own_names)
        if inner_path is None:
            if name not in own and name in layout.tensors:
                beside.setdefault(key[:-1], set()).add(str(key[-1]))
            continue
        above = key[:-1] if str(key[-1]).startswith(FLATTENED) else key[: -len(inner_path)]
        entries.setdefault(above, set()).add(name)
        if inner_path[0] == "state":
            trained.setdefault(above, set()).add(str(inner_path[1]))
    others = [
        above
        for above, names in trained.items()
        if not {parameter_name_in_model(name, own_names) for name in names} <= own_names
        and any(names <= model for model in beside.values())
    ]
    return {name for above in others for name in entries[above]}


def rename_in_group_lists(
    layout: Layout, new_name: NewName, own: Container[str] = (), others: Container[str] = ()
) -> Layout:
    """Return the checkpoint with other names in the lists of its optimizers; the same layout if nothing changes.

    A recorded name may have a wrapper's prefix that the model's `own` names do not have; the prefix is removed. Entries
    in `others` do not change.
    """

    def from_recorded(name: str) -> str:
        known = parameter_name_in_model(name, own)
        new = new_name(known)
        return new if known in own and new != known else new_name(name)

    blobs: dict[str, Blob] = {}
    for name, blob in layout.blobs.items():
        key = layout.key(name)
        if name in others or not (is_list_of_parameters(key) or is_list_of_names(key)):
            continue
        rename = from_recorded if is_list_of_names(key) else new_name
        value = load_value(layout.root, blob)
        if isinstance(value, list) and all(isinstance(one, str) for one in value):  # not a list of indices
            names = [rename(one) for one in value]
            if names != value:
                blobs[name] = with_new_value(blob, names)
    return replace(layout, blobs={**layout.blobs, **blobs}) if blobs else layout


def renamable_parameters_in(layout: Layout, weights: Iterable[str]) -> set[str]:
    """Return the names that `rename_parameters` replaces: those of `weights`, and those in optimizers."""
    weights = set(weights)
    others = optimizer_entries_of_other_models(layout, weights)
    own = {str(layout.key(name)[-1]) for name in weights}
    ways = (key_within_optimizer(layout.key(name), own) for name in layout.names if name not in others)
    return {name for name in (*own, *(way[1] for way in ways if way)) if isinstance(name, str)}


def rename_in_key_path(key: KeyPath, new_name: NewName, is_weight: bool, own: Container[str] = ()) -> KeyPath:
    """Return a key path with the parameter's name replaced. `own` are the names of all parameters."""
    if is_weight:
        return (*key[:-1], new_name(key[-1])) if isinstance(key[-1], str) else key
    entry = find_entry_place(key, own)
    if entry is None or entry[1].isdecimal():
        return key
    place, parameter = entry
    return place.key_of_parameter(new_name(parameter))


def key_within_optimizer(key: KeyPath, own: Container[str] = ()) -> KeyPath | None:
    """Return the key path of an entry inside its optimizer's state dict; None if it belongs to no optimizer.

    In groups that torch has flattened, the second step is the name of each parameter instead of the group's index. For
    `own` see `find_entry_place`.
    """
    last = key[-1]
    if isinstance(last, str) and last.startswith(FLATTENED):
        return split_flattened_key(last, own)
    if len(key) > 2 and key[-3] == "param_groups":
        return key[-3:]
    at = find_state_index(key, own)
    return None if at is None else key[at:]


def is_list_of_parameters(key: KeyPath) -> bool:
    return len(key) > 2 and key[-3] == "param_groups" and key[-1] == "params"


def is_list_of_names(key: KeyPath) -> bool:
    """Return whether a key path leads to the names that torch records in a group, flattened or not."""
    way = key_within_optimizer(key)
    return way is not None and way[0] == "param_groups" and way[2] == PARAM_NAMES
