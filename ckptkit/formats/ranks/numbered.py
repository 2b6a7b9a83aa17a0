"""Name the states of an optimizer that numbers its parameters, where the parameter of each index is certain.

Source: torch/optim/optimizer.py: indices count through all groups, in the order in which the training script passed the
parameters. Some trainers pass `model.parameters()`, so their files have the model's order. For any other file, recorded
names decide, or shapes that allow only one assignment. An uncertain index stays an index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptkit.errors import Corrupt, Mismatch, Unsupported
from ckptkit.formats.archives.values import lists_of
from ckptkit.formats.shards.dtensors import Placed
from ckptkit.formats.shards.sharded_tensors import RankFile, RankTensor
from ckptkit.layout import Chunk, KeyPath, StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.layout.flat import cut_out, pieces_in_turn
from ckptkit.layout.matching import is_counted_through, match_by_size_if_certain, match_if_certain
from ckptkit.layout.wrappers import PARAM_NAMES, match_recorded, read_recorded

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
            identity = (tensor.chunks[0].path, tensor.chunks[0].offset) if tensor.chunks and tensor.spec.numel else name
            has_bytes = bool(tensor.chunks) and tensor.chunks[0].box.numel > 0
            parameters.setdefault(
                identity if has_bytes else name, Parameter(str(model.flat.keys[name][-1]), tensor.spec.shape)
            )
    return list(parameters.values())


def match(
    groups: Sequence[Sequence[int]],
    parameters: Sequence[Parameter],
    shapes: Mapping[int, Shape | int],
    recorded: Mapping[int, str],
    *,
    is_in_order: bool,
) -> dict[int, Parameter] | None:
    """Return the parameter of each index, None if that is not certain.

    `shapes` are the shapes of the states, or their numbers of elements if the states were flattened. If there are
    `recorded` names, only these decide. Otherwise the shapes must distinguish the parameters. With `is_in_order`, the
    trainer's code lists the parameters of each group in the model's order, and that order decides. Flattened states may
    belong to FSDP1's flat parameters, which only their sizes show: with several groups, all sizes must be known.
    """
    flattened = any(isinstance(shape, int) for shape in shapes.values())
    sizes = {parameter: prod(parameter.shape) if flattened else parameter.shape for parameter in parameters}
    if recorded:
        return match_names(recorded, shapes, sizes)
    unknown = flattened and len(groups) > 1 and len(shapes) < len(parameters)
    if unknown or not is_counted_through(groups):
        return None
    return (match_if_certain if is_in_order else match_by_size_if_certain)(groups, shapes, sizes)


def match_names(
    recorded: Mapping[int, str], shapes: Mapping[int, Shape | int], sizes: Mapping[Parameter, Shape | int]
) -> dict[int, Parameter] | None:
    """Return the parameter of each index by its recorded name, None where names or shapes disagree."""
    known = {parameter.name: parameter for parameter in sizes}
    shown = {number: shape for number, shape in shapes.items() if shape != ()}  # states of several shapes do not count
    try:
        matched = match_recorded(recorded, shown, {parameter.name: size for parameter, size in sizes.items()})
    except Mismatch:
        return None
    return {number: known[name] for number, name in matched.items()}


def read_names(value: Any, groups: Sequence[Sequence[int]]) -> dict[int, str] | None:
    """Return the names that an optimizer recorded, {} for none; None for lists that do not fit."""
    try:
        return read_recorded(groups, lists_of(value, PARAM_NAMES) or [])
    except Unsupported:
        return None


def is_moment(key: KeyPath, tensor: RankTensor) -> bool:
    """Return whether a tensor is an elementwise state of a parameter, such as `exp_avg`."""
    return len(key) == AT + 2 and key[1] == "state" and key[-1] != _STEP and tensor.spec.shape != ()


def is_flattened(files: Sequence[RankFile], model: RankFile) -> bool:
    """Return whether the states are flattened shards: plain 1-D tensors while the model's tensors are sharded."""
    moments = [
        tensor for file in files for name, tensor in file.tensors.items() if is_moment(file.flat.keys[name], tensor)
    ]
    is_spread = any(tensor.spread is not None for tensor in model.tensors.values())
    return is_spread and bool(moments) and all(h.spread is None and len(h.spec.shape) == 1 for h in moments)


def has_strays(files: Sequence[RankFile], groups: Sequence[Sequence[int]]) -> bool:
    """Return whether a file has the state of a parameter that is in no group."""
    known = {str(number) for group in groups for number in group}
    keys = (key for file in files for key in file.flat.keys.values() if len(key) > AT and key[1] == "state")
    return any(key[AT] not in known for key in keys)


def moment_shapes(files: Sequence[RankFile], *, flattened: bool) -> dict[int, Shape | int]:
    """Return the shape of each index's states, or the number of elements on all ranks if they are flattened."""
    shapes: dict[int, Shape | int] = {}
    of_moment: dict[tuple[int, Any], int] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            key = file.flat.keys[name]
            if not is_moment(key, tensor):
                continue
            number = int(key[AT])
            if flattened:
                of_moment[number, key[-1]] = of_moment.get((number, key[-1]), 0) + tensor.spec.numel
            elif shapes.setdefault(number, tensor.spec.shape) != tensor.spec.shape:
                shapes[number] = ()  # states of several shapes: not the parameter's shape
    for (number, what), count in of_moment.items():
        if shapes.setdefault(number, count) != count:
            raise Corrupt(f"expected {shapes[number]} elements in `{what}` of parameter {number}, found {count}")
    return shapes


def ranks_with_full_model(model: Sequence[RankFile]) -> list[int]:
    """Return the ranks that together have one full model; the other ranks have replicas."""
    return [
        file.rank
        for file in model
        if not any(isinstance(tensor.spread, Placed) and tensor.spread.is_replica for tensor in file.tensors.values())
    ]


def join_flattened(
    files: Sequence[RankFile], parameters: Mapping[int, Parameter] | None
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the states whose flattened shards the ranks have, in rank order.

    They get the shapes of their parameters, or one dimension if the parameters are unknown.
    """
    names = dict.fromkeys(
        name for file in files for name, tensor in file.tensors.items() if is_moment(file.flat.keys[name], tensor)
    )
    for name in names:
        by_file = [(file, file.tensors[name]) for file in files if name in file.tensors]
        total = sum(tensor.spec.numel for _, tensor in by_file)
        key = by_file[0][0].flat.keys[name]
        shape = parameters[int(key[AT])].shape if parameters else (total,)
        pieces = pieces_in_turn(piece_of(tensor) for _, tensor in by_file)
        yield name, StoredTensor(replace(by_file[0][1].spec, shape=shape), tuple(cut_out(pieces, 0, shape)))


def piece_of(moment: RankTensor) -> tuple[Chunk, int]:
    """Return a rank's chunk of a flattened state, and its number of elements."""
    (chunk,) = moment.chunks
    return chunk, moment.spec.numel


def name_key(key: KeyPath, parameters: Mapping[int, Parameter]) -> KeyPath:
    """Return a key path with the name of the parameter in place of its index."""
    if len(key) > AT and key[1] == "state":
        return (*key[:AT], parameters[int(key[AT])].name, *key[AT + 1 :])
    return key
