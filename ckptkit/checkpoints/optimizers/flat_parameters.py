"""Cut flat parameters into the original ones, by names and shapes from an optimizer or a config.json.

Source: torch/distributed/fsdp/_flat_param.py. FSDP1's local state has one flat tensor for each wrapped module, and no
file says what is in it: its name says which module, whose parameters follow one another in the order of the model's
own. The optimizer beside it names them in that order, and its moments have their shapes; or the model's config.json
tells both, for a model type that is known here, or one that transformers builds. Sizes have to fit in either case.

Flat tensors of `use_orig_params=True` have each parameter begin at a multiple of 16 bytes, and are as long as all ranks
have them with equal parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ckptkit.checkpoints.optimizers.keys import find_optimizers
from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats import detect_format, locate
from ckptkit.io.file import folders
from ckptkit.layout import KeyPath, Layout, StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.layout.flat import FlatPiece, cut_out
from ckptkit.layout.wrappers import is_flat_name
from ckptkit.models.companions import find_companions, find_config
from ckptkit.trainers import is_other_part

_ALIGNMENTS = (1, 4, 8, 16)  # elements: none, and 16 bytes of each size of number
_HINT = "put the optimizer's directory beside it, such as `optimizer_0`, or config.json; or name one with --base"


@dataclass(frozen=True, slots=True)
class Known:
    """The shapes of a model's parameters by name, in order, and in words who says so."""

    shapes: Mapping[str, Shape]
    said_by: str


def unflatten_parameters(layout: Layout, path: Path, base: str | None = None) -> Layout:
    """Return the layout of what lies at `path` with its flat parameters cut into those that they are made of.

    Raises `Unsupported` if neither an optimizer nor a config.json, beside them or in `base`, tells what these are,
    `Corrupt` if that is one of another model.
    """
    flat = {name: key for name in layout.tensors if is_flat(key := layout.key(name))}
    known = find_shapes(layout, path, base)
    if known is None:
        message = "this is a flat parameter, and no file gives the names and shapes of its parts"
        raise Unsupported(message, path=path, tensor=next(iter(flat)), hint=_HINT)
    tensors = {name: tensor for name, tensor in layout.tensors.items() if name not in flat}
    keys = {name: key for name, key in layout.keys.items() if name not in flat}
    located = locate(layout)
    for name, key in flat.items():
        own = replace(known, shapes=members(key, known.shapes, list(flat.values())))
        for parameter, piece in cut(located.tensors[name], own, name, layout):
            new = (*key[:-1], parameter)
            tensors[".".join(map(str, new))] = piece
            keys[".".join(map(str, new))] = new
    lacking = known.shapes.keys() - {str(key[-1]) for key in keys.values()}
    if lacking:
        message = (
            f"{known.said_by} lists the parameter, but no flat parameter belongs to a module that could contain it"
        )
        raise Corrupt(message, path=path, tensor=min(lacking))
    return replace(layout, tensors=tensors, keys=keys)


def find_shapes(layout: Layout, path: Path, base: str | None) -> Known | None:
    """Return the parameters of the model at `path`, None where nothing tells them.

    Raises `Unsupported` for a config.json of a model that is not known.
    """
    shapes = next((found for found in map(shapes_in, optimizers(layout, path)) if found), None)
    if shapes is not None:
        return Known(shapes, "the optimizer")
    config = find_companions(path, base).config if base is not None else find_config(path)
    if config is None:
        return None
    from ckptkit.models.expected import expected  # hardly ever needed, and slow to import

    try:
        return Known(dict(expected(config).parameters), "config.json")
    except CkptError as error:
        raise error.blame(path=path) from None


def is_flat(key: KeyPath) -> bool:
    return is_flat_name(str(key[-1]))


def optimizers(layout: Layout, path: Path) -> Iterator[Layout]:
    """Yield where names and shapes may be: the checkpoint itself, and what lies in an optimizer's directory in it."""
    yield layout
    for folder in sorted(folders(path)) if path.is_dir() else []:
        reader = detect_format(folder) if is_other_part(folder.name) else None
        if reader is not None:
            yield reader.read(folder)


def shapes_in(layout: Layout) -> dict[str, Shape] | None:
    """Return the shapes of an optimizer's parameters by name, in order; None where it has no names, or several groups.

    The order of parameters that are in different groups is not known.
    """
    moments: dict[str, Shape] = {}
    for name, tensor in layout.tensors.items():
        key = layout.key(name)
        if len(key) > 2 and key[-3] == "state" and isinstance(key[-2], str) and tensor.spec.shape:
            moments.setdefault(key[-2], tensor.spec.shape)
    groups = [group for optimizer in find_optimizers(layout) for group in optimizer.groups] if moments else []
    if len(groups) != 1 or not set(groups[0]) <= moments.keys():
        return None
    return {name: moments[name] for name in groups[0]}


def members(key: KeyPath, shapes: Mapping[str, Shape], flat: Sequence[KeyPath]) -> dict[str, Shape]:
    """Return the parameters in the flat one at a key path: those of its module, but for the modules wrapped in that."""
    prefixes = sorted((prefix_of(other) for other in flat), key=len, reverse=True)
    own = prefix_of(key)
    return {
        name: shape for name, shape in shapes.items() if next(p for p in (*prefixes, "") if name.startswith(p)) == own
    }


def prefix_of(key: KeyPath) -> str:
    above, dot, _ = str(key[-1]).rpartition(".")
    return above + dot


def cut(flat: StoredTensor, known: Known, name: str, layout: Layout) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the members of a flat parameter. Raises `Corrupt` unless they fill it, `Unsupported` if in two ways."""
    world = layout.world_size or 1
    members = known.shapes
    starts = {tuple(found): found for a in _ALIGNMENTS if (found := starts_of(members, flat.spec.numel, a, world))}
    if len(starts) > 1:
        message = (
            f"{known.said_by} has {len(members)} parameters for this flat parameter, which fit in {len(starts)} ways"
        )
        raise Unsupported(message, path=layout.path, tensor=name)
    if not starts:
        total = sum(map(prod, members.values()))
        message = f"expected {total} numbers in {len(members)} parameters ({known.said_by}), found {flat.spec.numel}"
        raise Corrupt(message, path=layout.path, tensor=name, hint=f"check that {known.said_by} belongs to this model")
    pieces = [FlatPiece(chunk.start[0], chunk.box.stop[0], chunk) for chunk in flat.chunks]
    for (parameter, shape), start in zip(members.items(), *starts.values(), strict=True):
        yield parameter, StoredTensor(replace(flat.spec, shape=shape), tuple(cut_out(pieces, start, shape)))


def starts_of(members: Mapping[str, Shape], numel: int, alignment: int, world: int) -> list[int] | None:
    """Return where each member begins, all at multiples of `alignment`; None if they do not fill the tensor."""
    found, at = [], 0
    for shape in members.values():
        at += -at % alignment
        found.append(at)
        at += prod(shape)
    end = at if alignment == 1 else at + -at % world
    return found if end == numel else None
