"""Read and write DCP directories: `.metadata` and `.distcp` files, as torch.distributed.checkpoint writes them.

Source: torch/distributed/checkpoint/{filesystem,metadata,default_planner}.py. `.metadata` is a pickle that maps each
chunk of a tensor to a byte range of a file; each range is one archive of torch.save. Shapes and offsets come from the
metadata alone. The name of a file only says which rank wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from math import prod
from operator import add
from pathlib import Path

from ckptkit.errors import (
    ELSEWHERE,
    SALVAGE,
    CkptError,
    Corrupt,
    Incomplete,
    Report,
    and_more,
    raise_problem,
    truncated_error,
)
from ckptkit.formats.archives.locate import head_and_tail_ranges, locate_in_archives
from ckptkit.formats.archives.zip_entries import (
    CONTENT_LIMIT,
    read_central_directory,
    read_entry_content,
    with_cached_ends,
)
from ckptkit.formats.dcp.read_metadata import (
    METADATA,
    Reading,
    entries_file_name,
    find_rank_in_file_name,
    is_metadata,
    metadata_files_by_rank,
    read_metadata,
)
from ckptkit.formats.pickles.inert_pickle import Global
from ckptkit.formats.protocols import FormatWriter
from ckptkit.io.file import OpenFiles, ReadAhead, file_size, names_in
from ckptkit.io.remote_file import iterate_with_prefetch
from ckptkit.layout import (
    Chunk,
    DTypeKey,
    Extent,
    FileOffset,
    Layout,
    NewFile,
    NumberKey,
    Patch,
    Spec,
    StoredTensor,
    TuplePlace,
    WriterOptions,
    check_chunks_tile,
)
from ckptkit.layout.axes import chunks_of_flat_range
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.edits import select_entries
from ckptkit.layout.gc_pause import collector_paused

GROUPS = "param_groups"  # the key beside `state` in an optimizer's state dict


class Dcp(FormatWriter):
    """The format of DCP directories: read with one `.metadata` or one per rank, written with one."""

    name = "dcp"
    known_by = "DCP's `.metadata`"
    is_sharded = True

    def owns_file(self, name: str) -> bool:
        return is_metadata(name) or find_rank_in_file_name(name) is not None

    def remarks_on_changes(self, wanted: Layout) -> Iterator[str]:
        """Yield a sentence for each type of key that DCP cannot keep: it has string keys and list positions only."""
        ways = {name: wanted.key(name) for name in wanted.names}
        optimizers = {(*way[: way.index(GROUPS)], "state") for way in ways.values() if GROUPS in way}
        # the keys of optimizer states become integers again on every read
        numbers = [
            name
            for name, way in ways.items()
            if any(isinstance(step, NumberKey | DTypeKey) and way[:i] not in optimizers for i, step in enumerate(way))
        ]
        if numbers:
            what = "keys that are integers or dtypes become text in DCP, as torch writes them"
            yield f"{what}: `{numbers[0]}`{and_more(len(numbers) - 1)}"
        tuples = [name for name, way in ways.items() if any(isinstance(step, TuplePlace) for step in way)]
        if tuples:
            yield f"tuples with tensors become lists in DCP: `{tuples[0]}`{and_more(len(tuples) - 1)}"

    def rank_of(self, name: str) -> int | None:
        return find_rank_in_file_name(name)

    def detect(self, path: Path) -> bool:
        """Return True for a directory with DCP files, whether or not the save finished."""
        return path.is_dir() and any(map(self.owns_file, names_in(path)))

    def check_files_complete(self, path: Path, report: Report) -> None:  # noqa: ARG002 - there is only one thing to miss
        """Raise `Incomplete` unless the metadata is there, which DCP writes last."""
        metadata_files_by_rank(path)

    def metadata_nbytes(self, path: Path) -> int:
        """Return the size of the metadata, the only part that is parsed."""
        return sum(map(file_size, metadata_files_by_rank(path).values()))

    def read(self, path: Path, report: Report = raise_problem) -> Layout:
        """Return the layout of the checkpoint in directory `path`. Its chunks are not located yet."""
        with collector_paused():
            return checked_against_files(self.read_without_file_check(path, report), report)

    def read_by_other_metadata(self, path: Path, other: Path, report: Report = raise_problem) -> Layout | None:
        """Return the layout by another checkpoint's metadata if all entries match; None if `path` has its own."""
        if any(map(is_metadata, names_in(path))):
            return None
        from ckptkit.formats.dcp.unfinished_save import require_matching_items  # only salvaging needs it

        with collector_paused():
            plan = self.read_without_file_check(other)
            require_matching_items(path, plan)
            return checked_against_files(replace(plan, root=path, descriptions=()), report)

    def read_without_file_check(self, path: Path, report: Report = raise_problem) -> Layout:
        """Return the layout as the metadata describes it. If there are several, reports each that is unreadable."""
        described_by = metadata_files_by_rank(path)
        if len(described_by) > 1:
            from ckptkit.formats.dcp.by_rank import join_metadata_of_ranks  # rare

            gathered = join_metadata_of_ranks(path, described_by, report)
        else:
            gathered = Reading(path, report)
            for file in described_by.values():
                gathered.add_metadata(read_metadata(file), file)
        return replace(gathered.to_layout(self.name), descriptions=tuple(file.name for file in described_by.values()))

    def least_torch_version(self, path: Path) -> str | None:
        """Return the torch version that introduced this checkpoint's description of tensors; None for the old one."""
        for file in metadata_files_by_rank(path).values():
            for entry in read_metadata(file)["state_dict_metadata"].values():
                of = type(entry)
                if isinstance(of, Global) and of.name == "TensorStorageMetadata":
                    state = entry.attributes()["properties"][0]
                    if isinstance(state, tuple) and len(state) > 5:  # the sixth item is the strides
                        return "2.15"
                    break  # all tensors of a file are described alike
        return None

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:
        """Yield the large entries of every archive, and items that are not archives. Verifies the small entries."""
        with OpenFiles(layout.root, in_order=False) as opened:
            files = ReadAhead(opened)
            items: dict[tuple[str, int, int], str] = {}  # file, offset and length, with the first name that uses it
            whole = self.with_unlocated_chunks(layout)
            for name, item in chain(whole.chunks_and_blobs, whole.replica_chunks):
                if item.length:
                    items.setdefault((item.path, item.offset, item.length), name)
            for (path, offset, length), name in iterate_with_prefetch(
                layout.root, sorted(items.items()), lambda item: head_and_tail_ranges(*item[0])
            ):
                try:
                    yield from verify_small_entries(files, Extent(path, offset, length, None, name))
                except CkptError as error:
                    report(error.blame(path=layout.root / path, tensor=name, offset=offset))

    def with_unlocated_chunks(self, layout: Layout) -> Layout:
        """Return the layout with chunks that are full items, only from the files that `layout` uses."""
        if all(chunk.wrapper for tensor in layout.tensors.values() for chunk in tensor.chunks):
            return layout
        whole = self.read_without_file_check(layout.root)
        used = layout.paths | {chunk.path for _, chunk in layout.replica_chunks}
        tensors = {
            name: replace(tensor, chunks=tuple(chunk for chunk in tensor.chunks if chunk.path in used))
            for name, tensor in whole.tensors.items()
        }
        blobs = {name: blob for name, blob in whole.blobs.items() if blob.path in used}
        return replace(whole, tensors=tensors, blobs=blobs)

    def lay_out_files(self, wanted: Layout, options: WriterOptions) -> tuple[NewFile, ...]:
        """Return a file for each of `options.world_size` ranks, with its items and room for data; and the metadata."""
        from ckptkit.formats.dcp.write import (  # reading needs none of it
            KnownBytes,
            items_by_file,
            pickled_metadata,
            size_of_file,
        )

        files = items_by_file(wanted, options.world_size)
        metadata = pickled_metadata(wanted, files)
        data = (NewFile(name, size_of_file(items), KnownBytes(items)) for name, items in files.items())
        return *data, NewFile(METADATA, len(metadata), ((0, metadata),))

    def entries_file_name(self, rank: int) -> str:
        return entries_file_name(rank)

    def patches_for_non_tensors(self, wanted: Layout, options: WriterOptions) -> Iterator[tuple[str, Patch]]:
        """Yield the metadata again, now with the non-tensor entries, which are stored in files of their own."""
        from ckptkit.formats.dcp.write import items_by_file, pickled_metadata_with_blobs

        tensors = items_by_file(replace(wanted, blobs={}), options.world_size)
        yield METADATA, (0, pickled_metadata_with_blobs(wanted, tensors, wanted.blobs))

    def checksum_offsets(self, written: Layout) -> Iterator[tuple[FileOffset, int]]:
        from ckptkit.formats.dcp.write import template_of_spec

        for tensor in written.tensors.values():
            for chunk in tensor.chunks:
                if chunk.length:
                    (hole,) = template_of_spec(Spec(chunk.dtype, chunk.size)).holes.values()
                    begin = chunk.offset - hole.offset
                    yield from (((chunk.path, chunk.offset), begin + at) for at in hole.crc_offsets)


