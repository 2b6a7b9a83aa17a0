"""Assign the shards of a checkpoint to ranks as FSDP2 shards a model, item by item and file by file.

Source: torch.chunk (FSDP2 uses it to split dim 0), and torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace

from ckptkit.errors import CkptError, Unsupported
from ckptkit.formats.archives.write_archive import ZipTemplate, describe_tensor, make_envelope
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout import Blob, Layout, Patch, Spec, StoredTensor
from ckptkit.layout.box import Box, Shape, whole

_ONLY = "0"  # the key of an item's only storage


@dataclass(frozen=True, slots=True)
class ShardItem:
    """An item of one rank's file: `nbytes` bytes from `offset`.

    `box` is the box of a tensor, or None for a non-tensor entry. `envelope` is the archive around the data; None for an
    entry that is copied unchanged.
    """

    name: str
    box: Box | None
    offset: int
    nbytes: int
    envelope: ZipTemplate | None


def items_per_rank(wanted: Layout, ranks: int) -> list[list[ShardItem]]:
    """Return the items of each rank's file in file order: non-tensor entries first, as in torch.

    Non-tensor entries and scalars go to rank 0. A tensor with one chunk in a sharded checkpoint stays unsharded, on the
    rank with the fewest bytes of such tensors, so the experts of expert parallelism are spread over all ranks.
    """
    files: list[list[ShardItem]] = [[] for _ in range(ranks)]
    for name, blob in wanted.blobs.items():
        append(files[0], name, None, blob.length, wrap_blob(name, blob))
    is_sharded = any(len(tensor.chunks) > 1 for tensor in wanted.tensors.values())
    loads = [(0, rank) for rank in range(ranks)]  # a heap of (bytes of unsharded tensors, rank)
    for name, tensor in wanted.tensors.items():
        shape = tensor.spec.shape
        if shape and is_sharded and len(tensor.chunks) == 1:
            load, rank = loads[0]
            heapreplace(loads, (load + tensor.spec.nbytes, rank))
            boxes = [(rank, whole(shape))]
        else:
            boxes = cut_rows(shape, ranks)
        for rank, box in boxes:
            envelope = wrap_chunk(name, tensor, box)
            append(files[rank], name, box, envelope.nbytes, envelope)
    return files


def append(file: list[ShardItem], name: str, box: Box | None, nbytes: int, envelope: ZipTemplate | None) -> None:
    offset = file[-1].offset + file[-1].nbytes if file else 0
    file.append(ShardItem(name, box, offset, nbytes if envelope is None else envelope.nbytes, envelope))


def cut_rows(shape: Shape, ranks: int) -> list[tuple[int, Box]]:
    """Return rank and box of each shard of dim 0: equal numbers of rows, fewer in the last, then one empty box.

    In torch every rank past the end records the same empty chunk, so one is enough.
    """
    if not shape:
        return [(0, whole(shape))]
    rows = -(-shape[0] // ranks)
    shards = []
    for rank in range(ranks):
        start = min(rank * rows, shape[0])
        box = Box((start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:]))
        shards.append((rank, box))
        if not box.size[0]:
            break
    return shards


def wrap_blob(name: str, blob: Blob) -> ZipTemplate | None:
    """Return the archive of a non-tensor entry that has only a value.

    Raises `Unsupported` if it was stored compressed.
    """
    if blob.wrapper is not None:
        hint = "save the checkpoint again without `_extensions`, or drop the entry with --exclude"
        raise Unsupported(f"stored through the transform `{blob.wrapper}`", tensor=name, hint=hint)
    return None if blob.content is None else make_envelope(blob.content, {})


def wrap_chunk(name: str, tensor: StoredTensor, box: Box) -> ZipTemplate:
    """Return the archive around the bytes of a box of a tensor."""
    try:
        return wrap(Spec(tensor.spec.dtype, box.size))
    except CkptError as error:
        raise error.blame(tensor=name) from None


@lru_cache(maxsize=4096)
def wrap(spec: Spec) -> ZipTemplate:
    """Return the archive around a tensor. It is the same for all tensors of one shape and dtype."""
    return make_envelope(dump(describe_tensor(spec, _ONLY)), {_ONLY: spec.nbytes})


@dataclass(frozen=True, slots=True)
class KnownBytes:
    """The bytes of a file that are known before its data, generated on iteration."""

    items: list[ShardItem]

    def __iter__(self) -> Iterator[Patch]:
        for item in self.items:
            for offset, content in item.envelope.parts if item.envelope else ():
                yield item.offset + offset, content


def end_of(items: list[ShardItem]) -> int:
    """Return the size of a file in bytes."""
    return items[-1].offset + items[-1].nbytes if items else 0


def crc_at(spec: Spec, offset: int) -> list[int]:
    """Return the offsets in the file of the CRC-32 of a chunk whose data is at `offset`."""
    hole = wrap(spec).holes[_ONLY]
    return [offset - hole.offset + at for at in hole.crc_at]
