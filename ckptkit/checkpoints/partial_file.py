"""Recognize a file that is one of several: a rank's file has a shard of each tensor, or some of the tensors.

The proof is in its name (`rank0-of-2`, `sdp_00` beside `sdp_01`, or a directory above it), in its content, or in the
files beside it. The name `rank0.pt` proves nothing, because rank 0 often saves the full model: such a file is used with
a warning, unless a config.json confirms its shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Corrupt, IOFailure, NotACheckpoint, Unsafe, Unsupported, names_and_more
from ckptkit.formats.rank_names import (
    JOIN,
    has_number,
    has_rank_number,
    has_shard_or_part_number,
    may_have_rank_or_part_number,
    names_counting_from_zero,
    names_differing_in_rank,
)
from ckptkit.io.file import names_in
from ckptkit.io.joined_path import JoinedPath
from ckptkit.layout import Layout
from ckptkit.layout.box import Shape
from ckptkit.layout.wrappers import may_be_adapter
from ckptkit.trainers import ONE_FILE, find_step_of_path, name_without_suffixes

_SHARDS_KEY = "shard_metadata"  # key that FSDP of torch_xla and fairscale saves beside a rank's flat shards
_WORLD_SIZE_KEYS = ((_SHARDS_KEY, "world_size"), ("mp_world_size",))
_NAMES_SHOWN = 4  # files in a message
# `model_0`, as torch_checkpointing names rank 0's file for the item `model`, and `pytorch_model_0`; in
# `pytorch_model_fsdp_0` the number counts models
_RANK_0 = re.compile(r"(?:.*[-_.])?(?:model|weights?|params|parameters|state|state_dict)[-_.]0+")


def find_partial_file_error(checkpoint: Checkpoint) -> Unsupported | None:
    """Return the error for a checkpoint that is one of several files of a model; None for any other checkpoint."""
    layout = find_readable_layout(checkpoint)
    if layout is None:
        return None  # the reader reports the error, or salvage handles it
    component = checkpoint.model_component
    if component.reader.is_sharded or isinstance(checkpoint.path, JoinedPath):
        return None  # its format joins the files
    if layout.descriptions or layout.world_size is not None:
        return None  # an index lists its files, or the format names them
    file = layout.root / next(iter(layout.files)) if len(layout.files) == 1 else layout.root
    worlds = [world for key in _WORLD_SIZE_KEYS if isinstance(world := checkpoint.read_plain_value(key), int)]
    has_shards = any(layout.key(name)[0] == _SHARDS_KEY for name in layout.names)
    if any(world > 1 for world in worlds) or (not worlds and has_shards):
        ranks = f"{max(worlds)} ranks" if worlds else "several ranks"
        return partial_file_error(checkpoint, file, f"this is the file of one of {ranks}", JOIN)
    siblings = rank_file_set_of(file) or sibling_files_of_model(checkpoint, file)
    if not siblings and file.suffix in ONE_FILE and has_shard_or_part_number(file.name):
        siblings = [file.name]
    is_joined = len(siblings) > 1 and checkpoint.path.is_dir() and all(map(component.reader.owns_file, siblings))
    if siblings and not is_joined:
        which = f"one of {len(siblings)}" if len(siblings) > 1 else "one of several"
        hint = f"{JOIN}; if this file has the full model, copy it under a name without a number"
        return partial_file_error(checkpoint, file, f"this is {which}: {names_and_more(siblings, _NAMES_SHOWN)}", hint)
    return None


def sibling_files_of_model(checkpoint: Checkpoint, file: Path) -> list[str]:
    """Return the files that together with this file are one model, by their contents; [] if nothing shows it.

    Their names count from 0. This file and the first or the last each have tensors that the other lacks, or all shapes
    that differ do so along one axis only.
    """
    series = numbered_series_of(file)
    if not series or has_number(file.name, len(series)):
        return series
    own = checkpoint.model_component.layout.shapes
    for name in (series[0], series[-1]):
        shapes = shapes_if_readable(Checkpoint.at(file.parent / name)) if name != file.name else {}
        if shapes and own.keys() - shapes.keys() and shapes.keys() - own.keys():
            return series
        pairs = [(own[common], shapes[common]) for common in own.keys() & shapes.keys()]
        differing = [(one, two) for one, two in pairs if one != two]
        if differing and all(
            len(one) == len(two) and sum(a != b for a, b in zip(one, two, strict=True)) == 1 for one, two in differing
        ):
            return series
    return []


def numbered_series_of(file: Path) -> list[str]:
    """Return the files with the same name but another number, counted from 0; [] if the numbers are steps or epochs."""
    is_step = find_step_of_path(Path(name_without_suffixes(file.name))) is not None
    return [] if is_step or file.suffix not in ONE_FILE else names_counting_from_zero(file.name, names_in(file.parent))


def find_readable_layout(checkpoint: Checkpoint) -> Layout | None:
    """Return the layout of a checkpoint's model; None if it cannot be read."""
    try:
        return checkpoint.model_component.layout
    except (Corrupt, IOFailure, NotACheckpoint, Unsafe, Unsupported):
        return None


