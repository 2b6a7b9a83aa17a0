"""Join the files of the ranks' optimizers, with the names of parameters where they had numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptkit.errors import CkptError, Corrupt, Report, refuse
from ckptkit.formats.archives.flatten import FlatState
from ckptkit.formats.archives.values import numbers_of, with_value
from ckptkit.formats.ranks import numbered
from ckptkit.formats.ranks.numbered import Parameter, is_moment
from ckptkit.formats.ranks.units import join_units, match_units
from ckptkit.formats.shards.join import join_files
from ckptkit.formats.shards.rank_tensor import RankFile
from ckptkit.layout import StoredTensor
from ckptkit.layout.recorded_names import PARAM_NAMES

PARAMS = "params"  # the list of a group's parameters


def join_optimizer(
    files: Sequence[RankFile],
    model: Sequence[RankFile],
    report: Report = refuse,
    world: int | None = None,
    *,
    is_in_order: bool,
) -> FlatState:
    """Return the optimizer of all ranks, whose `model` tells what its parameters are called.

    `is_in_order` says that the trainer's code gives each group its parameters in the model's order. Where it is not
    certain which parameter a number is, all keep their numbers, and flattened moments one dimension.
    Raises `Corrupt` for flattened ones if a file of one of the `world` ranks is missing: nothing else says where its
    pieces belong.
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
    holding = numbered.holders(model)
    own = [file for file in files if file.rank in holding] if flattened else list(files)
    shapes = numbered.shapes_of(own, flattened=flattened)
    parameters = numbered.parameters_of(model[0])
    found = numbered.match(groups, parameters, shapes, recorded, is_in_order=is_in_order)
    if flattened:
        rest = join_files([without_moments(file) for file in files])
        totals = {number: count for number, count in shapes.items() if isinstance(count, int)}
        units = (
            match_units(groups, parameters, totals, len(own), recorded)
            if found is None and (is_in_order or recorded)
            else None
        )
        if units is not None:
            return with_lists(join_units(own, units, rest, parameters), [parameters])
        tensors = {**dict(numbered.join_flattened(own, found)), **rest.tensors}
        keys = {name: key for file in reversed(own) for name, key in file.flat.keys.items()} | rest.keys
        joined = FlatState(tensors, rest.blobs, keys)
    else:
        joined = join_files(files, report if found is None else naming_parameters(files, found, report))
    return joined if found is None else with_names(joined, groups, found)


def naming_parameters(files: Sequence[RankFile], found: Mapping[int, Parameter], report: Report) -> Report:
    """Return a report that calls the states of an optimizer by the names of their parameters."""
    keys = {name: key for file in files for name, key in file.flat.keys.items()}

    def tell(problem: CkptError) -> None:
        if problem.tensor in keys:
            problem.tensor = ".".join(map(str, numbered.named(keys[problem.tensor], found)))
        report(problem)

    return report if report is refuse else tell


def without_moments(file: RankFile) -> RankFile:
    tensors = {name: held for name, held in file.tensors.items() if not is_moment(file.flat.keys[name], held)}
    return replace(file, flat=FlatState(dict[str, StoredTensor](tensors), file.flat.blobs, file.flat.keys))


def with_lists(joined: FlatState, groups: Sequence[Sequence[Parameter]]) -> FlatState:
    """Return an optimizer with the names of the parameters in the lists of its groups, recorded names too."""
    for name, blob in joined.blobs.items():
        key = joined.keys[name]
        if key[-3:-2] == ("param_groups",) and key[-1] in (PARAMS, PARAM_NAMES):
            joined.blobs[name] = with_value(blob, [parameter.name for parameter in groups[int(key[-2])]])
    return joined


def with_names(joined: FlatState, groups: Sequence[Sequence[int]], found: Mapping[int, Parameter]) -> FlatState:
    """Return an optimizer with the names of parameters in place of their numbers."""
    named = FlatState()
    for old, key in joined.keys.items():
        new = numbered.named(key, found)
        name = ".".join(map(str, new))
        if old in joined.spares:
            named.spares[name] = joined.spares[old]
        if old in joined.tensors:
            named.tensors[name], named.keys[name] = joined.tensors[old], new
        elif old in joined.blobs:
            named.blobs[name], named.keys[name] = joined.blobs[old], new
    return with_lists(named, [[found[number] for number in group] for group in groups])
