"""Writing through torch: every rank puts its shards to their final place in the final files of any format.

The coordinator makes the files from the plans of all ranks, before a byte of data is there. Where each byte belongs is
then said by the format's own reader, to every rank alike, so that nothing is left to put together afterwards.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptkit import edits
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.manifest import Manifest, sum_files
from ckptkit.errors import Corrupt, Mismatch, Unsupported, translate_os_errors
from ckptkit.files.allocation import check_room, create_file, write_parts
from ckptkit.files.crc32 import whole_crc32
from ckptkit.files.file import Opened, check_name
from ckptkit.files.staging import Stage
from ckptkit.files.trees import sync_path
from ckptkit.formats import get_writer, locate
from ckptkit.layout import Chunk, Extent, Layout, Options, Place, Spec, StoredTensor, check_cover
from ckptkit.ops.consolidate import DEFAULT_SHARD_SIZE
from ckptkit.storage.memory import find_dtype
from ckptkit.storage.pieces import PieceWriter
from ckptkit.tensors.box import Box


class RoomWriter(StorageWriter):
    """Writes the tensors of a state as a checkpoint into directory `room`, which is there; shows it to nobody.

    `format` is one that ckptkit writes, `files` are small ones to put beside the weights, and `max_shard_size` is in
    bytes. Without `sync` the data is left to the operating system.
    """

    def __init__(
        self,
        room: str | os.PathLike[str],
        format: str = "hf",  # noqa: A002 - as users call it
        *,
        files: Mapping[str, bytes] | None = None,
        max_shard_size: int = DEFAULT_SHARD_SIZE,
        sync: bool = True,
    ) -> None:
        super().__init__()
        self.room = Path(room)
        self.sync = sync
        self._format = get_writer(format)
        self._files = dict(files or {})
        for name in self._files:
            check_name(name, self.room)
        self._max_shard_size = max_shard_size
        self._planned = Layout(self.room, "memory", {})  # on the coordinator, from plan to finish
        self._sizes: dict[str, int] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, in another directory if one is given."""
        if checkpoint_id is not None:
            self.room = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raise `Unsupported` for ranks that shall not talk to each other: their shards are of the same files."""
        if not kwargs.get("use_collectives", True):
            raise Unsupported("saving with use_collectives=False: the ranks write the same files together")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is. Raises `Unsupported` for an entry that is no tensor."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise Unsupported(
                    "only tensors can be saved here, and this entry is none",
                    tensor=item.index.fqn,
                    hint="save the model's weights here, and all else with DCP's own writer in a directory beside",
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, with the directory to write to; its files are made, with holes for the data."""
        self._planned = plan_layout(plans, self.room)
        made = self._format.arrange(self._planned, Options(self._max_shard_size, len(plans)))
        self._sizes = {file.name: file.nbytes for file in made} | {name: len(c) for name, c in self._files.items()}
        check_room(self.room, sum(self._sizes.values()))
        for file in made:
            create_file(self.room / file.name, file.nbytes, file.parts)
        for name, content in self._files.items():
            create_file(self.room / name, len(content), [(0, content)])
        return [replace(plan, storage_data=str(self.room)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items to where they belong; each result has what it adds to the sum of each chunk."""
        room = Path(plan.storage_data)
        names = {item.index.fqn for item in plan.items}
        made = self._read(room, names)
        with Opened(room, writable=True) as files:
            pieces = PieceWriter(files)
            results = [write_item(pieces, item, planner, made) for item in plan.items]
        if self.sync:  # by each rank what it wrote: another machine could not
            for name in sorted({path for result in results for path, _ in result.storage_data}):
                sync_path(room / name)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002 - torch's alone
        """Complete the files, with the checksums that need the data, and the manifest."""
        written = sum(result.size_in_bytes for result in chain(*results))
        if written != self._planned.nbytes:
            raise Corrupt(f"{written} of {self._planned.nbytes} bytes were written", path=self.room)
        made = self._read(self.room, self._planned.tensors)
        checksums = add_up(made, chain(*results))
        write_parts(self.room, self._format.seal(made, checksums))
        self._format.check(made)
        names = {(c.path, c.offset): (name, c.length) for name, t in made.tensors.items() for c in t.chunks}
        extents = [Extent(*place, names[place][1], crc, names[place][0]) for place, crc in checksums.items()]
        sums = sum_files(self.room, self._sizes, extents)
        manifest = Manifest(sums, checksums_of_whole(made, checksums)).to_bytes()
        create_file(self.room / MANIFEST, len(manifest), [(0, manifest)])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for a path."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _read(self, room: Path, names: Iterable[str]) -> Layout:
        """Where the bytes of these tensors belong."""
        with translate_os_errors(room):
            return locate(edits.select(self._format.read(room), set(names).__contains__))


class Writer(RoomWriter):
    """Saves the tensors of a state as a checkpoint at `path`: it appears when all ranks are done, whole or not at all.

    `format` is one that ckptkit writes, `files` are small ones to put beside the weights (config.json, a tokenizer's),
    and `max_shard_size` is in bytes. `overwrite` replaces a directory that is there; without `sync` the checkpoint may
    not outlive a power cut. What a save that failed has left hidden goes away with the writer, or at its next save.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str = "hf",  # noqa: A002 - as users call it
        *,
        files: Mapping[str, bytes] | None = None,
        max_shard_size: int = DEFAULT_SHARD_SIZE,
        overwrite: bool = False,
        sync: bool = True,
    ) -> None:
        super().__init__(path, format, files=files, max_shard_size=max_shard_size, sync=sync)
        self.path = Path(path)
        self.overwrite = overwrite
        self._stage: Stage | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, with another path if one is given."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, with the hidden directory to write to; its files are made."""
        self._discard()
        self._stage = stage = Stage(self.path, overwrite=self.overwrite, sync=self.sync)
        weakref.finalize(self, stage.discard)  # no call of torch's tells of the failure of another rank
        try:
            self.room = stage.open().path
            return super().prepare_global_plan(plans)
        except BaseException:
            self._discard()
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint and show it."""
        assert self._stage is not None
        try:
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


def plan_layout(plans: Iterable[SavePlan], root: Path) -> Layout:
    """What the ranks together will save; each chunk lies where one of them has it, as its item of this number.

    Raises `Mismatch` where they leave a gap, overlap or disagree.
    """
    specs: dict[str, Spec] = {}
    chunks: dict[str, list[Chunk]] = {}
    keys: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        if not plan.usable:
            hint = "save with a planner that has enable_plan_caching=False, as is the default"
            raise Unsupported("a plan that only says it is the same as before", path=root, hint=hint)
        keys |= plan.planner_data or {}
        for i, item in enumerate(plan.items):
            name, (spec, box) = item.index.fqn, describe_item(item)
            if specs.setdefault(name, spec) != spec:
                raise Mismatch(f"one rank has {specs[name]}, another {spec}", path=root, tensor=name)
            chunk = Chunk(box, f"rank {rank}", i, box.numel * spec.dtype.itemsize, spec.dtype)
            chunks.setdefault(name, []).append(chunk)
    tensors = {name: StoredTensor(spec, tuple(chunks[name])) for name, spec in specs.items()}
    layout = Layout(root, "memory", tensors, keys={name: keys[name] for name in tensors if name in keys})
    try:
        check_cover(layout)
    except Corrupt as error:
        hint = "do all the ranks that hold a part of it take part in the save?"
        raise Mismatch(error.message, path=root, tensor=error.tensor, hint=hint) from None
    return layout


def describe_item(item: WriteItem) -> tuple[Spec, Box]:
    """What an item is a part of, and which part."""
    data = item.tensor_data
    assert data is not None
    spec = Spec(find_dtype(data.properties.dtype, item.index.fqn), tuple(data.size))
    return spec, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def write_item(pieces: PieceWriter, item: WriteItem, planner: SavePlanner, made: Layout) -> WriteResult:
    """Write one item of a plan."""
    tensor = planner.resolve_data(item)
    name = item.index.fqn
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise Unsupported("not a plain dense tensor with data", tensor=name)
    _, box = describe_item(item)
    if tuple(tensor.shape) != box.size:
        raise Mismatch(f"the plan has {list(box.size)}, the tensor is {list(tensor.shape)}", tensor=name)
    plain = tensor.detach().resolve_conj().resolve_neg()
    return WriteResult(item.index, plain.nbytes, pieces.write(plain, box, made.tensors[name]))


def add_up(made: Layout, results: Iterable[WriteResult]) -> dict[Place, int]:
    """The CRC-32 of every chunk that has bytes, from what each result adds to its sum."""
    sums: dict[Place, int] = {}
    for result in results:
        for place, part in result.storage_data.items():
            sums[place] = sums.get(place, 0) ^ part
    chunks = {(c.path, c.offset): c for tensor in made.tensors.values() for c in tensor.chunks if c.box.numel}
    return {place: whole_crc32(sums[place], chunk.length) for place, chunk in chunks.items()}


def checksums_of_whole(made: Layout, checksums: Mapping[Place, int]) -> dict[str, int]:
    """CRC-32 by name, of the tensors that lie in one chunk; an empty tensor has that of no bytes."""
    whole = {name: t.chunks[0] for name, t in made.tensors.items() if len(t.chunks) == 1}
    return {name: checksums[chunk.path, chunk.offset] if chunk.box.numel else 0 for name, chunk in whole.items()}
