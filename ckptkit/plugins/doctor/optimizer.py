"""Find training state that a loader lacks or cannot use: optimizer state, parameter groups, state of other ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ckptkit.checkpoints.optimizers.keys import IDS, NAMES, Optimizer, find_optimizers
from ckptkit.checkpoints.optimizers.missing_states import States, find_optimizer_states, states_of_flattened_optimizers
from ckptkit.errors import Corrupt
from ckptkit.io.file import names_in
from ckptkit.layout import KeyPath, Layout
from ckptkit.models.names.rename_parameters import GROUP_MAP
from ckptkit.plugins.doctor.finding import Finding, reshard_fix, rewrite_fix, world_size_fix
from ckptkit.plugins.doctor.load_target import LoadTarget
from ckptkit.trainers import find_owner_rank_of_file, find_owner_rank_of_key, is_optional_state
from ckptkit.words import count

_STATE = "state"
_NORMALIZATIONS = (  # (pattern, replacement): removes the suffixes of split parameters and the differences of versions
    (r"((?:weight|bias)\d*)_[wv]$", r"\1"),
    (r"((?:in_proj|conv1d)\.(?:weight|bias))\.(?:query|key|value|z|beta|alpha)$", r"\1"),
    (r"self_attention\.linear_qkv_down_proj\.layer_norm_(weight|bias)$", r"input_layernorm.\1"),
    (r"linear_(?:q|kv)_down_proj\.", "linear_qkv_down_proj."),
    (r"\bmtp_model_layer\.", "transformer_layer."),
)
_MISNAMED = ("prefixed_state", "prefixed_weight", "unknown_parameter")


def find_missing_states_if_sharded(target: LoadTarget) -> Iterator[Finding]:
    """Yield the parameters without a state in a sharded checkpoint, whose loader asks for the state of every parameter.

    For a file of torch.save, `doctor` adds a note instead: only some loaders ask for every state.
    """
    if target.checkpoint.model_component.reader.is_sharded and target.adapters_in_model is None:
        yield from list_missing_states(target)


def list_missing_states(target: LoadTarget) -> Iterator[Finding]:
    """Yield the parameters without optimizer state, for any format."""
    is_sharded = target.checkpoint.model_component.reader.is_sharded
    ranks = (target.world_size or target.layout.world_size) if is_sharded else None
    error_text = "`Missing key in checkpoint state_dict`" if is_sharded else "`Missing optimizer state for parameter`"
    for states in states_keyed_by_name(target.layout):
        above = ".".join([*map(str, states.above), _STATE, ""])
        is_unknown = any(one.code in _MISNAMED and f"{one.tensor}".startswith(above) for one in target.inconsistencies)
        if is_unknown or states.ungrouped_parameters:
            continue  # states under unknown names are perhaps of the parameters without a state
        for name in parameters_lacking_state(states):
            message = (
                "the optimizer has no state for this parameter because it never received a gradient; "
                f"unless it is frozen, torch's load fails with {error_text}"
            )
            key = f"{above}{name}"
            fix = (
                reshard_fix(target.checkpoint, ranks, complete_optimizer=True)
                if ranks
                else rewrite_fix(target.checkpoint, complete_optimizer=True)
            )
            yield Finding("optimizer_state", key, message, fix)


def states_keyed_by_name(layout: Layout) -> list[States]:
    """Return the states of the optimizers that identify parameters by name and have valid groups."""
    try:
        states_list = find_optimizer_states(layout)
    except Corrupt:
        states_list = list(states_of_flattened_optimizers(layout))
    return [states for states in states_list if states.optimizer is None or states.optimizer.has_parameter_names]


def parameters_lacking_state(states: States) -> list[str]:
    """Return the listed parameters that have no state; [] if no parameter has one."""
    return states.parameters_without_state if states.of else []


def find_group_differences(target: LoadTarget) -> Iterator[Finding]:
    """Yield the optimizers whose groups differ from the other checkpoint's, or that use indices where it uses names."""
    if target.like is None:
        return
    pairs = zip(readable_optimizers_in(target.layout), readable_optimizers_in(target.like.layout), strict=False)
    for ours, theirs in pairs:
        if ours.has_parameter_names != theirs.has_parameter_names:
            our_keys, their_keys = (NAMES if one.has_parameter_names else IDS for one in (ours, theirs))
            message = f"expected {their_keys} of parameters as in {target.like.path}, found {our_keys}"
            yield Finding(
                "optimizer_keys", ours.name, message, rewrite_fix(target.checkpoint, optimizer_keys=their_keys)
            )
        else:
            yield from find_first_group_difference(ours, theirs, target.like.path)


