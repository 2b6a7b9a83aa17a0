"""Make the files of a conversion: with room for the data, what fills that, and what has to wait for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.manifest import Manifest
from ckptkit.checkpoints.sums import sum_files
from ckptkit.collector import collector_paused
from ckptkit.conversion.draft import Conversion, Draft
from ckptkit.destinations.allocation import create_file, write_parts
from ckptkit.engine.copy import Copied
from ckptkit.engine.shares import WHOLE, Share, narrow
from ckptkit.engine.sources import place_of
from ckptkit.errors import Mismatch, translate_os_errors
from ckptkit.files.file import opening, read_at
from ckptkit.files.system import again
from ckptkit.formats import locate
from ckptkit.layout import Chunk, Extent, FileOffset, Layout, edits
from ckptkit.layout.plan import Plan, Recipe, Target, make_plan, needed, same
from ckptkit.tensors.box import Box

_PART = 1 << 22  # bytes held of a file that is copied as it is


@collector_paused()
def create(conversion: Conversion, room: Path, share: Share = WHOLE) -> list[Plan]:
    """Make every file in directory `room` with what is known of it, unless it is there.

    Returns what fills the holes, or the part of that which has the share in it.
    """
    plans = []
    for draft in conversion.drafts:
        root = room / draft.place
        make_folder(root)
        for file in draft.files:
            make_folder((root / file.name).parent)
            create_file(root / file.name, file.nbytes, file.parts, anew=False)
        plans.append(plan(draft, root, share))
    return plans


def make_folder(path: Path) -> None:
    """Make a directory, and those that it lies in, unless they are there."""
    with translate_os_errors(path):
        again(path.mkdir, parents=True, exist_ok=True)


def plan(draft: Draft, root: Path, share: Share = WHOLE) -> Plan:
    """Return what fills the files of a draft in directory `root`: the first source, or what recipes make of several.

    What lies inside an entry that is no tensor has been written with it. Of a plan that is shared only the part with
    the share in it is made.
    """
    wanted = draft.wanted
    made = edits.select(draft.writer.read(root), set(wanted.names).__contains__)
    lost = wanted.tensors.keys() - made.tensors.keys()
    if lost:
        raise Mismatch(f"{draft.writer.name} would lose {len(lost)} tensors", path=wanted.root, tensor=min(lost))
    if share.count == 1:
        return join(draft.sources, made, draft.recipes)
    made, before, behind = narrow(made, wanted, share)
    planned = join(needed_by(draft, made), made, draft.recipes)
    return replace(planned, before=before, behind=behind)


def needed_by(draft: Draft, made: Layout) -> list[Layout]:
    """Return the part of each source of a draft that `made`, a part of the destination, is made of."""
    cooked = [(name, one) for name in made.tensors if name in draft.recipes for one in draft.recipes[name].operands]
    apart = [one for name, one in cooked if one.name != name or one.region is not same]
    return [
        needed(layout, made, {one.name for one in apart if one.source == number})
        for number, layout in enumerate(draft.sources)
    ]


def join(sources: Sequence[Layout], made: Layout, recipes: Mapping[str, Recipe]) -> Plan:
    """Return what fills a layout from one source, or by recipes from several. Finds every byte."""
    src, *others = map(locate, sources)
    planned = make_plan(src, locate(made), others, recipes)
    if recipes:
        check_ties(planned)
    return planned


def check_ties(plan: Plan) -> None:
    """Raise `Mismatch` if tensors that share their bytes in the destination are made of others in a source."""
    made_of: dict[tuple[int, FileOffset], list[tuple[int, Box, Chunk]]] = {}
    for target in plan.targets:
        for number, source in enumerate(plan.sources):
            found = [(copy.operand, copy.region, copy.src) for copy in target.copies if copy.source == number]
            if made_of.setdefault((number, place_of(target.chunk)), found) != found:
                message = f"it is tied to another tensor in {plan.src.root}, but not here"
                hint = "`--to hf` writes each by itself"
                raise Mismatch(message, path=source.root, tensor=target.name, hint=hint)


def seal(conversion: Conversion, plans: Sequence[Plan], copied: Sequence[Copied], room: Path) -> None:
    """Write what had to wait for the data: other files, checksums, and a manifest beside the files of each draft."""
    for name, content in conversion.made.items():
        make_folder((room / name).parent)
        create_file(room / name, len(content), [(0, content)], anew=False)
    for name, path in conversion.carried.items():
        copy_file(path, room / name)
    for draft, plan, done in zip(conversion.drafts, plans, copied, strict=True):
        write_parts(plan.dst.root, draft.writer.seal(plan.dst, done.checksums))
        draft.writer.check(plan.dst)
        if not conversion.is_file:
            names = {*conversion.names_in(draft.place), *(file.name for file in draft.files)}
            write_manifest(draft, plan, done, names)


def copy_file(src: Path, dst: Path) -> None:
    """Copy a regular file as it is."""
    make_folder(dst.parent)
    with opening(src) as file:
        size = file.size
        parts = ((start, read_at(file, min(_PART, size - start), start)) for start in range(0, size, _PART))
        create_file(dst, size, parts, anew=False)


def write_manifest(draft: Draft, plan: Plan, copied: Copied, names: Iterable[str]) -> None:
    """Write the manifest of a part of the output, by the bytes that were seen while they were written."""
    root = plan.dst.root
    extents = [extent_of(target, copied) for target in plan.targets]
    whole = {name: t.chunks[0] for name, t in plan.dst.tensors.items() if len(t.chunks) == 1}
    sums = {name: copied.checksums[place_of(chunk)] if chunk.box.numel else 0 for name, chunk in whole.items()}
    content = Manifest(sum_files(root, names, extents), sums, draft.made_of).to_bytes()
    create_file(root / MANIFEST, len(content), [(0, content)], anew=False)


def extent_of(target: Target, copied: Copied) -> Extent:
    chunk = target.chunk
    return Extent(chunk.path, *chunk.bytes, copied.checksums[place_of(chunk)], target.name)
