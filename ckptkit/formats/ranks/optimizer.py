"""Join the optimizer files of all ranks, and replace parameter indices by names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from ckptkit.errors import CkptError, Corrupt, Report, refuse
from ckptkit.formats.archives.flatten import FlatState
from ckptkit.formats.archives.values import numbers_of, with_value
from ckptkit.formats.ranks import numbered
from ckptkit.formats.ranks.numbered import AT, Parameter, is_moment, piece_of
from ckptkit.formats.shards.join import join_files
from ckptkit.formats.shards.sharded_tensors import RankFile
from ckptkit.layout import KeyPath, StoredTensor
from ckptkit.layout.flat import cut_out, pieces_in_turn
from ckptkit.layout.matching import is_counted_through, match_if_certain
from ckptkit.layout.wrappers import PARAM_NAMES, is_flat_name, unwrapped

# FSDP1 with `use_orig_params=False` has one flat parameter per wrapped module (a unit).
#
# Source: torch/distributed/fsdp/_flat_param.py. The root's flat parameter comes first, then those of the modules
# wrapped in it. A flat parameter contains its parameters in the model's order. Each rank has an equal shard of the flat
# parameter, padded at the end. No file says which modules were wrapped. ckptkit infers it from the numbers and sizes of
# the flat parameters: the wrapping is certain if exactly one list of layers fits.
_MEMBER = re.compile(r"((?:[^.]+\.)*?)([0-9]+)\.")  # `model.layers.3.`
Unit = list[tuple[Parameter, int]]  # the parameters in a flat parameter, each with its offset in elements


def match_units(
    groups: Sequence[Sequence[int]],
    parameters: Sequence[Parameter],
    totals: Mapping[int, int],
    world: int,
    recorded: Mapping[int, str],
) -> list[Unit] | None:
    """Return the units behind the indices of an optimizer, None if they are not certain.

    `totals` are the numbers of elements of each state on all `world` ranks, including padding. `recorded` names show
    which modules were wrapped.
    """
    if len(groups) != 1 or not is_counted_through(groups):
        return None
    supposed = [units_of_names(recorded, parameters)] if recorded else candidate_wrappings(parameters)
    fitting: list[list[Unit]] = []
    for units in supposed:
        if units not in fitting and fits(units, groups, totals, world):
            fitting.append(units)
    return fitting[0] if len(fitting) == 1 else None


def units_of_names(recorded: Mapping[int, str], parameters: Sequence[Parameter]) -> list[Unit]:
    """Return the unit of each flat parameter by its recorded name; [] if a parameter belongs to no unit.

    A unit has the parameters of its module, except the parameters of wrapped modules inside it.
    """
    flat = [unwrapped(recorded[number]) for number in sorted(recorded)]
    prefixes = [name[: name.rfind(".") + 1] for name in flat]
    inside: dict[str, list[Parameter]] = {prefix: [] for prefix in prefixes}
    for parameter in parameters:
        name = unwrapped(parameter.name)
        above = [prefix for prefix in inside if name.startswith(prefix)]
        if not above or not all(map(is_flat_name, flat)):
            return []
        inside[max(above, key=len)].append(parameter)
    return [unit_of(inside[prefix]) for prefix in prefixes]


def candidate_wrappings(parameters: Sequence[Parameter]) -> Iterator[list[Unit]]:
    """Yield the possible units: only the root was wrapped, or also the members of one list of layers."""
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
    """Return the unit of consecutive parameters."""
    unit: Unit = []
    at = 0
    for parameter in parameters:
        unit.append((parameter, at))
        at += prod(parameter.shape)
    return unit


def fits(units: Sequence[Unit], groups: Sequence[Sequence[int]], totals: Mapping[int, int], world: int) -> bool:
    """Return whether the indices can belong to the units, which all ranks shard equally."""
    sizes = (sum(prod(parameter.shape) for parameter, _ in unit) for unit in units)
    padded = {index: -(-size // world) * world for index, size in enumerate(sizes)}
    return match_if_certain(groups, totals, padded) is not None


def join_units(
    files: Sequence[RankFile], units: Sequence[Unit], rest: FlatState, order: Sequence[Parameter]
) -> FlatState:
    """Return the optimizer by parameter names, in the model's order.

    The states are cut out of the units. A scalar state of a unit, such as its step, goes to each of its parameters.
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
            rank_tensor = files[0].tensors[name]
            if is_moment(key, rank_tensor):
                pieces = pieces_in_turn(piece_of(file.tensors[name]) for file in files)
                chunks = tuple(cut_out(pieces, at, parameter.shape))
                add(named, StoredTensor(replace(rank_tensor.spec, shape=parameter.shape), chunks))
            else:
                add(named, rest.tensors[name])
    for name, key in rest.keys.items():
        if name in rest.tensors and key[1:2] != ("state",):
            add(key, rest.tensors[name])
    blobs = {name: blob for name, blob in rest.blobs.items() if rest.keys[name][1:2] != ("state",)}
    return FlatState(tensors, blobs, keys | {name: rest.keys[name] for name in blobs})