def shapes_if_readable(checkpoint: Checkpoint) -> Mapping[str, Shape]:
    """Return the shapes of a checkpoint's tensors; {} if they cannot be read."""
    layout = find_readable_layout(checkpoint)
    return layout.shapes if layout else {}


def why_maybe_partial_file(checkpoint: Checkpoint) -> str | None:
    """Return why a file that `find_partial_file_error` accepts may be one of several; None for any other checkpoint."""
    layout = find_readable_layout(checkpoint)
    if layout is None or len(layout.files) != 1:
        return None
    reader = checkpoint.model_component.reader
    if reader.is_sharded and layout.world_size is not None:
        return None  # the format knows all ranks
    file = layout.root / next(iter(layout.files))
    if (
        file.suffix not in ONE_FILE
        or find_step_of_path(Path(name_without_suffixes(file.name))) is not None
        or may_be_adapter(layout.tensors)
    ):
        return None
    series = numbered_series_of(file)
    is_first = not series and _RANK_0.fullmatch(name_without_suffixes(file.name)) is not None
    if may_have_rank_or_part_number(file.name) or is_first or reader.rank_of(file.name) is not None:
        why = "the file name contains a rank number"
    elif series and all(has_same_tensors_and_step(checkpoint, file.parent / name) for name in (series[0], series[-1])):
        why = f"{names_and_more(series, _NAMES_SHOWN)} have the same tensors and shapes"
    else:
        return None
    return f"{why}, and nothing shows whether this file has the full model or only a part"


def has_same_tensors_and_step(checkpoint: Checkpoint, path: Path) -> bool:
    """Return whether another file has the same tensor names and shapes, and no recorded step that differs."""
    other = Checkpoint.at(path)
    if shapes_if_readable(other) != checkpoint.model_component.layout.shapes:
        return False
    return None in (steps := (checkpoint.recorded_step, other.recorded_step)) or len(set(steps)) == 1


def rank_file_set_of(file: Path) -> list[str]:
    """Return the set of rank files or directories that a file belongs to, by its name or the directories above it."""
    for path in (file, *file.absolute().parents):
        if path != file and not has_rank_number(path.name):
            break
        if names := names_differing_in_rank(path.name, names_in(path.parent)):
            return names
    return []


def partial_file_error(checkpoint: Checkpoint, file: Path, message: str, hint: str) -> Unsupported:
    """Return the error for one of several files. The hint names the directory if ckptkit can join it."""
    folder = file.parent
    for part in Checkpoint.at(folder).components if checkpoint.path != folder else ():
        if part.reader.is_sharded or (part.reader.owns_file(names_in(folder)[0]) and not part.problem):
            hint = f"pass the directory {folder}"
    return Unsupported(f"{message}; each has a part of the model", path=file, hint=hint)