def checked_against_files(layout: Layout, report: Report) -> Layout:
    """Return a layout that the metadata describes, after a comparison with the files. Reports what does not fit."""
    check_data_files(layout, report)
    check_chunks_tile(layout, report)
    # files that the layout does not use do not count, unless they are empty
    used = layout.paths | {chunk.path for _, chunk in layout.replica_chunks}
    names = {name: rank for name in names_in(layout.root) if (rank := find_rank_in_file_name(name)) is not None}
    ranks = {rank for name, rank in names.items() if name in used or not (layout.root / name).stat().st_size}
    return with_unflattened_states(replace(layout, world_size=len(ranks) or None), report)


def check_data_files(layout: Layout, report: Report) -> None:
    """Report each file that is missing or too short for the items in the metadata, and items that overlap partly."""
    items: dict[str, list[tuple[int, int, str]]] = {}
    for name, item in chain(layout.chunks_and_blobs, layout.replica_chunks):
        if item.length:
            items.setdefault(item.path, []).append((item.offset, item.length, name))
    missing = sorted(items.keys() - set(names_in(layout.root)))
    if missing:
        message = f"{len(missing)} of {len(items)} files are missing: {', '.join(missing)}"
        report(Incomplete(message, path=layout.path, hint=f"{ELSEWHERE}, or {SALVAGE}", files=missing))
    for path in sorted(items.keys() - missing):
        try:
            check_item_ranges(layout.root / path, sorted(items[path]))
        except CkptError as error:
            report(error)


