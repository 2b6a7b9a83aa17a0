"""Read the directories that DeepSpeed saves: one torch.save file of model and optimizer states per rank.

Source: deepspeed/runtime/engine.py. The pickles list the tensors in the flat buffers of the ranks, and each parameter
becomes a set of byte ranges in these files.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path

from ckptkit.errors import Corrupt, Incomplete, Report, Unsupported, errors_at, raise_problem
from ckptkit.formats.archives.flatten import Flattening
from ckptkit.formats.archives.torch_save import (
    archive_extents_of,
    is_torch_save,
    read_state_file,
    report_truncated_files,
)
from ckptkit.formats.pickles.tensor_calls import is_pickled_tensor
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.protocols import FormatReader
from ckptkit.io.file import names_in
from ckptkit.layout import Extent, Layout, StoredTensor
from ckptkit.plugins.deepspeed.expert_states import put_experts, put_unpartitioned_experts, read_expert_optimizers
from ckptkit.plugins.deepspeed.experts import ExpertFiles, find_expert_files
from ckptkit.plugins.deepspeed.file_names import (
    OFFLOADED,
    DeepSpeedFiles,
    is_deepspeed_file,
    is_useless_alone,
    parse_part_and_rank,
)
from ckptkit.plugins.deepspeed.join_partitions import join_parameters, join_zero_parameters
from ckptkit.plugins.deepspeed.model_states import tensor_parallel_error
from ckptkit.plugins.deepspeed.modules import put_parameter, put_sliced_module_entries, put_untrained_and_low_precision
from ckptkit.plugins.deepspeed.read_partitions import PartOfModel, read_model_part
from ckptkit.plugins.deepspeed.tensor_parallel import SliceMap
from ckptkit.plugins.deepspeed.unpartitioned import MODEL, Gathering, Settings, put_unpartitioned_states
from ckptkit.plugins.deepspeed.values import require_dict

_SHARED = "tied_modules."  # followed by KEY.NAME, with the name inside the layer


class DeepSpeed(FormatReader):
    """The DeepSpeed format: a directory with files of every rank. The file of a single rank is refused."""

    name = "deepspeed"
    known_by = "DeepSpeed's `*_model_states.pt`"
    is_sharded = True
    resized_as = "universal"

    def owns_file(self, name: str) -> bool:
        return is_deepspeed_file(name)

    def rank_of(self, name: str) -> int | None:
        rank = parse_part_and_rank(name)
        return rank[1] if rank else None

    def ranks_in(self, names: Iterable[str]) -> set[Hashable]:
        """Return the (part, data-parallel rank) pairs that have files; each pipeline stage has its own ranks."""
        return set(filter(None, map(parse_part_and_rank, names)))

    def is_bound_to_world_size(self, path: Path) -> bool:
        """Return True if there are optimizer partitions: a rank can only read its own partition."""
        return any("zero_pp_rank_" in name for name in names_in(path))

    def detect(self, path: Path) -> bool:
        """Return True for a directory with DeepSpeed files, or for a file that cannot be read without other files."""
        if path.is_dir():
            return any(map(is_deepspeed_file, names_in(path)))
        return is_useless_alone(path.name) and is_torch_save(path)

    def check_files_complete(self, path: Path, report: Report) -> None:
        files = files_at(path)
        report_truncated_files(path, sorted(all_file_names(files)), report)
        for part in files.parts:
            states = read_model_part(path, files, part)
            if find_expert_files(path, files, states.models[0]) is not None and not states.partitions:
                read_expert_optimizers(path, files)

    def read(self, path: Path, report: Report = raise_problem) -> Layout:
        """Return the layout of a directory.

        `model` has the fp32 master weights and all tensors that ZeRO did not partition; `optimizer` has the states by
        name. Low-precision copies of the master weights are in `twins`. Files that are missing or unreadable are
        reported, and their tensors get unreadable chunks.
        """
        return read_directory_layout(path, files_at(path), report)

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:
        return archive_extents_of(layout, layout.descriptions, report)


def files_at(path: Path) -> DeepSpeedFiles:
    """Return the files at `path`.

    Raises `Unsupported` for the file of a single rank, and for runs with offloaded tensors.
    """
    if not path.is_dir():
        message = "this is the file of one rank: it has a part of most tensors; the other parts are in files beside it"
        raise Unsupported(message, path=path, hint=f"pass the directory {path.parent}")
    names = names_in(path)
    if OFFLOADED in names:
        raise Unsupported("offloaded tensors are in files of DeepSpeed's swapper", path=path)
    files = DeepSpeedFiles.of(names, path)
    if not (files.models or files.optimizers):
        raise Corrupt("there are files of layers or experts, but no `mp_rank_*_model_states.pt`", path=path)
    return files


def put_layer(
    gathering: Gathering, root: Path, file: str, layer_index: int, masters: Mapping[str, StoredTensor]
) -> None:
    """Put the entries of one pipeline layer, with low-precision copies as twins of their master weights.

    A layer file also contains a copy of each parameter that it shares with other layers, under its own key. The name
    inside the layer and the shape show which parameter that may be.
    """
    state = read_state_file(root, file)
    flattening = Flattening(state.entries, file)
    with errors_at(path=root / file):
        for key, value in require_dict(state.value, file).items():
            full = f"{layer_index}.{key}"
            if not is_pickled_tensor(value):
                gathering.put_flattened(flattening, value, (MODEL, full))
                continue
            copy = flattening.make_stored_tensor(value)
            shared = [name for name in masters if name.startswith(_SHARED) and name.split(".", 2)[-1] == str(key)]
            alike = [name for name in shared if masters[name].spec.shape == copy.spec.shape]
            names = [full] if full in masters else alike
            if not names:
                gathering.put_entry((MODEL, full), copy)
            elif masters[names[0]].spec.shape != copy.spec.shape:
                expected, found = list(masters[full].spec.shape), list(copy.spec.shape)
                raise Corrupt(f"expected {expected} as in its master, found {found}", tensor=full)
            elif len(names) == 1:
                gathering.twins[f"{MODEL}.{names[0]}"] = copy


def read_directory_layout(root: Path, files: DeepSpeedFiles, report: Report = raise_problem) -> Layout:
    """Return the layout of the files in directory `root`; report files that are missing or cannot be read."""
    gathering = Gathering()
    parts = [read_model_part(root, files, part, report) for part in files.parts]
    masters: dict[str, StoredTensor] = {}
    names: list[list[list[str]]] = []
    model = parts[0].models[0]
    experts = find_expert_files(root, files, model, report)
    if model.slices is not None:
        names.append(put_sliced_parameters(gathering, parts, model.slices, masters, root))
    for part in () if model.slices is not None else parts:
        if part.partitions:
            names.append(put_model_part(gathering, part, masters, experts, root, report))
        elif experts is not None:
            put_unpartitioned_experts(gathering, root, files, part.models[0], experts, report)
        else:
            with errors_at(path=root / part.models[0].path):
                put_unpartitioned_states(gathering, part.models[0])
    if experts is not None and names:
        put_experts(gathering, experts, masters, root)
    for (number, cut), name in files.layers.items():
        if cut:
            raise tensor_parallel_error()
        put_layer(gathering, root, name, number, masters)
    put_merged_optimizer_groups(gathering, parts, names)
    put_other_entries(gathering, parts[0])
    recorded = model.saved.get("dp_world_size")
    world_size = len(parts[0].partitions) or (recorded if type(recorded) is int and recorded > 0 else 1)
    flat = gathering.flat
    return Layout(
        root,
        DeepSpeed.name,
        flat.tensors,
        flat.blobs,
        flat.keys,
        world_size=world_size * len(parts),
        descriptions=tuple(sorted(all_file_names(files))),
        twins=gathering.twins,
        spares=flat.spares,
    )


def all_file_names(files: DeepSpeedFiles) -> set[str]:
    """Return the names of all files that `read_directory_layout` reads."""
    by_kind = (files.models, files.optimizers, files.layers, files.experts, files.expert_optimizers)
    return {name for kind in by_kind for name in kind.values()}


def put_model_part(
    gathering: Gathering,
    part: PartOfModel,
    masters: dict[str, StoredTensor],
    experts: ExpertFiles | None,
    root: Path,
    report: Report,
) -> list[list[str]]:
    """Put the parameters of one part of the model, and add their fp32 master weights to `masters`.

    Returns the parameter names of each optimizer parameter group.
    """
    model = part.models[0]
    names: list[list[str]] = [[] for _ in part.partitions[0].settings]
    with errors_at(path=root / model.path):
        if model.shapes is None:
            raise Corrupt("`param_shapes` is missing: it lists the parameters that ZeRO partitioned, with their shapes")
        of_part: dict[str, StoredTensor] = {}
        for parameter in join_zero_parameters(model.shapes, part.partitions, experts, root):
            if parameter.name in of_part:
                raise Corrupt("two parameter groups contain this parameter", tensor=parameter.name)
            of_part[parameter.name] = parameter.master
            names[parameter.group.settings].append(parameter.name)
            if parameter.name not in masters:  # tied parameters appear in several pipeline stages
                put_parameter(gathering, parameter)
        masters |= of_part
        put_untrained_and_low_precision(gathering, part, masters, root, report)
    return names


def put_sliced_parameters(
    gathering: Gathering, parts: list[PartOfModel], slices: SliceMap, masters: dict[str, StoredTensor], root: Path
) -> list[list[str]]:
    """Put the parameters that are split over tensor-parallel ranks, and add their fp32 master weights to `masters`.

    Returns the parameter names of each optimizer parameter group. Raises `Incomplete` if the files of a rank are
    missing, `Unsupported` unless the run used ZeRO 1 or 2.
    """
    model = parts[0].models[0]
    with errors_at(path=root / model.path):
        if len(parts) != slices.ranks:
            message = f"expected the files of {slices.ranks} ranks of tensor parallelism, found those of {len(parts)}"
            raise Incomplete(message, hint="copy the files of all ranks to one directory")
        if not all(part.partitions and not part.partitions[0].cuts_each for part in parts):
            hint = "save it with ZeRO 1, or with `save_16bit_model`"
            raise Unsupported("tensor parallelism without ZeRO 1 or 2", hint=hint)
        names: list[list[str]] = [[] for _ in parts[0].partitions[0].settings]
        by_rank = [
            {
                parameter.name: parameter
                for parameter in join_zero_parameters(part.models[0].shapes or (), part.partitions, None, root)
            }
            for part in parts
        ]
        for name, first in by_rank[0].items():
            sliced = slices.slicing_of(name)
            slices_of_ranks = [on_rank[name] for on_rank in by_rank if name in on_rank]
            if len(slices_of_ranks) < len(parts):
                raise Corrupt("expected the parameter on all ranks of tensor parallelism", tensor=name)
            joined = join_parameters(slices_of_ranks, sliced.join_parts)
            names[first.group.settings].append(name)
            put_parameter(gathering, joined)
            masters[name] = joined.master
            if copies := sliced.replicated_chunks([parameter.master for parameter in slices_of_ranks]):
                gathering.flat.spares[f"{MODEL}.{name}"] = copies
        put_sliced_module_entries(gathering, [part.models[0] for part in parts], slices, masters)
    return names


def put_merged_optimizer_groups(
    gathering: Gathering, parts: list[PartOfModel], names_of_parts: list[list[list[str]]]
) -> None:
    """Put the optimizer parameter groups.

    Pipeline stages have equal groups with different parameters, so equal groups are merged. Tensor-parallel ranks have
    the same parameters, so they count as one part.
    """
    merged: list[tuple[Flattening, Settings, list[str]]] = []
    firsts = [part.partitions[0] for part in parts if part.partitions][: len(names_of_parts)]
    for first, names_in_part in zip(firsts, names_of_parts, strict=True):
        for i, (group, names) in enumerate(zip(first.settings, names_in_part, strict=True)):
            settings: Settings = {key: value for key, value in group.items() if key != "params"}
            if i < len(merged) and dump(merged[i][1]) == dump(settings):
                merged[i][2].extend(name for name in names if name not in merged[i][2])
            else:
                merged.append((first.flattening, settings, names))
    for i, (flattening, settings, names) in enumerate(merged):
        gathering.put_group(flattening, i, settings, names)


def put_other_entries(gathering: Gathering, part: PartOfModel) -> None:
    """Put the client state, schedulers and loss scale: all entries outside the model and the optimizer."""
    model = part.models[0]
    for key, value in model.others.items():
        gathering.put_other_entry(model.flattening, key, value)
    for partition in part.partitions[:1]:
        for key, value in partition.others.items():
            if key not in model.others:
                gathering.put_other_entry(partition.flattening, key, value)
