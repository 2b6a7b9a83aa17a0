"""Refuse a file that is one of several as a model: a rank's file has a part of each tensor, or some of the tensors.

Its name says so (`rank0-of-2`, `sdp_00` beside `sdp_01`, also of the directories above it), or its content does.
"""

from __future__ import annotations

from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component
from ckptkit.errors import Corrupt, IOFailure, Unsafe, Unsupported, and_more
from ckptkit.io.file import names_in
from ckptkit.io.joined import JoinedPath
from ckptkit.io.sets import JOIN, find_set, is_numbered

_SHARDS = "shard_metadata"  # of torch_xla's and fairscale's FSDP, beside the flat shards of a rank
_WORLDS = ((_SHARDS, "world_size"), ("mp_world_size",))
_NAMED = 4  # files in a message


def require_whole(checkpoint: Checkpoint) -> None:
    """Raise `Unsupported` for one of several files, each of which has a part of the model."""
    if problem := find_parts(checkpoint):
        raise problem


def find_parts(checkpoint: Checkpoint) -> Unsupported | None:
    """Return the error for a checkpoint that is one of several files of a model, None for any other."""
    component = checkpoint.model_component
    if component.reader.is_sharded or isinstance(checkpoint.path, JoinedPath):
        return None  # its format joins the files
    try:
        layout = component.layout
    except (Corrupt, IOFailure, Unsafe, Unsupported):
        return None  # whoever reads it says so, or salvages it
    if layout.descriptions or layout.world_size is not None:
        return None  # an index, or the names that the format gives, say what belongs to it
    file = layout.root / next(iter(layout.files)) if len(layout.files) == 1 else layout.root
    worlds = [found for key in _WORLDS if isinstance(found := checkpoint.value(key), int)]
    if any(world > 1 for world in worlds) or (not worlds and has_shards(checkpoint)):
        ranks = f"{max(worlds)} ranks" if worlds else "several ranks"
        return one_of_several(checkpoint, file, f"this is the file of one of {ranks}", JOIN)
    found = set_of(file)
    is_joined = len(found) > 1 and checkpoint.path.is_dir() and all(map(component.reader.owns, found))
    if found and not is_joined:
        names = f"{', '.join(found[:_NAMED])}{and_more(len(found) - _NAMED)}"
        which = f"one of {len(found)}" if len(found) > 1 else "one of several"
        hint = f"{JOIN}; if this one has all of the model, rename a copy of it"
        return one_of_several(checkpoint, file, f"this is {which}: {names}", hint)
    return None


def has_shards(checkpoint: Checkpoint) -> bool:
    layout = checkpoint.model_component.layout
    return any(layout.key(name)[0] == _SHARDS for name in layout.names)


def set_of(file: Path) -> list[str]:
    """Return the files or directories of which a file is one, by its name or those of the directories above it."""
    for place in (file, *file.absolute().parents):
        if place != file and not is_numbered(place.name):
            break
        if found := find_set(place.name, names_in(place.parent)):
            return found
    return []


def joins_all(component: Component, names: list[str]) -> bool:
    """Return whether its format joins the files of a directory."""
    return component.reader.is_sharded or (component.reader.owns(names[0]) and not component.problem)


def one_of_several(checkpoint: Checkpoint, file: Path, what: str, hint: str) -> Unsupported:
    """Return the error for one of several files, with the directory that has all if ckptkit joins them."""
    folder = file.parent
    above = Checkpoint.at(folder) if checkpoint.path != folder else None
    if above and any(joins_all(part, names_in(folder)) for part in above.components):
        hint = f"pass the directory {folder}"
    return Unsupported(f"{what}; each has a part of the model", path=file, hint=hint)
