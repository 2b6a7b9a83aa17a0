"""Write through torch to an object store: every rank sends its own files, then the coordinator publishes them.

The coordinator claims the destination, with the sizes of all ranks' shards, and the others join it. Nothing is written
to the local disk. The metadata is the last object and replaces none; without it, no reader sees a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from uuid import uuid4

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.manifest import FileSum, Manifest
from ckptkit.checkpoints.replaceable import check_replaceable_and_find_markers
from ckptkit.engine.blocks import BLOCK_BYTES
from ckptkit.errors import Corrupt, IOFailure, Mismatch, Occupied, Usage, warn
from ckptkit.formats import get_writer
from ckptkit.formats.dcp.read_metadata import METADATA, entries_file_name, tensors_file_name
from ckptkit.formats.dcp.write import (
    ShardItem,
    append_item,
    bytes_around_data,
    checksum_of_items,
    pickled_metadata_with_blobs,
    size_of_file,
    template_of_chunk,
)
from ckptkit.io.crc32 import combine_crc32, crc32
from ckptkit.io.destination import (
    Destination,
    open_destination,
    require_multi_process_store,
    send_file,
    to_destination,
)
from ckptkit.io.file import destination_exists_error
from ckptkit.io.path import drop_cached_listing, is_remote
from ckptkit.layout import Blob, Layout, StoredTensor
from ckptkit.layout.box import cut_box, full_box
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
    written_entries,
)
from ckptkit.storage.small_files import SmallFile, small_files_to_bytes

FORMAT = "dcp"
_MARKS = (MANIFEST, METADATA)


@dataclass(frozen=True, slots=True)
class SendTask:
    """The work of one rank in a save: `nbytes` of shards, in the upload with the id `plan`."""

    rank: int
    plan: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Upload:
    """A save in progress, as its coordinator sees it, with the shards that each file will contain."""

    there: Destination
    planned: Layout
    items: Mapping[str, list[ShardItem]]


class StoreWriter(PlannedWriter):
    """Writes a state as a DCP directory to `path` in a store, with small `files` beside it.

    `overwrite` replaces an existing checkpoint. With `takes_over`, the caller guarantees that nobody else writes there:
    an incomplete checkpoint is from a save that died, and is replaced.
    """

    def __init__(
        self,
        path: Path,
        *,
        files: Mapping[str, SmallFile] | None = None,
        overwrite: bool = False,
        takes_over: bool = False,
    ) -> None:
        super().__init__()
        self.path = path
        self._files = small_files_to_bytes(files, path, get_writer(FORMAT))
        self._overwrite = overwrite
        self._takes_over = takes_over
        self._begun: Path | None = None  # destination of this writer's unfinished save
        self._upload: Upload | None = None  # set on the coordinator, from plan to finish

    @classmethod
    def parse_id(cls, checkpoint_id: str | os.PathLike[str]) -> Path:
        """Return the path in a store. Raises `Usage` for a local path."""
        path = to_destination(checkpoint_id)
        if not is_remote(path):
            raise Usage("this is a local path, but only a path in a store is accepted here", path=path)
        require_multi_process_store(path)
        return path

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the destination, and return the plans with the task of each rank."""
        plans = with_cached_plans(plans, self.path)
        planned = layout_of_save_plans(plans, self.path)
        items = {
            tensors_file_name(rank): lay_out_shard_items(split_tensors_and_entries(plan.items)[0])
            for rank, plan in enumerate(plans)
        }
        sizes = {name: size_of_file(own_items) for name, own_items in items.items()}
        upload = uuid4().hex
        more = (*map(entries_file_name, range(len(plans))), *self._files)
        destination = open_destination(self.path, sizes, _MARKS, plan=upload, more_files=more)
        if not self._overwrite:
            require_no_checkpoint_at(self.path)
        # replace an incomplete checkpoint if it can only be from a save that died
        replaces = self._overwrite or self._takes_over or self._begun == self.path
        self._begun = self.path
        try:
            check = partial(check_replaceable_and_find_markers, self.path, self._files, output_is_training=True)
            destination.claim(overwrite=replaces, check=check)
        except Occupied:
            self._begun = None
            raise
        for remark in destination.missing_feature_remarks():
            warn(f"{self.path}: {remark}")
        self._upload = Upload(destination, planned, items)
        tasks = [SendTask(rank, upload, nbytes) for rank, nbytes in enumerate(sizes.values())]
        return [replace(plan, storage_data=task) for plan, task in zip(plans, tasks, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Send this rank's items. Results contain the CRC-32 of each tensor's data, or the byte range of an entry.

        Reads the tensors one piece at a time, while others are sent.
        """
        task: SendTask = plan.storage_data
        if self._upload:
            destination = self._upload.there
        else:
            destination = open_destination(
                self.path, {tensors_file_name(task.rank): task.nbytes}, _MARKS, plan=task.plan
            )
            destination.join_upload()
        tensors, entries = split_tensors_and_entries(plan.items)
        results = [
            *send_tensors(destination, task, tensors, planner),
            *send_entries(destination, task, entries, planner),
        ]
        drop_cached_listing(self.path)
        return completed_future(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002 - torch's alone
        """Send the small files and the manifest, then the metadata, which publishes the checkpoint."""
        assert self._upload is not None
        destination, planned, items = self._upload.there, self._upload.planned, self._upload.items
        all_results = list(chain(*results))
        checksums = collect_checksums(all_results, items, self.path)
        entries = [result.storage_data for result in all_results if isinstance(result.storage_data, Blob)]
        described = pickled_metadata_with_blobs(planned, items, written_entries(all_results, planned))
        small = {**self._files, METADATA: described}
        sums = {
            name: FileSum(size_of_file(own), checksum_of_items(own, checksums[name]))
            for name, own in items.items()
            if own
        }
        for blob in entries:  # each rank's entries are a file of their own
            before = sums.get(blob.path, FileSum(0, 0))
            assert blob.crc32 is not None
            total = combine_crc32(before.crc32, blob.crc32, blob.length)
            sums[blob.path] = FileSum(before.nbytes + blob.length, total)
        sums |= {name: FileSum(len(content), crc32(content)) for name, content in small.items()}
        tensors = {
            item.name: checksums[name][item.offset]
            for name, own in items.items()
            for item in own
            if len(planned.tensors[item.name].chunks) == 1
        }
        manifest = Manifest(sums, tensors).to_bytes()
        for name, content in self._files.items():
            destination.put_small_file(name, content, crc32(content))
        for name, content in zip(_MARKS, (manifest, described), strict=True):
            destination.put_marker(name, content, crc32(content))
        # the checkpoint is visible now, so a later save must not replace it as unfinished, even if the commit fails
        self._upload = self._begun = None
        drop_cached_listing(self.path)
        try:
            destination.commit()
        except IOFailure as error:  # the checkpoint is complete, so training can continue
            warn(f"the checkpoint is complete, but its claim was not deleted: {error}")


def require_no_checkpoint_at(path: Path) -> None:
    """Raise `Occupied` if a checkpoint is at a path in a store now. An incomplete save does not count."""
    drop_cached_listing(path)
    if (path / METADATA).exists() or Checkpoint.at(path).is_complete:
        raise destination_exists_error(path)


def lay_out_shard_items(tensors: Iterable[WriteItem]) -> list[ShardItem]:
    """Return the positions of a rank's tensors in its file. Raises `Unsupported` for a quantized dtype."""
    items: list[ShardItem] = []
    for tensor in tensors:
        name, (spec, box) = tensor.index.fqn, spec_and_box_of_item(tensor)
        envelope = template_of_chunk(name, StoredTensor(spec, ()), box)
        append_item(items, name, box, envelope.nbytes, envelope)
    return items


def send_tensors(
    destination: Destination, task: SendTask, items: list[WriteItem], planner: SavePlanner
) -> list[WriteResult]:
    """Send the file with a rank's shards. Returns the CRC-32 of each shard's data, by file and offset."""
    placed = lay_out_shard_items(items)
    if size_of_file(placed) != task.nbytes:
        raise Mismatch(f"the planner changed its plan: expected {task.nbytes} bytes, found {size_of_file(placed)}")
    name = tensors_file_name(task.rank)
    results: list[WriteResult] = []

    def blocks() -> Iterator[bytes | memoryview]:
        buffers = Buffers()
        for item, place in zip(items, placed, strict=True):
            assert place.envelope is not None
            yield bytes_around_data(place.envelope, 0)[0]
            checksum = 0
            tensor = resolve_tensor(item, planner)
            for box in cut_box(full_box(tuple(tensor.shape)), BLOCK_BYTES // tensor.itemsize):
                block = read_row_major(view_of_box(tensor, box), buffers[tensor.device])
                checksum = crc32(block, checksum)
                yield block
            yield bytes_around_data(place.envelope, checksum)[1]
            results.append(WriteResult(item.index, tensor.nbytes, {(name, place.offset): checksum}))

    if placed:
        send_file(destination, name, task.nbytes, blocks())
    return results


def send_entries(
    destination: Destination, task: SendTask, items: list[WriteItem], planner: SavePlanner
) -> Iterator[WriteResult]:
    """Send the file with a rank's non-tensor entries. Yields the byte range of each."""
    name = entries_file_name(task.rank)
    content = bytearray()
    for item in items:
        data_view = resolve_entry(item, planner)
        yield WriteResult(item.index, len(data_view), Blob(name, len(content), len(data_view), crc32=crc32(data_view)))
        content += data_view
    if items:
        destination.put_small_file(name, content, crc32(content))


def collect_checksums(
    results: Iterable[WriteResult], items: Mapping[str, list[ShardItem]], path: Path
) -> dict[str, dict[int, int]]:
    """Return the CRC-32 of the data of each shard, by file and offset. Raises `Corrupt` if a shard was not written."""
    by_offset: dict[str, dict[int, int]] = {name: {} for name in items}
    for result in results:
        if not isinstance(result.storage_data, Blob):
            for (name, offset), checksum in result.storage_data.items():
                by_offset[name][offset] = checksum
    for name, own in items.items():
        for item in own:
            if item.offset not in by_offset[name]:
                raise Corrupt("the shard was not written by the rank that has it", path=path / name, tensor=item.name)
    return by_offset
