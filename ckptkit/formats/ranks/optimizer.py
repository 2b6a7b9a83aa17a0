"""Join the optimizer files of all ranks, and replace parameter indices by names where these are certain.

Source: torch/optim/optimizer.py: indices count through all groups, in the order in which the training script passed the
parameters. Some trainers pass `model.parameters()`, so their files have the model's order. For any other file, recorded
names decide, or shapes that allow only one assignment. An uncertain index stays an index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptkit.errors import CkptError, Corrupt, Mismatch, Report, Unsupported, raise_problem
from ckptkit.formats.archives.flatten import FlatState
from ckptkit.formats.archives.non_tensor_entries import (
    find_group_values,
    find_parameter_indices_by_group,
    with_new_value,
)
from ckptkit.formats.shards.dtensors import Placed
from ckptkit.formats.shards.join import join_files
from ckptkit.formats.shards.rank_file import RankFile, RankTensor
from ckptkit.layout import Chunk, KeyPath, StoredTensor
from ckptkit.layout.axes import cut_tensor_from_flat, flat_pieces_of_chunks
from ckptkit.layout.box import Shape
from ckptkit.layout.match_parameters import is_counted_from_zero, match_by_size, match_in_order, match_or_none
from ckptkit.layout.wrappers import (
    PARAM_NAMES,
    is_flat_parameter_name,
    parameters_by_index,
    read_recorded_names,
    without_prefixes_except_ddp,
)

_STEP = "step"  # a state with one element, whatever the parameter's shape
AT = 2  # position of the parameter in a key path: `("optimizer", "state", "3", "exp_avg")`


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    shape: Shape


def parameters_of(model: RankFile) -> list[Parameter]:
    """Return the model's parameters in order, from one rank's file: the sharded tensors, tied ones once.

    Returns all tensors if none is sharded, as with a single rank: then nothing distinguishes buffers from parameters.
    """
    tensors = model.tensors
    is_spread = any(tensor.spread is not None for tensor in tensors.values())
    parameters: dict[object, Parameter] = {}
    for name, tensor in tensors.items():
        if tensor.spread is not None or not is_spread:
            first = tensor.chunks[0] if tensor.chunks else None
            identity = (first.path, first.offset) if first and first.box.numel else name
            parameters.setdefault(identity, Parameter(str(model.flat.keys[name][-1]), tensor.spec.shape))
    return list(parameters.values())


def match_parameters(
    groups: Sequence[Sequence[int]],
    parameters: Sequence[Parameter],
    state_shapes: Mapping[int, Shape | int],
    recorded_names: Mapping[int, str],
    *,
    is_in_model_order: bool,
) -> dict[int, Parameter] | None:
    """Return the parameter of each index, None if that is not certain.

    `state_shapes` are the shapes of the states, or their numbers of elements if the states were flattened. If there are
    `recorded_names`, only these decide. Otherwise the shapes must distinguish the parameters. With
    `is_in_model_order`, the trainer's code lists the parameters of each group in the model's order, and that order
    decides. Flattened states may belong to FSDP1's flat parameters, which only their sizes show: with several groups,
    all sizes must be known.
    """
    flattened = any(isinstance(shape, int) for shape in state_shapes.values())
    sizes = {parameter: prod(parameter.shape) if flattened else parameter.shape for parameter in parameters}
    if recorded_names:
        known = {parameter.name: parameter for parameter in sizes}
        shown = {
            number: shape for number, shape in state_shapes.items() if shape != ()
        }  # states of several shapes: unknown
        try:
            matched = parameters_by_index(
                recorded_names, shown, {parameter.name: size for parameter, size in sizes.items()}
            )
        except Mismatch:
            return None
        return {number: known[name] for number, name in matched.items()}
    unknown = flattened and len(groups) > 1 and len(state_shapes) < len(parameters)
    if unknown or not is_counted_from_zero(groups):
        return None
    return match_or_none(match_in_order if is_in_model_order else match_by_size, groups, state_shapes, sizes)


def find_recorded_names(value: Any, groups: Sequence[Sequence[int]]) -> dict[int, str] | None:
    """Return the names that an optimizer recorded, {} for none; None for lists that do not fit."""
    try:
        return read_recorded_names(groups, find_group_values(value, PARAM_NAMES) or [])
    except Unsupported:
        return None


def is_elementwise_state(key: KeyPath, tensor: RankTensor) -> bool:
    """Return whether a tensor is an elementwise state of a parameter, such as `exp_avg`."""
    return len(key) == AT + 2 and key[1] == "state" and key[-1] != _STEP and tensor.spec.shape != ()


def elementwise_states_of(file: RankFile) -> dict[str, RankTensor]:
    return {name: tensor for name, tensor in file.tensors.items() if is_elementwise_state(file.flat.keys[name], tensor)}


def has_flattened_states(files: Sequence[RankFile], model: RankFile) -> bool:
    """Return whether the states are flattened shards: plain 1-D tensors while the model's tensors are sharded."""
    moments = [tensor for file in files for tensor in elementwise_states_of(file).values()]
    is_spread = any(tensor.spread is not None for tensor in model.tensors.values())
    return is_spread and bool(moments) and all(h.spread is None and len(h.spec.shape) == 1 for h in moments)


