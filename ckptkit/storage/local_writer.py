"""Write through torch to a local directory: every rank writes its shards to their final position, in any format.

The coordinator creates the files from the plans of all ranks, before any data is written. Every rank then gets the
position of each byte from the format's own reader, so nothing has to be merged afterwards. Exceptions are non-tensor
entries: their length is known only after they are written.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from operator import mul
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptkit.checkpoints.finalize_files import create_files, read_output_layout
from ckptkit.checkpoints.replaceable import check_replaceable
from ckptkit.engine.blocks import BLOCK_BYTES
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.formats import EntryWriter, get_writer, locate_all_chunks
from ckptkit.io.allocation import create_file, require_free_space
from ckptkit.io.crc32 import crc32, xor_contribution
from ckptkit.io.disk import sync_path
from ckptkit.io.file import OpenFiles
from ckptkit.io.path import to_local_path
from ckptkit.io.staging import Stage, errors_naming_destination
from ckptkit.layout import Blob, Chunk, FileOffset, KeyPath, StoredTensor, WriterOptions
from ckptkit.layout.box import Box, BoxIndex, cut_box, row_major_strides
from ckptkit.state.options import DEFAULT_SHARD_SIZE
from ckptkit.storage.memory import Buffers, read_row_major, view_of_box
from ckptkit.storage.plans import (
    PlannedWriter,
    completed_future,
    layout_of_save_plans,
    resolve_entry,
    resolve_tensor,
    spec_and_box_of_item,
    split_tensors_and_entries,
    with_cached_plans,
)
from ckptkit.storage.portions import Portion, split_model_from_training
from ckptkit.storage.small_files import SmallFile, small_files_to_bytes

_MODEL_FORMAT = "hf"  # this format stores only tensors of a model


@dataclass(frozen=True, slots=True)
class Task:
    """The work of one rank in a save, in directory `root`.

    `portions` maps names in the state to stored names, for each directory in `root` and its format.
    """

    rank: int
    root: Path
    portions: Mapping[tuple[str, str], Mapping[str, str]]


class RoomWriter(PlannedWriter):
    """Writes a state as a checkpoint into the existing directory `room`, without publishing it.

    `format` is a format that ckptkit writes, `files` are small files to put beside the weights, and `max_shard_size` is
    in bytes. `tied` maps additional key paths to names of tensors in the state: they share its bytes, if the format
    allows that. Without `sync`, the operating system decides when data reaches the disk.
    """

    def __init__(
        self,
        room: str | os.PathLike[str],
        format: str = "hf",  # noqa: A002 - as users call it
        *,
        files: Mapping[str, SmallFile] | None = None,
        max_shard_size: int = DEFAULT_SHARD_SIZE,
        tied: Mapping[KeyPath, str] | None = None,
        sync: bool = True,
    ) -> None:
        super().__init__()
        self.path = self.parse_id(room)
        self.sync = sync
        self._format = format
        self._files = small_files_to_bytes(files, self.room, get_writer(format))
        self._max_shard_size = max_shard_size
        self._tied = dict(tied or {})
        self._portions: tuple[Portion, ...] = ()  # set on the coordinator, from plan to finish
        self._sizes: dict[str, dict[str, int]] = {}
        self._options = WriterOptions(max_shard_size)

    @classmethod
    def parse_id(cls, checkpoint_id: str | os.PathLike[str]) -> Path:
        return to_local_path(os.fspath(checkpoint_id))

    @property
    def room(self) -> Path:
        """Return the directory in which the ranks write."""
        return self.path

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the files, with gaps for the data, and return the plans with the task of each rank."""
        plans = with_cached_plans(plans, self.room)
        planned = layout_of_save_plans(plans, self.room)
        ways = {".".join(map(str, way)): way for way in self._tied}
        tied = {name: planned.tensors[self._tied[way]] for name, way in ways.items()}
        planned = replace(planned, tensors={**planned.tensors, **tied}, keys={**planned.keys, **ways})
        self._options = WriterOptions(self._max_shard_size, len(plans))
        self._portions = split_model_from_training(planned, self._format)
        files_by_directory = {
            portion.directory: portion.lay_out_files(self._options, {} if portion.directory else self._files)
            for portion in self._portions
        }
        self._sizes = {
            directory: {file.name: file.nbytes for file in files} for directory, files in files_by_directory.items()
        }
        # before any file is created: a full disk in the middle of a save costs the training time
        require_free_space(self.room, sum(chain(*(sizes.values() for sizes in self._sizes.values()))))
        for directory, files in files_by_directory.items():
            create_files(self.room / directory, files, must_be_new=True)
        tasks = []
        for rank, plan in enumerate(plans):
            names = [item.index.fqn for item in plan.items]
            stored_names = {
                (portion.directory, portion.format): {
                    name: portion.names[name] for name in names if name in portion.names
                }
                for portion in self._portions
            }
            tasks.append(replace(plan, storage_data=Task(rank, self.room, stored_names)))
        return tasks

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items to their positions.

        The result of a tensor contains its contributions to the checksums of chunks. The result of any other entry
        contains its byte range.
        """
        task: Task = plan.storage_data
        results: list[WriteResult] = []
        for (place, to), names in task.portions.items():
            tensors, entries = split_tensors_and_entries(item for item in plan.items if item.index.fqn in names)
            results += self._write_tensors(task.root / place, to, tensors, names, planner)
            if entries:
                writer = get_writer(to)
                assert isinstance(writer, EntryWriter)
                results += self._write_entries(task.root / place, writer.entries_file_name(task.rank), entries, planner)
        return completed_future(results)

    def _write_tensors(
        self, root: Path, format_name: str, items: list[WriteItem], names: Mapping[str, str], planner: SavePlanner
    ) -> list[WriteResult]:
        layout = locate_all_chunks(
            read_output_layout(get_writer(format_name), root, {names[item.index.fqn] for item in items})
        )
        with OpenFiles(root, writable=True) as files:
            pieces = PieceWriter(files)
            results = []
            for item in items:
                tensor, box = resolve_tensor(item, planner), spec_and_box_of_item(item)[1]
                sums = pieces.write_tensor(tensor, box, layout.tensors[names[item.index.fqn]])
                results.append(WriteResult(item.index, tensor.nbytes, sums))
        if self.sync:  # each rank syncs its own writes: another machine cannot
            for name in sorted({path for result in results for path, _ in result.storage_data}):
                sync_path(root / name)
        return results

    def _write_entries(self, root: Path, file: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        """Write non-tensor entries, one after the other, into a file of their own."""
        create_file(root / file, 0, ())
        results = []
        end = 0
        with OpenFiles(root, writable=True) as files:
            for item in items:
                content = resolve_entry(item, planner)
                files[file].write_at(content, end)
                blob = Blob(file, end, len(content), crc32=crc32(content))
                results.append(WriteResult(item.index, len(content), blob))
                end += len(content)
        if self.sync:
            sync_path(root / file)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002 - torch's alone
        """Finalize the files with entries and checksums, which need the data, and write the manifests."""
        for portion in self._portions:
            portion.finalize_files(self._options, self._sizes[portion.directory], chain(*results))


class StagedWriter(RoomWriter):
    """Writes a state to the local `path`. The checkpoint appears atomically, when all ranks are done.

    See `Writer` for the options. A failed save of several ranks may leave a hidden directory. It is deleted with the
    writer, or at the writer's next save.
    """

    def __init__(
        self, path: Path, to: str, *, files: Mapping[str, SmallFile], max_shard_size: int, overwrite: bool, sync: bool
    ) -> None:
        self._stage: Stage | None = None
        super().__init__(path, to, files=files, max_shard_size=max_shard_size, sync=sync)
        self.overwrite = overwrite

    @property
    def room(self) -> Path:
        return self.path if self._stage is None else self._stage.path

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the files in a hidden directory, and return the plans with the task of each rank."""
        self._discard()
        if self.overwrite:
            check_replaceable(self.path, self._files, output_is_training=True)
        self._stage = stage = Stage(self.path, overwrite=self.overwrite, sync=self.sync)
        weakref.finalize(self, stage.discard)  # torch does not report the failure of another rank
        try:
            with errors_naming_destination(self.path):
                stage.open()
                return super().prepare_global_plan(plans)
        except BaseException as error:
            self._discard()
            if self._format == _MODEL_FORMAT and isinstance(error, Mismatch | Unsupported):
                error.hint = 'pass format="dcp", which stores every entry of the state as it is'
            raise

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            with errors_naming_destination(self.path):
                return super().write_data(plan, planner)
        except BaseException:
            if self._options.world_size == 1:  # else other ranks may still be writing
                self._discard()
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Finalize the checkpoint and publish it."""
        assert self._stage is not None
        try:
            with errors_naming_destination(self.path):
                super().finish(metadata, results)
                self._stage.commit()
        except BaseException:
            self._discard()
            raise
        self._stage = None

    def _discard(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.discard()


class PieceWriter:
    """Writes shards of tensors into open `files`. Uses at most one block of memory per device."""

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._buffers = Buffers()

    def write_tensor(self, tensor: Tensor, box: Box, target: StoredTensor) -> dict[FileOffset, int]:
        """Write a tensor, which is box `box` of the target. Returns its contribution to the checksum of each chunk."""
        meetings = BoxIndex([chunk.box for chunk in target.chunks]).intersections_with(box)
        shares = [(target.chunks[i], shared) for i, shared in meetings]
        return {(chunk.path, chunk.offset): self._write_box(tensor, box, chunk, shared) for chunk, shared in shares}

    def _write_box(self, tensor: Tensor, box: Box, chunk: Chunk, shared: Box) -> int:
        """Write the elements of `shared` into a chunk. Returns their contribution to the chunk's checksum."""
        file = self._files[chunk.path]
        itemsize = chunk.dtype.itemsize
        total = 0
        for block in cut_box(shared, BLOCK_BYTES // itemsize):
            data = read_row_major(view_of_box(tensor, block.relative_to(box)), self._buffers[tensor.device])
            starts, length = contiguous_ranges_in_chunk(block, chunk.box)
            nbytes = length * itemsize
            for i, start in enumerate(starts):
                span, at = data[i * nbytes : (i + 1) * nbytes], start * itemsize
                file.write_at(span, chunk.offset + at)
                total ^= xor_contribution(span, chunk.length - at - nbytes)
        return total


def contiguous_ranges_in_chunk(box: Box, chunk_box: Box) -> tuple[list[int], int]:
    """Return where the contiguous ranges of a box start in the memory of a chunk, in row-major order, and their length.

    All in elements. A box of full rows is a single range; a box of some columns has a range per row.
    """
    inner, steps = box.relative_to(chunk_box), row_major_strides(chunk_box.size)
    axis = next((d for d in range(len(steps)) if box.size[d + 1 :] == chunk_box.size[d + 1 :]), 0)
    starts = [sum(map(mul, inner.start, steps))]
    for size, step in zip(box.size[:axis], steps[:axis], strict=True):
        starts = [start + i * step for start in starts for i in range(size)]
    return starts, prod(box.size[axis:])
