"""Rewrites: a checkpoint with all its parts, optimizer and all, in another form. What `convert` and `reshard` share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit import edits
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.companions import find_companions
from ckptkit.checkpoints.fit import restore_tied
from ckptkit.checkpoints.parameters import rename_parameters
from ckptkit.checkpoints.weights import LeftOut, find_weights, has_weights, summarise
from ckptkit.errors import Mismatch, Usage
from ckptkit.files.origin import Origin
from ckptkit.files.staging import check_destination
from ckptkit.formats import Writer, get_format
from ckptkit.layout import KeyPath, Layout, Options
from ckptkit.ops.conversion.carried import files_beside, own_files
from ckptkit.ops.conversion.drafts import Draft, Drafts, make_draft
from ckptkit.ops.conversion.key import Recipe
from ckptkit.ops.conversion.output import Output
from ckptkit.ops.conversion.pipeline import check_apart
from ckptkit.ops.conversion.rank_state import drop_files_of_ranks, drop_state_of_ranks
from ckptkit.ops.conversion.result import Converted, carry_out
from ckptkit.ops.selection import Edits


@dataclass(frozen=True, slots=True)
class Request:
    """What a checkpoint is to become: of which format, for how many ranks (None: as many as it had), with which edits.

    `under` is a way into the nested dict that everything is put under. With `only_sharded`, parts that are the same for
    any number of ranks stay as they are, if the checkpoint has others.
    """

    writer: Writer
    edits: Edits
    max_shard_size: int
    world_size: int | None = None
    under: KeyPath = ()
    only_sharded: bool = False


@dataclass(slots=True)
class Changes:
    """What was made of the parts, and became of their names and dtypes."""

    tensors: int = 0
    nbytes: int = 0
    renamed: dict[str, str] = field(default_factory=dict)
    dropped: list[LeftOut] = field(default_factory=list)
    cast: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def rewrite(checkpoint: Checkpoint, request: Request, output: Output, recipe: Recipe, *, dry_run: bool) -> Converted:
    """Write a checkpoint as `request` says: all of its parts, or nothing."""
    began = time.perf_counter()
    check_destination(output.path, output.overwrite, is_file=output.is_file)
    source = checkpoint.path
    origin = Origin.of(source)
    check_apart(source, output.path)
    parts = open_parts(checkpoint, request)
    world_size = request.world_size or max((layout.world_size or 1 for layout in parts.values()), default=1)
    options = Options(request.max_shard_size, world_size)
    request.edits.check_globs(list(parts.values()))
    changes = Changes()
    edited = {path: edit(with_tied(path, layout, changes), request, options, changes) for path, layout in parts.items()}
    drafts = [draft(source, path, layout, request, options) for path, layout in edited.items() if layout.names]
    if not drafts:
        raise Mismatch("nothing is left to be written", path=source, hint="check --include and --exclude")
    if output.is_file and len(drafts) > 1:
        names = ", ".join(draft.place for draft in drafts)
        hint = "name one of them, or a directory as destination"
        raise Usage(f"the checkpoint is of {len(drafts)} parts ({names}), the destination one file", hint=hint)
    has_more = source.is_dir() and not output.is_file
    whole = Drafts(origin, drafts, copied=carry(source, parts, request, options, changes) if has_more else {})
    report = Converted(
        source=source,
        output=output.path,
        format=request.writer.name,
        files={output.path.name: sum(whole.file_sizes.values())} if output.is_file else whole.file_sizes,
        tensors=changes.tensors,
        nbytes=changes.nbytes,
        renamed=changes.renamed,
        dropped=changes.dropped,
        cast=changes.cast,
        notes=changes.notes,
        world_size=world_size if request.world_size or request.writer.is_sharded else None,
        dry_run=dry_run,
    )
    return carry_out(whole, output, recipe, report, began)


def open_parts(checkpoint: Checkpoint, request: Request) -> dict[Path, Layout]:
    """Return the layout of each part of the checkpoint that is to be rewritten."""
    parts = {part.path: part.layout for part in checkpoint.parts}
    sharded = {path: layout for path, layout in parts.items() if get_format(layout.format).is_sharded}
    return sharded if request.only_sharded and sharded else parts


def with_tied(path: Path, layout: Layout, changes: Changes) -> Layout:
    """A part with the weight that a Hugging Face model leaves out since another holds it: training states have both."""
    complete = restore_tied(layout, find_companions(path, None).config or {})
    changes.notes += [f"`{name}` is tied, and was written too" for name in complete.tensors.keys() - layout.tensors]
    return complete


def edit(layout: Layout, request: Request, options: Options, changes: Changes) -> Layout:
    """A part as it shall be; `changes` is told what that takes."""
    chosen = edits.select(layout, request.edits.admit)
    if request.writer.is_sharded:
        chosen, notes = drop_state_of_ranks(chosen, options.world_size)
        changes.notes += notes
    left = set(chosen.names)
    changes.dropped += summarise(layout, (), [name for name in layout.names if name not in left])
    weights = find_names(chosen) if request.edits.are_of_weights else frozenset()
    chosen, casts = request.edits.cast(chosen, weights.__contains__)
    chosen, renamed = rename_parameters(chosen, weights, request.edits.renaming())
    changes.cast |= {renamed.get(name, name): change for name, change in casts.items()}
    changes.renamed |= renamed
    changes.tensors += len(chosen.tensors)
    changes.nbytes += chosen.nbytes
    return edits.nest(chosen, request.under) if request.under else chosen


def find_names(layout: Layout) -> frozenset[str]:
    """The names of the model's weights. Raises `Unsupported` where it cannot be told which of several is the model."""
    return frozenset(find_weights(layout).came_from.values()) if has_weights(layout) else frozenset()


def draft(source: Path, path: Path, layout: Layout, request: Request, options: Options) -> Draft:
    """The draft of a part, to lie where it lies in the source."""
    place = "" if path == source else str(path.relative_to(source))
    return make_draft(layout, request.writer, options, place)


def carry(
    source: Path, parts: Mapping[Path, Layout], request: Request, options: Options, changes: Changes
) -> dict[str, Path]:
    """The other files of the checkpoint directory that go with it; `changes` is told of those that do not."""
    taken = frozenset(file for layout in parts.values() for file in own_files(layout))
    found, left = files_beside(source, taken)
    changes.notes += [f"left out `{name}`: not a regular file" for name in left]
    if request.writer.is_sharded:
        dropped, notes = drop_files_of_ranks(found, options.world_size)
        changes.notes += notes
        found = {name: path for name, path in found.items() if name not in dropped}
    return found
