"""Split flat parameters into the original ones, using names and shapes from an optimizer or a config.json.

Source: torch/distributed/fsdp/_flat_param.py. FSDP1's local state has one flat tensor for each wrapped module, and no
file lists its contents. Its name gives the module, whose parameters follow one another in the model's own order. Names,
order and shapes come from the optimizer beside it (its `exp_avg` states have the shapes), or from config.json
for a model type that ckptkit knows or transformers builds. The sizes must add up in either case. In flat tensors of
`use_orig_params=True`, each parameter begins at a multiple of 16 bytes, and the length is a multiple of the world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path

from ckptkit.checkpoints.optimizers.keys import find_optimizers
from ckptkit.errors import Corrupt, Unsupported, errors_at
from ckptkit.formats import detect_format, locate_all_chunks
from ckptkit.io.file import list_directories
from ckptkit.layout import Layout, StoredTensor
from ckptkit.layout.axes import FlatPiece, cut_tensor_from_flat
from ckptkit.layout.box import Shape
from ckptkit.layout.wrappers import is_flat_parameter_name
from ckptkit.models.companions import find_companions, find_model_config
from ckptkit.trainers import is_non_model_component_name

_ALIGNMENTS = (1, 4, 8, 16)  # in elements: unaligned, or 16 bytes at 4, 2 and 1 bytes per element
_HINT = "put the optimizer's directory beside it, such as `optimizer_0`, or config.json; or name one with --base"


def unflatten_parameters(layout: Layout, path: Path, base: str | None = None) -> Layout:
    """Return the layout at `path` with its flat parameters split into the original parameters.

    Raises `Unsupported` if neither an optimizer nor a config.json, beside them or in `base`, describes the contents,
    `Corrupt` if the description belongs to another model.
    """
    keys = {name: layout.key(name) for name in layout.tensors}
    flat = {name: key for name, key in keys.items() if is_flat_parameter_name(str(key[-1]))}
    known = original_shapes_and_source(layout, path, base)
    if known is None:
        message = "this is a flat parameter, and no file gives the names and shapes of the parameters in it"
        raise Unsupported(message, path=path, tensor=next(iter(flat)), hint=_HINT)
    shapes, said_by = known
    tensors = {name: tensor for name, tensor in layout.tensors.items() if name not in flat}
    keys = {name: key for name, key in layout.keys.items() if name not in flat}
    located = locate_all_chunks(layout)
    prefixes = {name: "".join(str(key[-1]).rpartition(".")[:2]) for name, key in flat.items()}
    longest_first = (*sorted(set(prefixes.values()), key=len, reverse=True), "")
    for name, key in flat.items():
        # the parameters of its module, except in submodules that are wrapped themselves
        own = {
            parameter: shape
            for parameter, shape in shapes.items()
            if next(prefix for prefix in longest_first if parameter.startswith(prefix)) == prefixes[name]
        }
        for parameter, piece in split_flat_parameter(located.tensors[name], own, said_by, name, layout):
            new = (*key[:-1], parameter)
            tensors[".".join(map(str, new))] = piece
            keys[".".join(map(str, new))] = new
    lacking = shapes.keys() - {str(key[-1]) for key in keys.values()}
    if lacking:
        what = f"{said_by} lists the parameter"
        message = f"{what}, but no flat parameter belongs to a module that could contain it"
        raise Corrupt(message, path=path, tensor=min(lacking))
    return replace(layout, tensors=tensors, keys=keys)


def original_shapes_and_source(layout: Layout, path: Path, base: str | None) -> tuple[dict[str, Shape], str] | None:
    """Return the shapes of the model's parameters in order, and the name of the file that describes them, or None.

    Raises `Unsupported` for the config.json of an unknown model type.
    """
    # the names and shapes may be in the checkpoint itself, or in an optimizer's directory beside it
    folders = sorted(list_directories(path)) if path.is_dir() else []
    readers = ((folder, detect_format(folder)) for folder in folders if is_non_model_component_name(folder.name))
    beside = (reader.read(folder) for folder, reader in readers if reader is not None)
    shapes = next(filter(None, map(find_optimizer_parameter_shapes, chain([layout], beside))), None)
    if shapes is not None:
        return shapes, "the optimizer"
    config = find_companions(path, base).config if base is not None else find_model_config(path)
    if config is None:
        return None
    from ckptkit.models.expected import expected_model  # deferred: rarely needed and slow to import

    with errors_at(path=path):
        return dict(expected_model(config).parameters), "config.json"


def find_optimizer_parameter_shapes(layout: Layout) -> dict[str, Shape] | None:
    """Return an optimizer's parameter shapes by name, in order; None without names, or with groups of unknown order."""
    moments: dict[str, Shape] = {}
    for name, tensor in layout.tensors.items():
        key = layout.key(name)
        if len(key) > 2 and key[-3] == "state" and isinstance(key[-2], str) and tensor.spec.shape:
            moments.setdefault(key[-2], tensor.spec.shape)
    groups = [group for optimizer in find_optimizers(layout) for group in optimizer.groups] if moments else []
    if len(groups) != 1 or not set(groups[0]) <= moments.keys():
        return None
    return {name: moments[name] for name in groups[0]}


def split_flat_parameter(
    tensor: StoredTensor, member_shapes: Mapping[str, Shape], shape_source: str, name: str, layout: Layout
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a flat parameter's members. Raises `Corrupt` if none fill it, `Unsupported` if they fit in several ways."""
    world = layout.world_size or 1
    starts = {fit for a in _ALIGNMENTS if (fit := find_member_offsets(member_shapes, tensor.spec.numel, a, world))}
    if len(starts) > 1:
        message = (
            f"the {len(member_shapes)} parameters of {shape_source} fit into this flat parameter in {len(starts)} ways"
        )
        raise Unsupported(message, path=layout.path, tensor=name)
    if not starts:
        total = sum(map(prod, member_shapes.values()))
        message = (
            f"expected {total} elements in {len(member_shapes)} parameters ({shape_source}), found {tensor.spec.numel}"
        )
        raise Corrupt(message, path=layout.path, tensor=name, hint=f"check that {shape_source} belongs to this model")
    pieces = [FlatPiece(chunk.start[0], chunk.box.stop[0], chunk) for chunk in tensor.chunks]
    for (parameter, shape), start in zip(member_shapes.items(), *starts, strict=True):
        yield (
            parameter,
            StoredTensor(replace(tensor.spec, shape=shape), tuple(cut_tensor_from_flat(pieces, start, shape))),
        )


def find_member_offsets(
    member_shapes: Mapping[str, Shape], numel: int, alignment: int, world_size: int
) -> tuple[int, ...] | None:
    """Return the start of each member, aligned to `alignment` elements; None if the members do not fill the tensor."""
    starts, at = [], 0
    for shape in member_shapes.values():
        at += -at % alignment
        starts.append(at)
        at += prod(shape)
    end = at if alignment == 1 else at + -at % world_size
    return tuple(starts) if end == numel else None
