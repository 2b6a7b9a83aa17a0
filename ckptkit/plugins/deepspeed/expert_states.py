"""Assemble models with experts: expert files, and the optimizers of expert-parallel ranks in runs without ZeRO.

Source: `_save_moe_checkpoint` in deepspeed/runtime/engine.py. Without ZeRO each expert-parallel rank saves one
optimizer with parameter indices: first the parameters that all ranks share, then the experts of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, Incomplete, Report, errors_at, raise_problem
from ckptkit.formats.archives.flatten import FlatState, Flattening
from ckptkit.formats.archives.torch_save import read_state_file
from ckptkit.formats.pickles.tensor_calls import as_tensor_record, is_pickled_tensor
from ckptkit.formats.rank_names import read_each_file
from ckptkit.layout import Chunk, StoredTensor
from ckptkit.layout.axes import concatenate
from ckptkit.layout.box import Shape, full_box
from ckptkit.plugins.deepspeed.experts import ExpertFiles, expert_rank_count, split_at_expert_index
from ckptkit.plugins.deepspeed.file_names import DeepSpeedFiles, report_missing_ranks
from ckptkit.plugins.deepspeed.join_partitions import find_step_or_checksum
from ckptkit.plugins.deepspeed.model_states import ModelStates
from ckptkit.plugins.deepspeed.modules import put_low_precision_copy, put_low_precision_value
from ckptkit.plugins.deepspeed.unpartitioned import (
    MODEL,
    Gathering,
    IndexedOptimizer,
    find_names_in_order,
    master_weights_by_name,
    put_groups,
    put_states,
    put_weight,
    read_indexed_optimizer,
    trained_shapes,
)
from ckptkit.plugins.deepspeed.values import dict_or_empty, require_dict

_HINT = "check that all files come from one run"
APART = "optimizer_expp_rank_"  # prefix of the key of a rank's optimizer, if the parameter order is not certain


def put_experts(gathering: Gathering, experts: ExpertFiles, masters: Mapping[str, StoredTensor], root: Path) -> None:
    """Put the tensors of the expert files: as the low-precision copy of a master weight, or as an untrained tensor."""
    for fused, tensor in experts.fused.items():
        if fused in masters:
            put_low_precision_copy(gathering, fused, tensor, masters[fused])
        else:
            gathering.put_entry((MODEL, fused), tensor)
    for file in experts.files:
        flattening = Flattening(file.entries, file.name)
        with errors_at(path=root / file.name):
            for name, value in require_dict(file.value, file.name).items():
                if file.name in experts.lost:
                    put_lost(gathering, flattening.make_stored_tensor(value), str(name), masters)
                elif str(name) in masters:
                    put_low_precision_value(gathering, flattening, str(name), value, masters[str(name)])
                else:
                    gathering.put_flattened(flattening, value, (MODEL, str(name)))


def put_lost(gathering: Gathering, like: StoredTensor, name: str, masters: Mapping[str, StoredTensor]) -> None:
    """Put a tensor of a lost file, which had the shape of `like`."""
    (chunk,) = like.chunks
    lost = StoredTensor(like.spec, (Chunk.unreadable(full_box(like.spec.shape), chunk.path, like.spec.dtype),))
    if name in masters:
        put_low_precision_copy(gathering, name, lost, masters[name])
    else:
        gathering.put_entry((MODEL, name), lost)


def put_unpartitioned_experts(
    gathering: Gathering, root: Path, files: DeepSpeedFiles, model: ModelStates, experts: ExpertFiles, report: Report
) -> None:
    """Put a model and the optimizers of its expert-parallel ranks; report the files that cannot be read.

    The optimizers become one optimizer by name if the parameter order is certain. Otherwise the optimizer of each rank
    stays under its own key, with parameter indices.
    """
    by_rank = read_expert_optimizers(root, files, report)
    if not files.expert_optimizers and model.optimizer is not None:
        path = root / "expp_rank_0_mp_rank_00_optim_states.pt"
        report(Incomplete("the file with the optimizer state of one rank's experts is missing", path=path))
    optimizers = list(by_rank.values())
    shared = trained_shapes(model)
    names: list[list[str]] = [[] for _ in optimizers]
    counts = {count for optimizer in optimizers for count in expert_rank_counts(optimizer)} or {1}
    # no file says which layers are split among which number of ranks, if there are several
    if optimizers and len(counts) == 1 and by_rank.keys() == set(range(max(counts))):
        own_shapes = expert_shapes_by_rank(experts, model, len(optimizers))
        names = [
            # in order: `split_params_into_different_moe_groups_for_optimizer` in moe/utils.py splits one ordered list
            find_names_in_order(
                optimizer, indices_if_experts_last(optimizer), {**shared, **expert_shapes}, is_in_order=True
            )
            for optimizer, expert_shapes in zip(optimizers, own_shapes, strict=True)
        ]
    masters: dict[str, StoredTensor] = {}
    if all(names):
        of_ranks = [
            master_weights_by_name(optimizer, dict(enumerate(rank_names)))
            for optimizer, rank_names in zip(optimizers, names, strict=True)
        ]
        # reversed, so that rank 0 provides the parameters that all ranks share
        masters = {name: master for of_rank in reversed(of_ranks) for name, master in of_rank.items()}
        masters |= {
            name: concatenate([of_rank[name] for of_rank in of_ranks], 0) for name in experts.fused if name in masters
        }
    for name, value in (model.module or {}).items():
        put_weight(gathering, model.flattening, str(name), value, masters)
    for name, master in masters.items():
        if name not in shared:
            gathering.put_entry((MODEL, name), master)
    put_experts(gathering, experts, masters, root)
    if optimizers and all(rank_names and set(rank_names[: len(shared)]) == shared.keys() for rank_names in names):
        put_joined_optimizers(gathering, optimizers, names, len(shared), experts, has_masters=bool(masters))
    else:
        for rank, optimizer in by_rank.items():
            saved = {"state": optimizer.states, "param_groups": list(optimizer.groups), **optimizer.others}
            for key, value in saved.items():
                gathering.put_flattened(optimizer.flattening, value, (f"{APART}{rank}", key))


def put_joined_optimizers(
    gathering: Gathering,
    optimizers: Sequence[IndexedOptimizer],
    names: Sequence[list[str]],
    shared_count: int,
    experts: ExpertFiles,
    *,
    has_masters: bool,
) -> None:
    """Put the optimizers of several ranks as one; the first `shared_count` parameters are the same on all ranks."""
    by_number = [dict(enumerate(names_of_rank)) for names_of_rank in names]
    put_states(gathering, optimizers[0], by_number[0], range(shared_count))
    rank_states: list[FlatState] = []
    for optimizer, names_of_rank in zip(optimizers, by_number, strict=True):
        rank_gathering = Gathering()
        put_states(rank_gathering, optimizer, names_of_rank, range(shared_count, len(names_of_rank)))
        rank_states.append(rank_gathering.flat)
    if experts.fused:  # the states of AutoEP's tensors are one: tensors concatenated, scalars from rank 0
        first = rank_states[0]
        if any(flat.tensors.keys() != first.tensors.keys() for flat in rank_states):
            raise Corrupt("the ranks of experts do not have the same optimizer states", hint=_HINT)
        tensors = {
            name: concatenate([flat.tensors[name] for flat in rank_states], 0) if tensor.spec.shape else tensor
            for name, tensor in first.tensors.items()
        }
        rank_states = [replace(first, tensors=tensors)]
    for flat in rank_states:
        for name, stored in (flat.tensors | flat.blobs).items():
            gathering.put_entry(flat.keys[name], stored)
    params: list[dict[str | int, None]] = [{} for _ in optimizers[0].groups]
    for optimizer, names_of_rank in zip(optimizers, by_number, strict=True):
        for listed, numbers in zip(params, optimizer.indices_by_group, strict=True):
            listed.update(dict.fromkeys(names_of_rank[number] for number in numbers))
    put_groups(gathering, optimizers[0], list(map(list, params)), has_masters=has_masters)


def read_expert_optimizers(
    root: Path, files: DeepSpeedFiles, report: Report = raise_problem
) -> dict[int, IndexedOptimizer]:
    """Return the optimizers of the expert-parallel ranks.

    Reports the files that are missing or cannot be read, and those of another save.
    """
    first: list[tuple[list[int], float | None]] = []

    def read_optimizer(_rank: int, name: str) -> IndexedOptimizer:
        file = read_state_file(root, name)
        value = require_dict(file.value, name).get("optimizer")
        optimizer = read_indexed_optimizer(Flattening(file.entries, name), value)
        state = next(iter(optimizer.states.values()), None)  # all ranks have the first parameter
        step = find_step_or_checksum(optimizer.flattening, dict_or_empty(state, "state"))
        first.append((list(map(len, optimizer.indices_by_group)), step))
        if first[-1][0] != first[0][0]:
            raise Corrupt("the parameter groups differ from those of rank 0", hint=_HINT)
        if None not in (first[0][1], step) and first[0][1] != step:
            message = "the optimizer's step differs from that of rank 0"
            raise Corrupt(f"{message}: this directory mixes files of several saves", hint=_HINT)
        return optimizer

    named = dict(sorted(files.expert_optimizers.items()))
    optimizers = read_each_file(root, named, read_optimizer, report)
    for rank, optimizer in list(optimizers.items())[:1]:
        with errors_at(path=root / named[rank]):
            report_missing_ranks(named, max(expert_rank_counts(optimizer), default=1), root, named[rank], report)
    return optimizers


def expert_rank_counts(optimizer: IndexedOptimizer) -> set[int]:
    """Return among how many ranks the layers split their experts: usually one number."""
    return {expert_rank_count(group) for group in optimizer.groups if group.get("moe")}


def indices_if_experts_last(optimizer: IndexedOptimizer) -> list[Any]:
    """Return the parameter indices in order if the first group has no experts and all other groups do; else []."""
    kinds = [bool(group.get("moe")) for group in optimizer.groups]
    is_known = kinds == [False] + [True] * (len(kinds) - 1)
    return [number for numbers in optimizer.indices_by_group for number in numbers] if is_known else []


def expert_shapes_by_rank(experts: ExpertFiles, model: ModelStates, ranks: int) -> list[dict[str, Shape]]:
    """Return the shapes of the trainable expert tensors of each of `ranks` ranks, in the model's order."""
    buffers = {split_at_expert_index(name) for name in model.buffers} - {None}
    slices: dict[str, Shape] = {}
    for fused, tensor in experts.fused.items():
        layer = experts.auto_layers[fused]
        slices[fused] = (layer.experts // layer.ranks, *tensor.spec.shape[1:])
    by_rank = [dict(slices) for _ in range(ranks)]
    for file in experts.files:
        for name, value in require_dict(file.value, file.name).items():
            if is_pickled_tensor(value) and split_at_expert_index(str(name)) not in buffers:
                by_rank[experts.expert_rank_of(str(name), ranks)][str(name)] = as_tensor_record(value).shape
    return by_rank