PARAMS = "params"  # the key of a group's list of parameters


def join_optimizer(
    files: Sequence[RankFile],
    model: Sequence[RankFile],
    report: Report = refuse,
    world: int | None = None,
    *,
    is_in_order: bool,
) -> FlatState:
    """Return the joined optimizer of all ranks, with parameter names from the files of the `model`.

    `is_in_order` says that the trainer's code passes each group its parameters in the model's order. If the parameter
    of an index is not certain, all indices stay, and flattened states keep one dimension. Raises `Corrupt` for
    flattened states if a file of one of the `world` ranks is missing: nothing else says where its shards belong.
    """
    groups = numbers_of(files[0].value)
    recorded = numbered.read_names(files[0].value, groups) if groups is not None else None
    if groups is None or recorded is None or numbered.has_strays(files, groups):
        return join_files(files, report)
    flattened = numbered.is_flattened(files, model[0])
    if flattened and world is not None and {len(files), len(model)} != {world}:
        raise Corrupt(
            f"its moments are flattened over the files of {world} ranks, and some of these files cannot be read"
        )
    holding = numbered.ranks_with_full_model(model)
    own = [file for file in files if file.rank in holding] if flattened else list(files)
    shapes = numbered.moment_shapes(own, flattened=flattened)
    parameters = numbered.parameters_of(model[0])
    parameter_of = numbered.match(groups, parameters, shapes, recorded, is_in_order=is_in_order)
    if flattened:
        rest = join_files([without_moments(file) for file in files])
        totals = {number: count for number, count in shapes.items() if isinstance(count, int)}
        units = (
            match_units(groups, parameters, totals, len(own), recorded)
            if parameter_of is None and (is_in_order or recorded)
            else None
        )
        if units is not None:
            return with_lists(join_units(own, units, rest, parameters), [parameters])
        tensors = {**dict(numbered.join_flattened(own, parameter_of)), **rest.tensors}
        keys = {name: key for file in reversed(own) for name, key in file.flat.keys.items()} | rest.keys
        joined = FlatState(tensors, rest.blobs, keys)
    else:
        joined = join_files(files, report if parameter_of is None else naming_parameters(files, parameter_of, report))
    return joined if parameter_of is None else with_parameter_names(joined, groups, parameter_of)


def naming_parameters(files: Sequence[RankFile], parameter_of: Mapping[int, Parameter], report: Report) -> Report:
    """Return a report that names states by their parameters."""
    keys = {name: key for file in files for name, key in file.flat.keys.items()}

    def report_named(problem: CkptError) -> None:
        if problem.tensor in keys:
            problem.tensor = ".".join(map(str, numbered.name_key(keys[problem.tensor], parameter_of)))
        report(problem)

    return report if report is refuse else report_named


def without_moments(file: RankFile) -> RankFile:
    tensors = {name: tensor for name, tensor in file.tensors.items() if not is_moment(file.flat.keys[name], tensor)}
    return replace(file, flat=FlatState(dict[str, StoredTensor](tensors), file.flat.blobs, file.flat.keys))


def with_lists(joined: FlatState, groups: Sequence[Sequence[Parameter]]) -> FlatState:
    """Return the optimizer with parameter names in the lists of its groups, including recorded names."""
    for name, blob in joined.blobs.items():
        key = joined.keys[name]
        if key[-3:-2] == ("param_groups",) and key[-1] in (PARAMS, PARAM_NAMES):
            joined.blobs[name] = with_value(blob, [parameter.name for parameter in groups[int(key[-2])]])
    return joined


def with_parameter_names(
    joined: FlatState, groups: Sequence[Sequence[int]], parameter_of: Mapping[int, Parameter]
) -> FlatState:
    """Return the optimizer with parameter names in place of indices."""
    named = FlatState()
    for old, key in joined.keys.items():
        new = numbered.name_key(key, parameter_of)
        name = ".".join(map(str, new))
        if old in joined.spares:
            named.spares[name] = joined.spares[old]
        if old in joined.tensors:
            named.tensors[name], named.keys[name] = joined.tensors[old], new
        elif old in joined.blobs:
            named.blobs[name], named.keys[name] = joined.blobs[old], new
    return with_lists(named, [[parameter_of[number] for number in group] for group in groups])