def find_first_group_difference(ours: Optimizer, theirs: Optimizer, other: Path) -> Iterator[Finding]:
    """Yield the first difference between the parameter groups of two optimizers."""
    our_sizes, their_sizes = ([len(group) for group in one.groups] for one in (ours, theirs))
    if len(our_sizes) != len(their_sizes):
        message = (
            f"expected {count(len(their_sizes), 'parameter group')} as in {other}, found {len(our_sizes)}: "
            "torch fails with `loaded state dict has a different number of parameter groups`"
        )
        yield Finding("groups", ours.name, message)
    elif our_sizes != their_sizes:
        sizes, found = (", ".join(map(str, group_sizes)) for group_sizes in (their_sizes, our_sizes))
        message = (
            f"expected groups of {sizes} parameters as in {other}, found {found}: "
            "torch fails with `loaded state dict contains a parameter group that doesn't match the size`"
        )
        yield Finding("groups", ours.name, message)
    elif ours.has_parameter_names:
        group_there = {name: number for number, group in enumerate(theirs.groups) for name in group}
        for name, one in ((name, number) for number, group in enumerate(ours.groups) for name in group):
            if (two := group_there.get(name, one)) != one:
                message = f"expected the parameter in group {two} as in {other}, found it in group {one}"
                yield Finding("groups", f"{ours.name}.{name}", message)
                return


def readable_optimizers_in(layout: Layout) -> list[Optimizer]:
    """Return the optimizers that have groups; [] if the groups are invalid."""
    try:
        return find_optimizers(layout)
    except Corrupt:
        return []


def find_unlisted_parameters(target: LoadTarget) -> Iterator[Finding]:
    """Yield the parameters that have a state but are not in Megatron-FSDP's map of groups, and the reverse.

    Megatron-FSDP saves the values of parameter groups by parameter, in a map, and looks up every parameter of the job
    in it. Source: `_param2group_meta_to_param_groups` in megatron/core/optimizer/distrib_optimizer.py of core 0.20. The
    map has the module's parameter names. Weights and states have these names too, or are split, or have names that are
    equal in all versions (megatron/core/transformer/fsdp_dtensor_checkpoint.py).
    """
    for above, listed in parameter_names_by_optimizer(target.layout, GROUP_MAP).items():
        known = parameter_names_by_optimizer(target.layout, _STATE).get(above, {})
        for parameter in known.keys() - listed.keys():
            message = (
                f"the optimizer has a state for this parameter, but `{GROUP_MAP}` does not list it: its load fails"
            )
            yield Finding("group_map", ".".join(map(str, (*above, _STATE, known[parameter]))), message)
        for parameter in listed.keys() - known.keys():
            message = f"`{GROUP_MAP}` lists this parameter, but the optimizer has no state for it: its load fails"
            yield Finding("group_map", ".".join(map(str, (*above, GROUP_MAP, listed[parameter]))), message)


def parameter_names_by_optimizer(layout: Layout, key_step: str) -> dict[KeyPath, dict[str, str]]:
    """Return for each optimizer (its key path) the parameters below `key_step`: the checkpoint's name by parameter."""
    by_optimizer: dict[KeyPath, dict[str, str]] = {}
    for name in layout.names:
        match layout.key(name):
            case (*above, here, str(parameter), _) if here == key_step:
                # equal for a parameter in `GROUP_MAP` and for all entries that are saved for it
                normalized = parameter
                for pattern, same in _NORMALIZATIONS:
                    normalized = re.sub(pattern, same, normalized)
                by_optimizer.setdefault(tuple(above), {})[normalized] = parameter
    return by_optimizer


def find_rank_dependent_state(target: LoadTarget) -> Iterator[Finding]:
    """Yield the entries and files that another number of ranks cannot load."""
    wanted = target.world_size
    if wanted is None:
        return
    reader = target.checkpoint.model_component.reader
    ranks = target.layout.world_size or target.checkpoint.world_size
    if ranks is not None and ranks != wanted and reader.is_bound_to_world_size(target.checkpoint.model_component.path):
        message = f"the library that saved it loads it only with {count(ranks, 'rank')}, not with {wanted}"
        yield Finding("world_size", None, message, world_size_fix(target.checkpoint, wanted))
    # files of ranks
    path = target.checkpoint.path
    names = [name for name in names_in(path) if not is_optional_state(name)] if path.is_dir() else []
    owners = {name: rank for name in names if (rank := find_owner_rank_of_file(name)) is not None}
    saved = 1 + max(owners.values(), default=-1)
    if owners and saved != wanted:
        message = f"the random states of {count(saved, 'rank')} are in one file a rank and cannot be used by {wanted}"
        fix = reshard_fix(target.checkpoint, wanted) if reader.is_sharded else None  # other trainers cannot read DCP
        yield Finding("rank_state", min(owners), message, fix, tuple(sorted(owners)))
    # entries of ranks
    owners_by_group: dict[str, dict[str, int]] = defaultdict(dict)  # by the first word of the key path
    for name in target.layout.names:
        key = target.layout.key(name)
        if (owner := find_owner_rank_of_key(key)) is not None:
            owners_by_group[str(key[0])][name] = owner
    for group, owners in owners_by_group.items():
        ranks = 1 + max(owners.values())
        if wanted not in (ranks, target.layout.world_size):
            message = f"the file has a state for each of {count(ranks, 'rank')}; {wanted} cannot use these states"
            yield Finding("rank_state", group, message, reshard_fix(target.checkpoint, wanted), tuple(owners))
