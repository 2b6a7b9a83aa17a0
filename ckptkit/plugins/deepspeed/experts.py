"""Read the files of experts, and map the local expert index of a rank to the global index in the file names.

Source: `_save_moe_checkpoint` in deepspeed/runtime/engine.py, deepspeed/moe/layer.py, and
`_create_expert_and_data_parallel` in deepspeed/utils/groups.py. Every expert-parallel rank counts its experts from 0,
so different experts have the same parameter name on different ranks. Ranks with the same experts partition the
optimizer state of these experts among themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.errors import ELSEWHERE, Corrupt, Incomplete, Report, Unsupported, errors_at, raise_problem
from ckptkit.formats.archives.flatten import find_dict_items
from ckptkit.formats.archives.torch_save import StateFile, read_state_file
from ckptkit.formats.pickles.tensor_calls import is_pickled_tensor
from ckptkit.formats.rank_names import read_each_file
from ckptkit.layout import StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.plugins.deepspeed.auto_experts import LAYERS, AutoLayer, stack_experts
from ckptkit.plugins.deepspeed.file_names import DeepSpeedFiles
from ckptkit.plugins.deepspeed.model_states import ModelStates
from ckptkit.plugins.deepspeed.read_partitions import Partition
from ckptkit.plugins.deepspeed.values import require_counts, require_dict, require_type

_EXPERT = re.compile(r"(.*deepspeed_moe\.experts\.deepspeed_experts\.)([0-9]{1,6})(\..+)")
_GROUP = re.compile(r"ep_size_([0-9]{1,6})")
_DATA_FIRST = "use_data_before_expert_parallelism"
_HINT = "check that all files of one save are there, and no others"
_FILE = "layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
_MOST_EXPERTS = 1 << 16  # in a layer: more are a damaged number


@dataclass(frozen=True, slots=True)
class ExpertFiles:
    """The expert files in order, and the number of experts of each layer by name prefix, in the same order.

    For AutoEP `files` is empty; `fused` contains the full tensors and `auto_layers` their layers. `is_data_first` is
    true if ranks with the same experts are adjacent; None if the configuration was not saved. For a file in `lost`,
    which is missing or cannot be read, `files` has the tensors of another expert of its layer, under its names.
    """

    files: tuple[StateFile, ...]
    counts: Mapping[str, int]
    is_data_first: bool | None
    fused: Mapping[str, StoredTensor] = field(default_factory=dict)
    auto_layers: Mapping[str, AutoLayer] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()

    def expert_rank_of(self, name: str, ranks: int) -> int:
        """Return which of the `ranks` expert-parallel ranks has the expert of entry `name`."""
        match = _EXPERT.fullmatch(name)
        count = self.counts.get(match[1], 0) if match else 0
        if match is None or not count or count % ranks:
            message = f"expected a multiple of {ranks} experts, one share for each rank, found {count}"
            raise Corrupt(message, tensor=name)
        return int(match[2]) // (count // ranks)

    def name_in_files(self, name: str, rank: int, ranks: int) -> str:
        """Return the name that a parameter has in the files; expert-parallel rank `rank` of `ranks` calls it `name`."""
        if name in self.auto_layers:  # a fused tensor has one name on all ranks and in the files
            if self.auto_layers[name].ranks != ranks:
                message = f"expected experts on {self.auto_layers[name].ranks} ranks, found a group for {ranks}"
                raise Corrupt(message, tensor=name, hint=_HINT)
            return name
        match = _EXPERT.fullmatch(name)
        if match is None or match[1] not in self.counts:
            message = "the parameter is in a group of experts, but no file contains an expert of its layer"
            raise Corrupt(message, tensor=name)
        count = self.counts[match[1]]
        if count % ranks or int(match[2]) >= count // ranks:
            message = f"the layer has {count} experts on {ranks} ranks, so no rank has expert number {match[2]}"
            raise Corrupt(message, tensor=name, hint=_HINT)
        return f"{match[1]}{rank * (count // ranks) + int(match[2])}{match[3]}"


def split_at_expert_index(name: str) -> tuple[str, str] | None:
    """Return the prefix and the suffix around the expert index in a name; None if it is not an expert parameter."""
    match = _EXPERT.fullmatch(name)
    return (match[1], match[3]) if match else None


def expert_counts(root: Path, files: DeepSpeedFiles, model: ModelStates) -> list[int]:
    """Return the number of experts of each layer; [] for a model without experts.

    Raises `Corrupt` for the file of an unknown expert, `Unsupported` for pipeline or tensor parallelism.
    """
    with errors_at(path=root / model.path):
        saved = model.saved.get("num_experts")  # early versions saved only one number
        counts = list(require_counts(saved, "num_experts")) if isinstance(saved, list) else []
        if not all(0 < count <= _MOST_EXPERTS for count in counts):
            raise Corrupt(f"expected 1 to {_MOST_EXPERTS} experts in each layer (`num_experts`), found {counts[:8]}")
    if (counts or files.experts) and (files.layers or len(files.parts) > 1):
        raise Unsupported("experts in a model with pipeline or tensor parallelism", path=root / model.path)
    for (layer, expert), name in files.experts.items():
        if layer >= len(counts) or expert >= counts[layer]:
            message = f"the model does not have this expert: its layers have {counts[:8]} experts"
            raise Corrupt(message, path=root / name, hint="move the files of the other run to another directory")
    return counts


def find_expert_files(
    root: Path, files: DeepSpeedFiles, model: ModelStates, report: Report = raise_problem
) -> ExpertFiles | None:
    """Return the experts in a directory; None for a model without experts.

    Reports the files of experts that are missing or cannot be read. See `expert_counts` for other errors.
    """
    counts = expert_counts(root, files, model)
    if not counts:
        return None
    config = find_dict_items(model.saved.get("ds_config"))
    is_first = None if config is None else any(key == _DATA_FIRST and bool(value) for key, value in config)
    names = {
        (layer, expert): files.experts.get((layer, expert), _FILE.format(layer=layer, expert=expert))
        for layer, count in enumerate(counts)
        for expert in range(count)
    }

    def read_expert(key: tuple[int, int], name: str) -> StateFile:
        if key not in files.experts:
            found = sum(layer == key[0] for layer, _ in files.experts)
            expected = f"expected {counts[key[0]]} experts in layer {key[0]}, found {found}"
            raise Incomplete(f"the file of an expert is missing: {expected}", path=root / name, hint=ELSEWHERE)
        return read_state_file(root, name)

    if model.auto_layers:
        fused_counts = [layer.experts for layer in dict.fromkeys(model.auto_layers.values())]
        if fused_counts != counts:
            message = f"expected layers of {counts[:8]} experts, found {fused_counts[:8]} in `{LAYERS}`"
            hint = "save a model in which AutoEP replaced all layers of experts"
            raise Unsupported(message, path=root / model.path, hint=hint)
        fused = stack_experts(root, names, model.auto_layers, read_expert, report)
        return ExpertFiles((), {}, is_first, fused, model.auto_layers)

    return read_named_experts(root, names, read_expert, counts, report, is_data_first=is_first)


def read_named_experts(
    root: Path,
    names: Mapping[tuple[int, int], str],
    read_expert: Callable[[tuple[int, int], str], StateFile],
    counts: Sequence[int],
    report: Report,
    *,
    is_data_first: bool | None,
) -> ExpertFiles:
    """Return the experts in files of their own; `names` are the files by layer and expert, `counts` of each layer.

    Reports the files that cannot be read. Raises `Incomplete` if none of a layer can be read.
    """

    def read_with_prefix(key: tuple[int, int], name: str) -> tuple[StateFile, str]:
        file = read_expert(key, name)
        return file, expert_name_prefix(root, file, key[1])

    read = read_each_file(root, names, read_with_prefix, report)
    layers: dict[str, int] = {}
    for (layer, _), (file, prefix) in read.items():
        if layers.setdefault(prefix, layer) != layer or len(layers) != layer + 1:
            message = f"expected layer {layer} as in the other files, found `{prefix}`"
            raise Corrupt(message, path=root / file.name, hint=_HINT)
    if len(layers) < len(counts):
        raise Incomplete("the files of all experts of a layer are missing or unreadable", path=root, hint=ELSEWHERE)
    like = {layer: file for (layer, _), (file, _) in read.items()}
    every = [read[key][0] if key in read else stand_in_for(key[1], name, like[key[0]]) for key, name in names.items()]
    lost = frozenset(name for key, name in names.items() if key not in read)
    return ExpertFiles(tuple(every), dict(zip(layers, counts, strict=True)), is_data_first, lost=lost)


def stand_in_for(expert: int, name: str, like: StateFile) -> StateFile:
    """Return a file of this name with the tensors of another expert's file, under the names of this expert."""
    items = require_dict(like.value, like.name).items()
    matches = [
        (match, value) for key, value in items if is_pickled_tensor(value) and (match := _EXPERT.fullmatch(str(key)))
    ]
    return StateFile(name, {f"{match[1]}{expert}{match[3]}": value for match, value in matches}, like.entries)


