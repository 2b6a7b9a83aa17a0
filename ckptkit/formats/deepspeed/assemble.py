"""Join a directory of DeepSpeed's to one layout: parameters by name, the optimizer by name, and all the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptkit.errors import CkptError, Corrupt
from ckptkit.formats.deepspeed.gathering import GROUPS, MODEL, STATE, Gathering
from ckptkit.formats.deepspeed.layers import layers_of, put_layer
from ckptkit.formats.deepspeed.modules import put_module, put_parameter
from ckptkit.formats.deepspeed.names import Files
from ckptkit.formats.deepspeed.parts import PartOfModel, read_part
from ckptkit.formats.deepspeed.unpartitioned import put_unpartitioned
from ckptkit.formats.deepspeed.values import without_classes
from ckptkit.formats.deepspeed.zero import parameters_of
from ckptkit.formats.torchfile.flatten import Flattening
from ckptkit.formats.torchfile.read_archive import is_tensor
from ckptkit.formats.torchfile.write_pickle import dump
from ckptkit.layout import Layout, StoredTensor

NAME = "deepspeed"
_IN_ONE = frozenset(["ds_config"])  # entries that stay whole, although they are dicts


def assemble(root: Path, files: Files) -> Layout:
    """Return the layout of the files in directory `root`."""
    gathering = Gathering()
    parts = [read_part(root, files, part) for part in files.parts]
    masters: dict[str, StoredTensor] = {}
    for part in parts:
        put_part(gathering, part, masters, root)
    for number, name in layers_of(files):
        put_layer(gathering, root, name, number, masters)
    put_groups(gathering, parts)
    put_others(gathering, parts[0])
    flat = gathering.flat
    return Layout(
        root,
        NAME,
        flat.tensors,
        flat.blobs,
        flat.keys,
        world_size=ranks_of(parts[0]) * len(parts),
        descriptions=tuple(sorted(names_of(files))),
        twins=gathering.twins,
    )


def names_of(files: Files) -> set[str]:
    """Return the names of the files that are read."""
    return {*files.models.values(), *files.optimizers.values(), *files.layers.values()}


def put_part(gathering: Gathering, part: PartOfModel, masters: dict[str, StoredTensor], root: Path) -> None:
    """Put the parameters of a part of the model, and enter their masters by name."""
    model = part.models[0]
    try:
        if not part.partitions:
            put_unpartitioned(gathering, model)
            return
        if model.shapes is None:
            raise Corrupt("`param_shapes` is missing: which parameters ZeRO has partitioned, and their shapes")
        own: dict[str, StoredTensor] = {}
        for parameter in parameters_of(model.shapes, part.partitions, root):
            if parameter.name in own:
                raise Corrupt("two groups have this parameter", tensor=parameter.name)
            own[parameter.name] = parameter.master
            if parameter.name not in masters:  # tied ones are in several stages of a pipeline
                put_parameter(gathering, parameter, part.partitions[0].flattening)
        masters |= own
        put_module(gathering, part, masters)
    except CkptError as error:
        raise error.blame(path=root / model.path) from None


def put_groups(gathering: Gathering, parts: list[PartOfModel]) -> None:
    """Put the hyperparameters of each group of parameters, with the names of these.

    Stages of a pipeline have the same groups, each with its own parameters.
    """
    found: list[tuple[Flattening, dict[str | int, Any], list[str]]] = []
    for part in parts:
        if not part.partitions:
            continue
        first = part.partitions[0]
        for i, settings in enumerate(first.settings):
            own = {key: value for key, value in settings.items() if key != "params"}
            names = [
                name
                for group, named in zip(first.groups, part.models[0].shapes or (), strict=True)
                if group.settings == i
                for name in named
            ]
            if i < len(found) and dump(found[i][1]) == dump(own):
                found[i][2].extend(name for name in names if name not in found[i][2])
            else:
                found.append((first.flattening, own, names))
    for i, (flattening, settings, names) in enumerate(found):
        for key, value in {**settings, "params": names}.items():
            gathering.put(
                (*GROUPS, i, key), flattening.blob(value) if not is_tensor(value) else flattening.stored(value)
            )


def put_others(gathering: Gathering, part: PartOfModel) -> None:
    """Put all that is neither of the model nor of the optimizer: the client's state, schedulers, loss scale."""
    model = part.models[0]
    for key, value in model.others.items():
        put_other(gathering, model.flattening, key, value)
    if part.partitions:
        for key, value in part.partitions[0].others.items():
            if key not in model.others:
                put_other(gathering, part.partitions[0].flattening, key, without_classes(value))


def put_other(gathering: Gathering, flattening: Flattening, key: str | int, value: Any) -> None:
    """Put an entry under its own key, unless the model or the optimizer is there."""
    way = ("client_state", key) if key in (MODEL, STATE[0]) else (key,)
    if key in _IN_ONE:
        gathering.put(way, flattening.blob(value))
    else:
        gathering.flatten(flattening, value, way)


def ranks_of(part: PartOfModel) -> int:
    """Return how many ranks have saved a part of the model."""
    if part.partitions:
        return len(part.partitions)
    count = part.models[0].saved.get("dp_world_size")
    return count if type(count) is int and count > 0 else 1
