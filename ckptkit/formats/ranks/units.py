"""Name the states of an optimizer whose parameters are FSDP1's flat ones: of each wrapped module all in one.

Source: torch/distributed/fsdp/_flat_param.py, with `use_orig_params=False`. The root's flat parameter comes first,
then those of the modules wrapped in it; in each the parameters follow one another as the model has them, and each rank
has an equal piece of it, padded at the end. Which modules were wrapped is in no file. It is certain if the members of
one list of layers fit, in number and sizes, and those of no other do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from ckptkit.formats.archives.flatten import FlatState
from ckptkit.formats.ranks.numbered import AT, Parameter, is_moment
from ckptkit.formats.shards.rank_tensor import RankFile
from ckptkit.layout import Chunk, KeyPath, StoredTensor
from ckptkit.layout.axes import boxes_of_run

_MEMBER = re.compile(r"((?:[^.]+\.)*?)([0-9]+)\.")  # `model.layers.3.`
Unit = list[tuple[Parameter, int]]  # the parameters in a flat one, and where each begins


def match_units(
    groups: Sequence[Sequence[int]], parameters: Sequence[Parameter], totals: Mapping[int, int], world: int
) -> list[Unit] | None:
    """Return the units behind the numbers of an optimizer, None if it is not certain which they are.

    `totals` are how many numbers all ranks have of each, padding included.
    """
    if len(groups) != 1 or list(groups[0]) != list(range(len(groups[0]))) or not totals.keys() <= set(groups[0]):
        return None
    found = [units for units in suppositions(parameters) if fits(units, len(groups[0]), totals, world)]
    return found[0] if len(found) == 1 else None


def suppositions(parameters: Sequence[Parameter]) -> Iterator[list[Unit]]:
    """Yield the units that there would be if nothing had been wrapped but the root, or the members of a list too."""
    yield [unit_of(parameters)]
    lists = dict.fromkeys(match[1] for p in parameters for match in [_MEMBER.match(p.name)] if match)
    for above in lists:
        inside: dict[int, list[Parameter]] = {}
        root: list[Parameter] = []
        for parameter in parameters:
            match = _MEMBER.match(parameter.name)
            belongs = match is not None and match[1] == above
            (inside.setdefault(int(match[2]), []) if match and belongs else root).append(parameter)
        layers = [unit_of(inside[index]) for index in sorted(inside)]
        yield [unit_of(root), *layers] if root else layers


def unit_of(parameters: Sequence[Parameter]) -> Unit:
    """Return the unit of parameters that follow one another."""
    unit: Unit = []
    at = 0
    for parameter in parameters:
        unit.append((parameter, at))
        at += prod(parameter.shape)
    return unit


def fits(units: Sequence[Unit], count: int, totals: Mapping[int, int], world: int) -> bool:
    """Return whether units are as many as there are numbers, and each, once padded, as large as what ranks have."""
    if len(units) != count:
        return False
    return all(-(-size_of(units[number]) // world) * world == total for number, total in totals.items())


def size_of(unit: Unit) -> int:
    return sum(prod(parameter.shape) for parameter, _ in unit)


def join_units(
    files: Sequence[RankFile], units: Sequence[Unit], rest: FlatState, order: Sequence[Parameter]
) -> FlatState:
    """Return the optimizer by the names of parameters, in the model's order: moments cut out of units, and the rest.

    What a unit has once, such as its step, is that of each of its parameters.
    """
    tensors: dict[str, StoredTensor] = {}
    keys: dict[str, KeyPath] = {}

    def add(key: KeyPath, tensor: StoredTensor) -> None:
        name = ".".join(map(str, key))
        tensors[name], keys[name] = tensor, key

    unit_of_name = {parameter.name: (number, at) for number, unit in enumerate(units) for parameter, at in unit}
    for parameter in order:
        number, at = unit_of_name[parameter.name]
        for name, key in files[0].flat.keys.items():
            if len(key) != AT + 2 or key[1] != "state" or key[AT] != str(number) or name not in files[0].tensors:
                continue
            named = (*key[:AT], parameter.name, key[-1])
            held = files[0].tensors[name]
            if is_moment(key, held):
                chunks = tuple(pieces_of(files, name, parameter, at))
                add(named, StoredTensor(replace(held.spec, shape=parameter.shape), chunks))
            else:
                add(named, rest.tensors[name])
    for name, key in rest.keys.items():
        if name in rest.tensors and key[1:2] != ("state",):
            add(key, rest.tensors[name])
    blobs = {name: blob for name, blob in rest.blobs.items() if rest.keys[name][1:2] != ("state",)}
    return FlatState(tensors, blobs, keys | {name: rest.keys[name] for name in blobs})


def pieces_of(files: Sequence[RankFile], name: str, parameter: Parameter, at: int) -> Iterator[Chunk]:
    """Yield the chunks of a parameter that begins at `at` of a unit, of which ranks have one piece after the other."""
    end = at + prod(parameter.shape)
    begins = 0
    for file in files:
        (chunk,) = file.tensors[name].chunks
        stops = begins + chunk.box.numel
        low, high = max(at, begins), min(end, stops)
        if low < high:
            yield from boxes_of_run(chunk, low - begins, parameter.shape, low - at, high - at)
        begins = stops