def check_item_ranges(path: Path, items: list[tuple[int, int, str]]) -> None:
    """Raise `Corrupt` if the file is shorter than its items, (offset, length, name) in order, or if two overlap."""
    size = file_size(path)
    start, end, before = 0, 0, ""
    for offset, length, name in items:
        if (offset, offset + length) == (start, end):
            continue
        if offset < end:
            other = f"the item of `{before}`, which ends at byte {end}"
            message = f"the item of {length} bytes at byte {offset} overlaps {other}"
            raise Corrupt(message, path=path, tensor=name, offset=offset)
        start, end, before = offset, offset + length, name
        if end > size:
            raise truncated_error(
                max(sum(item[:2]) for item in items), size, path=path, tensor=name, recorded_in="metadata"
            )


def verify_small_entries(files: ReadAhead, item: Extent) -> Iterator[Extent]:
    """Yield the large entries of an item's archive, after verifying the small ones; or the item if it is no archive."""
    read = files.reader_within(item.path, item.offset, item.length)
    if read(0, min(2, item.length)) != b"PK":
        yield item
        return
    read = with_cached_ends(read, item.length)
    entries = read_central_directory(read, item.length)
    for name, entry in entries.items():
        if entry.length > CONTENT_LIMIT or (entry.length and not entry.crc32):
            yield Extent(item.path, item.offset + entry.offset, entry.length, entry.crc32 or None, item.name)
        else:
            read_entry_content(read, entries, name)


def with_unflattened_states(layout: Layout, report: Report) -> Layout:
    """Return the layout with the optimizer states that are grids of flattened blocks in the shape of their parameters.

    Source: megatron/core/dist_checkpointing/strategies/torch.py of core 0.12, for `fully_sharded_model_space` of its
    distributed optimizer. For a parameter of shape [X, Y] that tensor-parallel ranks store as blocks of [x, y],
    `exp_avg` has shape [X/x, Y/y, x y]: the position of a block in the grid of blocks, then the elements of the block
    in row-major order. Each data-parallel rank has a contiguous range of the last axis.

    Locates their chunks, which costs two small reads each. Reports a chunk that cannot be located and leaves its tensor
    unchanged, as well as all other tensors, and states whose parameter is missing.
    """
    shapes = {
        name: shape
        for name, key in layout.keys.items()
        if len(key) > 2 and name in layout.tensors and (shape := find_unflattened_shape(layout, name)) is not None
    }
    if not shapes:
        return layout
    located = locate_in_archives(select_entries(replace(layout, blobs={}), shapes.__contains__), report)
    unfolded = {
        name: StoredTensor(Spec(tensor.spec.dtype, shapes[name]), tuple(unflatten_chunks(located, name, shapes[name])))
        for name, tensor in located.tensors.items()
        if all(chunk.wrapper is None for chunk in tensor.chunks)
    }
    return replace(layout, tensors={**layout.tensors, **unfolded})


def find_unflattened_shape(layout: Layout, state_name: str) -> Shape | None:
    """Return the shape of a state's parameter if the state is a grid of the parameter's blocks; else None."""
    key = layout.key(state_name)
    parameter = layout.tensors.get(str(key[-1])) if len(key) > 2 and key[-3] == "state" else None
    if parameter is None:
        return None
    shape, folded = parameter.spec.shape, layout.tensors[state_name].spec.shape
    if len(folded) != len(shape) + 1 or 0 in shape or 0 in folded:
        return None
    is_grid = all(n % parts == 0 for n, parts in zip(shape, folded, strict=False))
    return shape if is_grid and prod(folded) == prod(shape) else None


def unflatten_chunks(layout: Layout, state_name: str, parameter_shape: Shape) -> Iterator[Chunk]:
    """Yield the chunks of a state as boxes of its parameter. Raises `Corrupt` for a chunk that spans several blocks."""
    tensor = layout.tensors[state_name]
    block = tuple(n // parts for n, parts in zip(parameter_shape, tensor.spec.shape, strict=False))
    for chunk in tensor.chunks:
        *grid, start = chunk.start
        *ones, length = chunk.size
        if set(ones) - {1} or chunk.strides is not None:
            what = f"a chunk at {list(chunk.start)} of size {list(chunk.size)}"
            message = f"{what} is not one contiguous run of a parameter"
            raise Corrupt(message, path=layout.root / chunk.path, tensor=state_name)
        corner = [i * n for i, n in zip(grid, block, strict=True)]
        row = chunk._replace(box=Box((start,), (length,)))
        for piece in chunks_of_flat_range(row, 0, block, start, start + length):
            yield piece._replace(box=Box(tuple(map(add, corner, piece.start)), piece.size))