def expert_name_prefix(root: Path, file: StateFile, expert: int) -> str:
    """Return the common prefix of the names in an expert file.

    Raises `Corrupt` if a tensor belongs to another expert.
    """
    with errors_at(path=root / file.name):
        prefixes = set()
        for key in require_dict(file.value, file.name):
            match = _EXPERT.fullmatch(str(key))
            if match is None or int(match[2]) != expert:
                raise Corrupt(f"the tensor does not belong to expert {expert}", tensor=str(key))
            prefixes.add(match[1])
        if len(prefixes) != 1:
            raise Corrupt(f"expected tensors of one layer in the file of an expert, found {len(prefixes)}")
    return prefixes.pop()


def partitions_sharing_group(
    group_index: int, shapes: Mapping[str, Shape], partitions: Sequence[Partition], experts: ExpertFiles | None
) -> Iterator[tuple[Sequence[Partition], Mapping[str, Shape]]]:
    """Yield the partitions of the ranks that share a parameter group among themselves, and the shapes by name.

    These are all ranks, or for experts once per expert-parallel rank the ranks that have its experts.
    """
    group = partitions[0].groups[group_index]
    settings = partitions[0].settings[group.settings]
    if not settings.get("moe"):
        stray = next(filter(split_at_expert_index, shapes), None)
        if stray is not None and experts is not None:
            raise Unsupported("the parameter of an expert is in a group without experts", tensor=stray)
        yield partitions, shapes
        return
    if experts is None:
        raise Corrupt("there is a parameter group of experts, but `num_experts` counts no experts")
    ranks = expert_rank_count(settings)
    if ranks * group.ranks != len(partitions):
        files = f"{ranks * group.ranks} ranks ({ranks} with experts x {group.ranks} with states)"
        raise Corrupt(f"expected files of {files}, found {len(partitions)}", hint=_HINT)
    if experts.is_data_first is None and 1 < ranks < len(partitions):
        message = f"cannot tell which of {len(partitions)} ranks have the same experts: the configuration was not saved"
        raise Unsupported(message, hint="pass DeepSpeed its configuration as a dict when you save")
    each = len(partitions) // ranks
    for rank in range(ranks):
        own = slice(rank * each, (rank + 1) * each) if experts.is_data_first else slice(rank, None, ranks)
        yield partitions[own], {experts.name_in_files(name, rank, ranks): shape for name, shape in shapes.items()}


def expert_rank_count(settings: Mapping[str | int, Any]) -> int:
    """Return the number of expert-parallel ranks, which is part of the name of the parameter group."""
    name = require_type(settings.get("name"), str, "name")
    match = _GROUP.fullmatch(name)
    if match is None or not int(match[1]):
        raise Unsupported(f"expected `ep_size_N` as the name of a group of experts, found {name!a}")
    return int(match[1])