def has_ungrouped_states(files: Sequence[RankFile], groups: Sequence[Sequence[int]]) -> bool:
    """Return whether a file has the state of a parameter that is in no group."""
    known = {str(number) for group in groups for number in group}
    keys = (key for file in files for key in file.flat.keys.values() if len(key) > AT and key[1] == "state")
    return any(key[AT] not in known for key in keys)


def elementwise_state_shapes(files: Sequence[RankFile], *, flattened: bool) -> dict[int, Shape | int]:
    """Return the shape of each index's states, or the number of elements on all ranks if they are flattened."""
    shapes: dict[int, Shape | int] = {}
    of_moment: dict[tuple[int, Any], int] = {}
    for file in files:
        for name, tensor in elementwise_states_of(file).items():
            key = file.flat.keys[name]
            number = int(key[AT])
            if flattened:
                of_moment[number, key[-1]] = of_moment.get((number, key[-1]), 0) + tensor.spec.numel
            elif shapes.setdefault(number, tensor.spec.shape) != tensor.spec.shape:
                shapes[number] = ()  # states of several shapes: not the parameter's shape
    for (number, what), count in of_moment.items():
        if shapes.setdefault(number, count) != count:
            raise Corrupt(f"expected {shapes[number]} elements in `{what}` of parameter {number}, found {count}")
    return shapes


def ranks_without_replicas(model: Sequence[RankFile]) -> list[int]:
    """Return the ranks that together have one full model; the other ranks have replicas."""
    return [
        file.rank
        for file in model
        if not any(
            isinstance(tensor.spread, Placed) and tensor.spread.is_replica_of_lower_rank
            for tensor in file.tensors.values()
        )
    ]


