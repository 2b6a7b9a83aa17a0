"""Join the files of the ranks' optimizers, with the names of parameters where they had numbers. Opens no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptkit.formats.ranks import numbered
from ckptkit.formats.ranks.held import RankFile
from ckptkit.formats.ranks.join import join_blobs, join_tensors
from ckptkit.formats.ranks.numbered import Parameter, is_moment
from ckptkit.formats.torchfile.flatten import Flat
from ckptkit.formats.torchfile.values import with_value
from ckptkit.layout import Blob, KeyPath, StoredTensor

PARAMS = "params"  # the list of a group's parameters


def join_optimizer(files: Sequence[RankFile], model: Sequence[RankFile]) -> Flat:
    """Return the optimizer of all ranks, whose `model` tells what its parameters are called.

    Where it is not certain which parameter a number is, all keep their numbers, and flattened moments one dimension.
    """
    groups = numbered.groups_of(files[0].value)
    if groups is None:
        return join_files(files)
    flattened = numbered.is_flattened(files, model[0])
    holding = numbered.holders(model)
    own = [file for file in files if file.rank in holding] if flattened else list(files)
    shapes = numbered.shapes_of(own, flattened=flattened)
    found = numbered.match(groups, numbered.parameters_of(model[0]), shapes)
    if flattened:
        rest = join_files([without_moments(file) for file in files])
        tensors = {**dict(numbered.join_flattened(own, found)), **rest.tensors}
        keys = {name: key for file in reversed(own) for name, key in file.flat.keys.items()} | rest.keys
        joined = Flat(tensors, rest.blobs, keys)
    else:
        joined = join_files(files)
    return joined if found is None else with_names(joined, groups, found)


def join_files(files: Sequence[RankFile]) -> Flat:
    """Return what is in the files of all ranks, each tensor whole."""
    tensors = join_tensors(files)
    blobs, keys = join_blobs(files)
    every = {name: key for file in reversed(files) for name, key in file.flat.keys.items()}
    return Flat(tensors, blobs, {name: every[name] for name in tensors} | keys)


def without_moments(file: RankFile) -> RankFile:
    """Return a rank's file without what is to be joined in another way."""
    tensors = {name: held for name, held in file.tensors.items() if not is_moment(file.flat.keys[name], held)}
    return replace(file, flat=Flat(dict[str, StoredTensor](tensors), file.flat.blobs, file.flat.keys))


def with_names(joined: Flat, groups: Sequence[Sequence[int]], found: Mapping[int, Parameter]) -> Flat:
    """Return an optimizer with the names of parameters in place of their numbers."""
    tensors: dict[str, StoredTensor] = {}
    blobs: dict[str, Blob] = {}
    keys: dict[str, KeyPath] = {}
    for old, key in joined.keys.items():
        new = numbered.named(key, found)
        name = ".".join(map(str, new))
        if old in joined.tensors:
            tensors[name], keys[name] = joined.tensors[old], new
        elif old in joined.blobs:
            blob = joined.blobs[old]
            is_list = key[-3:-2] == ("param_groups",) and key[-1] == PARAMS
            names = [found[number].name for number in groups[int(key[-2])]] if is_list else None
            blobs[name], keys[name] = with_value(blob, names) if is_list else blob, new
    return Flat(tensors, blobs, keys)
