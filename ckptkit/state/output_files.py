"""Create the files of a conversion, plan how to fill them, and finalize them when the data is complete."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.checkpoints.finalize_files import (
    checksummed_extents,
    create_files,
    file_checksums,
    read_output_layout,
    tensor_checksums,
    write_manifest,
)
from ckptkit.checkpoints.finalize_files import finalize_files as seal_files
from ckptkit.checkpoints.manifest import FileSum
from ckptkit.engine.check_sources import range_start_of
from ckptkit.engine.copy import Copied
from ckptkit.engine.shares import WHOLE, Share, narrow_to_share
from ckptkit.errors import Corrupt, Mismatch, Occupied
from ckptkit.formats import locate_all_chunks
from ckptkit.io.allocation import make_directory, write_new_file
from ckptkit.io.file import file_size
from ckptkit.layout import Chunk, Extent, FileOffset
from ckptkit.layout.box import Box
from ckptkit.layout.gc_pause import collector_paused
from ckptkit.layout.plan import Plan, identity_region, make_plan, restrict_to_needed
from ckptkit.state.draft import Conversion, Draft


@collector_paused()
def create_output_files(
    conversion: Conversion, directory: Path, share: Share = WHOLE, *, is_sparse: bool = False
) -> list[Plan]:
    """Create every file in directory `directory` with the content that is known, unless it exists.

    Returns the plans that fill the gaps, limited to the blocks of this share. If `is_sparse`, gaps occupy no disk
    space.
    """
    plans = []
    for draft in conversion.drafts:
        root = directory / draft.place
        create_files(root, draft.files, must_be_new=False, is_sparse=is_sparse)
        plans.append(plan_draft(draft, root, share))
    return plans


def plan_draft(draft: Draft, root: Path, share: Share = WHOLE) -> Plan:
    """Return the plan that fills the files of a draft in directory `root`: copies from the first source, and recipes.

    Tensors inside non-tensor entries are already written with these entries. For a shared plan, only the range of this
    share is planned.
    """
    wanted, sources = draft.wanted, draft.sources
    destination, before, behind = read_output_layout(draft.writer, root, wanted.tensors, wanted.blobs), 0, 0
    if share.count > 1:
        destination, before, behind = narrow_to_share(destination, wanted, share)
        # of each source only the section that this section of the output is computed from
        recipes = [(name, draft.recipes[name]) for name in destination.tensors if name in draft.recipes]
        computed = [(name, operand) for name, recipe in recipes for operand in recipe.operands]
        apart = [one for name, one in computed if one.name != name or one.region is not identity_region]
        sources = tuple(
            restrict_to_needed(layout, destination, {one.name for one in apart if one.source == number})
            for number, layout in enumerate(sources)
        )
    src, *others = map(locate_all_chunks, sources)
    planned = make_plan(src, locate_all_chunks(destination), others, draft.recipes)
    if draft.recipes:
        require_tied_in_sources(planned)
    return replace(planned, before=before, behind=behind) if share.count > 1 else planned


def require_tied_in_sources(plan: Plan) -> None:
    """Raise `Mismatch` if tensors that share bytes in the destination come from different bytes of a source."""
    made_of: dict[tuple[int, FileOffset], list[tuple[int, Box, Chunk]]] = {}
    for target in plan.targets:
        for number, source in enumerate(plan.sources):
            copies = [(copy.operand, copy.region, copy.src) for copy in target.copies if copy.source == number]
            if made_of.setdefault((number, range_start_of(target.chunk)), copies) != copies:
                message = f"the tensor is tied to another one in {plan.src.root}, but not here"
                hint = "pass --to hf, which writes each tensor"
                raise Mismatch(message, path=source.root, tensor=target.name, hint=hint)


def write_generated_files(conversion: Conversion, directory: Path) -> None:
    for name, content in conversion.made.items():
        make_directory((directory / name).parent)
        write_new_file(directory / name, content, must_be_new=False)


def finalize_output_files(
    conversion: Conversion, plans: Sequence[Plan], copied: Sequence[Copied], sums: Mapping[str, int] | None = None
) -> dict[str, FileSum]:
    """Finalize the files of each draft: write checksums, and a manifest unless the output is one file.

    `sums` are CRC-32 values of files that need not be read again. Returns size and CRC-32 of each file, by its path in
    the output.
    """
    file_sums: dict[str, FileSum] = {}
    for draft, plan, done in zip(conversion.drafts, plans, copied, strict=True):
        for tensor, written in tensor_checksums(plan.dst, done.checksums).items() if draft.sums else ():
            if (expected := draft.sums.get(tensor, written)) != written:
                raise Corrupt(f"expected CRC-32 {expected:08x} in the output, found {written:08x}", tensor=tensor)
        seal_files(draft.writer, plan.dst, done.checksums)
        own = [file.name for file in draft.files]
        if conversion.is_file:  # a single file has no directory for a manifest
            return file_checksums(plan.dst.root, own, checksummed_extents(plan.dst, done.checksums))
        beside = (path.name for path in map(Path, conversion.file_sizes) if path.parent == Path(draft.place))
        names = {*beside, *own}
        known = [
            Extent(name, 0, file_size(plan.dst.root / name), crc, "")
            for name in names
            if (crc := (sums or {}).get(str(Path(draft.place, name)))) is not None
        ]
        manifest = write_manifest(
            plan.dst, done.checksums, names, must_be_new=False, entries=known, source=draft.made_of
        )
        file_sums |= {str(Path(draft.place, name)): file_sum for name, file_sum in manifest.files.items()}
    return file_sums


def require_all_shares_done(conversion: Conversion, done: Collection[int], share_count: int) -> None:
    """Raise `Occupied` if some of `share_count` shares are unfinished."""
    missing = [number for number in range(share_count) if number not in done]
    if missing:
        parts = ", ".join(f"{number + 1}/{share_count}" for number in missing[:8])
        hint = "run these parts, or run them again: they continue where they stopped"
        raise Occupied(
            f"{len(missing)} of {share_count} parts are not done: {parts}", path=conversion.output, hint=hint
        )