def join_flattened_states(
    files: Sequence[RankFile], parameters: Mapping[int, Parameter] | None
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the states from their flattened shards, in the parameters' shapes, or in one dimension if unknown."""
    for name in dict.fromkeys(name for file in files for name in elementwise_states_of(file)):
        by_file = [(file, file.tensors[name]) for file in files if name in file.tensors]
        total = sum(tensor.spec.numel for _, tensor in by_file)
        key = by_file[0][0].flat.keys[name]
        shape = parameters[int(key[AT])].shape if parameters else (total,)
        pieces = flat_pieces_of_chunks(chunk_and_numel(tensor) for _, tensor in by_file)
        yield (
            name,
            StoredTensor(replace(by_file[0][1].spec, shape=shape), tuple(cut_tensor_from_flat(pieces, 0, shape))),
        )


def chunk_and_numel(state: RankTensor) -> tuple[Chunk, int]:
    (chunk,) = state.chunks
    return chunk, state.spec.numel


def with_parameter_name(key: KeyPath, parameters: Mapping[int, Parameter]) -> KeyPath:
    if len(key) > AT and key[1] == "state":
        return (*key[:AT], parameters[int(key[AT])].name, *key[AT + 1 :])
    return key


# FSDP1 with `use_orig_params=False` has one flat parameter per wrapped module (a unit).
#
# Source: torch/distributed/fsdp/_flat_param.py. The root's flat parameter comes first, then those of the modules
# wrapped in it. A flat parameter contains its parameters in the model's order. Each rank has an equal shard of the flat
# parameter, padded at the end. No file says which modules were wrapped. ckptkit infers it from the numbers and sizes of
# the flat parameters: the wrapping is certain if exactly one list of layers fits.
_MEMBER = re.compile(r"((?:[^.]+\.)*?)([0-9]+)\.")  # `model.layers.3.`
Unit = list[tuple[Parameter, int]]  # the parameters in a flat parameter, each with its offset in elements


def match_fsdp_units(
    groups: Sequence[Sequence[int]],
    parameters: Sequence[Parameter],
    numel_by_index: Mapping[int, int],
    world: int,
    recorded_names: Mapping[int, str],
) -> list[Unit] | None:
    """Return the units behind the indices, None if uncertain.

    `numel_by_index` count elements on all ranks, with padding.
    """
    if len(groups) != 1 or not is_counted_from_zero(groups):
        return None
    supposed = (
        [units_by_recorded_names(recorded_names, parameters)] if recorded_names else candidate_wrappings(parameters)
    )
    fitting: list[list[Unit]] = []
    for units in supposed:
        counts = (sum(prod(parameter.shape) for parameter, _ in unit) for unit in units)
        padded = {index: -(-numel // world) * world for index, numel in enumerate(counts)}  # into equal shards
        if units not in fitting and match_or_none(match_in_order, groups, numel_by_index, padded) is not None:
            fitting.append(units)
    return fitting[0] if len(fitting) == 1 else None


def units_by_recorded_names(recorded: Mapping[int, str], parameters: Sequence[Parameter]) -> list[Unit]:
    """Return the unit of each flat parameter by its recorded name; [] if a parameter belongs to no unit."""
    flat = [without_prefixes_except_ddp(recorded[number]) for number in sorted(recorded)]
    prefixes = [name[: name.rfind(".") + 1] for name in flat]
    inside: dict[str, list[Parameter]] = {prefix: [] for prefix in prefixes}
    for parameter in parameters:
        name = without_prefixes_except_ddp(parameter.name)
        above = [prefix for prefix in inside if name.startswith(prefix)]
        if not above or not all(map(is_flat_parameter_name, flat)):
            return []
        inside[max(above, key=len)].append(parameter)
    return [make_fsdp_unit(inside[prefix]) for prefix in prefixes]


def candidate_wrappings(parameters: Sequence[Parameter]) -> Iterator[list[Unit]]:
    """Yield the possible units: only the root was wrapped, or also the members of one list of layers."""
    yield [make_fsdp_unit(parameters)]
    lists = dict.fromkeys(match[1] for p in parameters for match in [_MEMBER.match(p.name)] if match)
    for above in lists:
        inside: dict[int, list[Parameter]] = {}
        root: list[Parameter] = []
        for parameter in parameters:
            match = _MEMBER.match(parameter.name)
            belongs = match is not None and match[1] == above
            (inside.setdefault(int(match[2]), []) if match and belongs else root).append(parameter)
        layers = [make_fsdp_unit(inside[index]) for index in sorted(inside)]
        yield [make_fsdp_unit(root), *layers] if root else layers


def make_fsdp_unit(parameters: Sequence[Parameter]) -> Unit:
    unit: Unit = []
    at = 0
    for parameter in parameters:
        unit.append((parameter, at))
        at += prod(parameter.shape)
    return unit


def join_fsdp_unit_states(
    files: Sequence[RankFile], units: Sequence[Unit], other_entries: FlatState, order: Sequence[Parameter]
) -> FlatState:
    """Return the optimizer by names. States are cut out of units; a unit's scalar state goes to all its parameters."""
    joined = FlatState()
    unit_of_name = {parameter.name: (number, at) for number, unit in enumerate(units) for parameter, at in unit}
    for parameter in order:
        number, at = unit_of_name[parameter.name]
        for name, key in files[0].flat.keys.items():
            if len(key) != AT + 2 or key[1] != "state" or key[AT] != str(number) or name not in files[0].tensors:
                continue
            named = (*key[:AT], parameter.name, key[-1])
            rank_tensor = files[0].tensors[name]
            if is_elementwise_state(key, rank_tensor):
                pieces = flat_pieces_of_chunks(chunk_and_numel(file.tensors[name]) for file in files)
                chunks = tuple(cut_tensor_from_flat(pieces, at, parameter.shape))
                joined.put(named, StoredTensor(replace(rank_tensor.spec, shape=parameter.shape), chunks))
            else:
                joined.put(named, other_entries.tensors[name])
    for name, key in other_entries.keys.items():
        if key[1:2] != ("state",):
            joined.put(key, other_entries.tensors.get(name) or other_entries.blobs[name])
    return joined


PARAMS = "params"  # the key of a group's list of parameters


def join_optimizer(
    files: Sequence[RankFile], model: Sequence[RankFile], report: Report, world: int, *, is_in_model_order: bool
) -> FlatState:
    """Return the joined optimizer of all ranks, with parameter names from the files of the `model`.

    `is_in_model_order` says that the trainer's code passes each group its parameters in the model's order. If the
    parameter of an index is not certain, all indices stay, and flattened states keep one dimension. Raises `Corrupt`
    for flattened states if a file of one of the `world` ranks is missing: nothing else says where its shards belong.
    """
    groups = find_parameter_indices_by_group(files[0].value)
    recorded = find_recorded_names(files[0].value, groups) if groups is not None else None
    if groups is None or recorded is None or has_ungrouped_states(files, groups):
        return join_files(files, report)
    flattened = has_flattened_states(files, model[0])
    if flattened and {len(files), len(model)} != {world}:
        message = f"its moments are flattened over the files of {world} ranks, and some of these files cannot be read"
        raise Corrupt(message)
    holding = ranks_without_replicas(model)
    own = [file for file in files if file.rank in holding] if flattened else list(files)
    shapes = elementwise_state_shapes(own, flattened=flattened)
    parameters = parameters_of(model[0])
    parameter_of = match_parameters(groups, parameters, shapes, recorded, is_in_model_order=is_in_model_order)
    if flattened:
        rest = join_files([without_elementwise_states(file) for file in files])
        totals = {number: count for number, count in shapes.items() if isinstance(count, int)}
        units = (
            match_fsdp_units(groups, parameters, totals, len(own), recorded)
            if parameter_of is None and (is_in_model_order or recorded)
            else None
        )
        if units is not None:
            return with_names_in_groups(join_fsdp_unit_states(own, units, rest, parameters), [parameters])
        tensors = {**dict(join_flattened_states(own, parameter_of)), **rest.tensors}
        keys = {name: key for file in reversed(own) for name, key in file.flat.keys.items()} | rest.keys
        joined = FlatState(tensors, rest.blobs, keys)
    else:
        joined = join_files(
            files, report if parameter_of is None else reporter_naming_parameter(files, parameter_of, report)
        )
    return joined if parameter_of is None else with_parameter_names(joined, groups, parameter_of)


def reporter_naming_parameter(
    files: Sequence[RankFile], parameter_of: Mapping[int, Parameter], report: Report
) -> Report:
    """Return a report that names states by their parameters."""
    keys = {name: key for file in files for name, key in file.flat.keys.items()}

    def report_named(problem: CkptError) -> None:
        if problem.tensor in keys:
            problem.tensor = ".".join(map(str, with_parameter_name(keys[problem.tensor], parameter_of)))
        report(problem)

    return report if report is raise_problem else report_named


def without_elementwise_states(file: RankFile) -> RankFile:
    moments = elementwise_states_of(file)
    tensors = {name: tensor for name, tensor in file.flat.tensors.items() if name not in moments}
    return replace(file, flat=replace(file.flat, tensors=tensors))


def with_names_in_groups(joined: FlatState, groups: Sequence[Sequence[Parameter]]) -> FlatState:
    """Return the optimizer with parameter names in the lists of its groups, including recorded names."""
    for name, blob in joined.blobs.items():
        key = joined.keys[name]
        if key[-3:-2] == ("param_groups",) and key[-1] in (PARAMS, PARAM_NAMES):
            joined.blobs[name] = with_new_value(blob, [parameter.name for parameter in groups[int(key[-2])]])
    return joined


def with_parameter_names(
    joined: FlatState, groups: Sequence[Sequence[int]], parameter_of: Mapping[int, Parameter]
) -> FlatState:
    """Return the optimizer with parameter names in place of indices."""
    named = FlatState()
    for old, key in joined.keys.items():
        new = with_parameter_name(key, parameter_of)
        if entry := joined.tensors.get(old) or joined.blobs.get(old):
            named.put(new, entry)
        if old in joined.spares:
            named.spares[".".join(map(str, new))] = joined.spares[old]
    return with_names_in_groups(named, [[parameter_of[number] for number in group] for group in groups])
