"""Name the states of an optimizer that numbers its parameters, where it is certain which parameter each number is.

Source: torch/optim/optimizer.py: parameters are numbered through all groups, in the order in which the training script
passed them. Some trainers pass `model.parameters()`, so that their files have the model's order. For any other file,
recorded names decide, or sizes that allow only one assignment. An uncertain number stays a number.
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

_STEP = "step"  # a moment that is one number, whatever the parameter's shape
AT = 2  # where in a key path the parameter is: `("optimizer", "state", "3", "exp_avg")`


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model."""

    name: str
    shape: Shape


def parameters_of(model: RankFile) -> list[Parameter]:
    """Return the model's parameters in order, as one rank's file has them: what is spread over ranks, each tensor once.

    Where nothing is, all tensors: one rank alone has no need to tell buffers apart.
    """
    held = model.tensors
    is_spread = any(one.spread is not None for one in held.values())
    found: dict[object, Parameter] = {}
    for name, one in held.items():
        if one.spread is not None or not is_spread:
            place = (one.chunks[0].path, one.chunks[0].offset) if one.chunks and one.spec.numel else name
            has_bytes = bool(one.chunks) and one.chunks[0].box.numel > 0
            found.setdefault(place if has_bytes else name, Parameter(str(model.flat.keys[name][-1]), one.spec.shape))
    return list(found.values())


def match(
    groups: Sequence[Sequence[int]],
    parameters: Sequence[Parameter],
    shapes: Mapping[int, Shape | int],
    recorded: Mapping[int, str],
    *,
    is_in_order: bool,
) -> dict[int, Parameter] | None:
    """Return the parameter behind each number, None if that is not certain.

    `shapes` are those of the moments, or the number of their elements where they were flattened. Flattened moments may
    be of FSDP1's flat parameters, which only sizes tell: with several groups, all sizes must be known. Names that the
    optimizer has `recorded` decide alone. Without them, sizes must tell the parameters apart, unless each group
    `is_in_order` of the model because the trainer's code says so.
    """
    flattened = any(isinstance(shape, int) for shape in shapes.values())
    sizes = {one: prod(one.shape) if flattened else one.shape for one in parameters}
    if recorded:
        return match_names(recorded, shapes, sizes)
    unknown = flattened and len(groups) > 1 and len(shapes) < len(parameters)
    if unknown or not is_counted_through(groups):
        return None
    return (match_if_certain if is_in_order else match_by_size_if_certain)(groups, shapes, sizes)


def match_names(
    recorded: Mapping[int, str], shapes: Mapping[int, Shape | int], sizes: Mapping[Parameter, Shape | int]
) -> dict[int, Parameter] | None:
    """Return the parameter behind each number by its recorded name, None where names or sizes disagree."""
    known = {one.name: one for one in sizes}
    shown = {number: shape for number, shape in shapes.items() if shape != ()}  # not by moments of several shapes
    try:
        found = match_recorded(recorded, shown, {one.name: size for one, size in sizes.items()})
    except Mismatch:
        return None
    return {number: known[name] for number, name in found.items()}


def read_names(value: Any, groups: Sequence[Sequence[int]]) -> dict[int, str] | None:
    """Return the names that the optimizer in a file has recorded, {} for none; None for lists that do not fit."""
    try:
        return read_recorded(groups, lists_of(value, PARAM_NAMES) or [])
    except Unsupported:
        return None


def is_moment(key: KeyPath, held: RankTensor) -> bool:
    """Return whether a tensor at a key path is a moment with a number for each of the parameter's."""
    return len(key) == AT + 2 and key[1] == "state" and key[-1] != _STEP and held.spec.shape != ()


def is_flattened(files: Sequence[RankFile], model: RankFile) -> bool:
    """Return whether each rank has a piece of each moment, flattened: plain tensors where the model's are spread."""
    moments = [held for file in files for name, held in file.tensors.items() if is_moment(file.flat.keys[name], held)]
    is_spread = any(held.spread is not None for held in model.tensors.values())
    return is_spread and bool(moments) and all(h.spread is None and len(h.spec.shape) == 1 for h in moments)


def has_strays(files: Sequence[RankFile], groups: Sequence[Sequence[int]]) -> bool:
    """Return whether a file has the state of a parameter that is in no group."""
    known = {str(number) for group in groups for number in group}
    keys = (key for file in files for key in file.flat.keys.values() if len(key) > AT and key[1] == "state")
    return any(key[AT] not in known for key in keys)


def shapes_of(files: Sequence[RankFile], *, flattened: bool) -> dict[int, Shape | int]:
    """Return the shape of each number's moments, or how many elements all ranks have if they are flattened."""
    found: dict[int, Shape | int] = {}
    of_moment: dict[tuple[int, Any], int] = {}
    for file in files:
        for name, held in file.tensors.items():
            key = file.flat.keys[name]
            if not is_moment(key, held):
                continue
            number = int(key[AT])
            if flattened:
                of_moment[number, key[-1]] = of_moment.get((number, key[-1]), 0) + held.spec.numel
            elif found.setdefault(number, held.spec.shape) != held.spec.shape:
                found[number] = ()  # moments of several shapes: none of ours
    for (number, what), count in of_moment.items():
        if found.setdefault(number, count) != count:
            raise Corrupt(
                f"expected {found[number]} numbers in the pieces of `{what}` of parameter {number}, found {count}"
            )
    return found


def holders(model: Sequence[RankFile]) -> list[int]:
    """Return the ranks that hold the model between them; others hold the same again."""
    return [
        file.rank
        for file in model
        if not any(isinstance(one.spread, Placed) and one.spread.is_replica for one in file.tensors.values())
    ]


def join_flattened(
    files: Sequence[RankFile], found: Mapping[int, Parameter] | None
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the moments of which the ranks, one after the other, have pieces.

    They have the shapes of their parameters, or one dimension if it is not known which these are.
    """
    names = dict.fromkeys(
        name for file in files for name, held in file.tensors.items() if is_moment(file.flat.keys[name], held)
    )
    for name in names:
        there = [(file, file.tensors[name]) for file in files if name in file.tensors]
        total = sum(held.spec.numel for _, held in there)
        key = there[0][0].flat.keys[name]
        shape = found[int(key[AT])].shape if found else (total,)
        pieces = pieces_in_turn(piece_of(held) for _, held in there)
        yield name, StoredTensor(replace(there[0][1].spec, shape=shape), tuple(cut_out(pieces, 0, shape)))


def piece_of(moment: RankTensor) -> tuple[Chunk, int]:
    """Return the chunk of a flattened moment that one rank has, and how many elements are in it."""
    (chunk,) = moment.chunks
    return chunk, moment.spec.numel


def named(key: KeyPath, found: Mapping[int, Parameter]) -> KeyPath:
    """Return a key path with the name of the parameter in place of its number."""
    if len(key) > AT and key[1] == "state":
        return (*key[:AT], found[int(key[AT])].name, *key[AT + 1 :])
    return key
