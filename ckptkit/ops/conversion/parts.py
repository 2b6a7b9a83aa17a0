"""Draft a checkpoint with all its parts, optimizer and all, and the files that lie beside them, in another form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ckptkit import edits
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.companions import find_companions
from ckptkit.checkpoints.fit import restore_tied
from ckptkit.checkpoints.parameters import rename_parameters
from ckptkit.checkpoints.part import Part
from ckptkit.checkpoints.trainers import say_opaque
from ckptkit.checkpoints.weights import LeftOut, find_weights, has_weights, summarise
from ckptkit.errors import Mismatch, Usage
from ckptkit.files.origin import Origin
from ckptkit.formats import get_format
from ckptkit.layout import Layout
from ckptkit.ops.conversion.destination import entry_at
from ckptkit.ops.conversion.draft import Conversion, Draft
from ckptkit.ops.conversion.options import ConvertOptions
from ckptkit.ops.conversion.other_files import files_beside, own_files
from ckptkit.ops.conversion.rank_state import drop_files_of_ranks, drop_state_of_ranks


def draft_parts(checkpoint: Checkpoint, output: Path, options: ConvertOptions) -> Conversion:
    """Draft all parts of a checkpoint, each to lie where it lies now, and the files beside them."""
    origin = Origin.of(checkpoint.path)
    parts = choose_parts(checkpoint, only_sharded=options.only_sharded)
    layouts = [part.layout for part in parts]
    world_size = options.world_size or max((layout.world_size or 1 for layout in layouts), default=1)
    options.edits.check_globs(layouts)
    notes: list[str] = []
    chosen = [choose(part, options, world_size, notes) for part in parts]
    kept = [(part, layout) for part, layout in zip(parts, chosen, strict=True) if layout.names or not part.layout.names]
    if not kept:
        raise Mismatch("nothing is left to be written", path=checkpoint.path, hint="check --include and --exclude")
    drafts = [draft_part(part, layout, options, world_size) for part, layout in kept]
    conversion = Conversion(
        origins=[origin],
        output=output,
        options=options,
        drafts=drafts,
        dropped=[left for part, layout in zip(parts, chosen, strict=True) for left in dropped_from(part, layout)],
        world_size=world_size if options.writer.is_sharded else None,
        notes=notes,
    )
    if conversion.is_file and len(drafts) > 1:
        names = ", ".join(draft.place for draft in drafts)
        hint = "name one of them, or a directory as destination"
        raise Usage(f"the checkpoint is of {len(drafts)} parts ({names}), the destination one file", hint=hint)
    if conversion.is_file or not checkpoint.path.is_dir():
        return conversion
    return with_other_files(conversion, checkpoint.path, layouts, world_size)


def choose_parts(checkpoint: Checkpoint, *, only_sharded: bool) -> list[Part]:
    """Return the parts of a checkpoint that are to be written anew."""
    sharded = [part for part in checkpoint.parts if get_format(part.layout.format).is_sharded]
    return sharded if only_sharded and sharded else list(checkpoint.parts)


def choose(part: Part, options: ConvertOptions, world_size: int, notes: list[str]) -> Layout:
    """Return what is to be written of a part, and add to `notes` what there is to say of it."""
    complete = restore_tied(part.layout, find_companions(part.path, None).config or {})
    chosen = edits.select(complete, options.edits.admit)
    opaque = say_opaque(chosen.tensors)
    notes += [opaque] if opaque else []
    notes += [f"`{name}` is tied, and was written too" for name in chosen.tensors.keys() - part.layout.tensors]
    if not options.writer.is_sharded:
        return chosen
    chosen, remarks = drop_state_of_ranks(chosen, world_size)
    notes += remarks
    return chosen


def dropped_from(part: Part, chosen: Layout) -> tuple[LeftOut, ...]:
    """Return what of a part is not to be written."""
    left = set(chosen.names)
    return summarise(part.layout, (), [name for name in part.layout.names if name not in left])


def draft_part(part: Part, chosen: Layout, options: ConvertOptions, world_size: int) -> Draft:
    """Draft a part as it shall be: cast, renamed and put under a key."""
    asked = options.edits
    weights = find_names(chosen) if asked.are_of_weights else frozenset()
    layout, casts = asked.cast(chosen, weights.__contains__)
    layout, renamed = rename_parameters(layout, weights, asked.renaming())
    nested = edits.nest(layout, (options.under,)) if options.under else layout
    casts = {renamed.get(name, name): change for name, change in casts.items()}
    return Draft.of([nested], options, world_size, place=part.place, renamed=renamed, cast=casts)


def find_names(layout: Layout) -> frozenset[str]:
    """Return the names of the model's weights. Raises `Unsupported` where it cannot be told which is the model."""
    return frozenset(find_weights(layout).came_from.values()) if has_weights(layout) else frozenset()


def with_other_files(conversion: Conversion, root: Path, layouts: Iterable[Layout], world_size: int) -> Conversion:
    """Return the conversion with the other files in directory `root` that go along, and words on those that do not."""
    taken = frozenset(file for layout in layouts for file in own_files(layout))
    result = entry_at(root, conversion.output)
    found, left = files_beside(root, taken | ({result} if result else set()))
    notes = [*conversion.notes, *(f"left out `{name}`: not a regular file" for name in left)]
    if conversion.options.writer.is_sharded:
        dropped, remarks = drop_files_of_ranks(found, world_size)
        notes += remarks
        found = {name: path for name, path in found.items() if name not in dropped}
    return replace(conversion, carried=found, notes=notes)
