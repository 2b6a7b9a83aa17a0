"""Assign the shards of a checkpoint to ranks as FSDP2 shards a model, item by item and file by file.

Source: torch.chunk (FSDP2 uses it to split dim 0), and torch/distributed/checkpoint/filesystem.py: each rank writes its
own files. An item is an archive of torch.save, whose CRC-32 follows the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace

from ckptkit.errors import CkptError, Unsupported
from ckptkit.formats.archives.write_archive import ZipTemplate, make_zip_template, tensor_rebuild_record
from ckptkit.formats.dcp.read_metadata import tensors_file_name
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.io.crc32 import combine_crc32, crc32
from ckptkit.layout import Layout, Patch, Spec, StoredTensor
from ckptkit.layout.box import Box, Shape, full_box

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


def items_by_file(wanted: Layout, ranks: int) -> dict[str, list[ShardItem]]:
    return {tensors_file_name(rank): items for rank, items in enumerate(items_per_rank(wanted, ranks))}


def items_per_rank(wanted: Layout, ranks: int) -> list[list[ShardItem]]:
    """Return the items of each rank's file in file order: non-tensor entries first, as in torch.

    Non-tensor entries and scalars go to rank 0. A tensor with one chunk in a sharded checkpoint stays unsharded, on the
    rank with the fewest bytes of such tensors, so the experts of expert parallelism are spread over all ranks.
    """
    files: list[list[ShardItem]] = [[] for _ in range(ranks)]
    for name, blob in wanted.blobs.items():
        if blob.wrapper is not None:
            hint = "save the checkpoint again without `_extensions`, or drop the entry with --exclude"
            raise Unsupported(f"stored through the transform `{blob.wrapper}`", tensor=name, hint=hint)
        envelope = None if blob.content is None else make_zip_template(blob.content, {})
        append_item(files[0], name, None, blob.length if envelope is None else envelope.nbytes, envelope)
    is_sharded = any(len(tensor.chunks) > 1 for tensor in wanted.tensors.values())
    loads = [(0, rank) for rank in range(ranks)]  # a heap of (bytes of unsharded tensors, rank)
    for name, tensor in wanted.tensors.items():
        shape = tensor.spec.shape
        if shape and is_sharded and len(tensor.chunks) == 1:
            load, rank = loads[0]
            heapreplace(loads, (load + tensor.spec.nbytes, rank))
            boxes = [(rank, full_box(shape))]
        else:
            boxes = row_shards(shape, ranks)
        for rank, box in boxes:
            envelope = template_of_chunk(name, tensor, box)
            append_item(files[rank], name, box, envelope.nbytes, envelope)
    return files


def append_item(file: list[ShardItem], name: str, box: Box | None, nbytes: int, envelope: ZipTemplate | None) -> None:
    file.append(ShardItem(name, box, size_of_file(file), nbytes, envelope))


def row_shards(shape: Shape, ranks: int) -> list[tuple[int, Box]]:
    """Return rank and box of each shard of dim 0: equal numbers of rows, fewer in the last, then one empty box.

    In torch every rank past the end records the same empty chunk, so one is enough.
    """
    if not shape:
        return [(0, full_box(shape))]
    rows = -(-shape[0] // ranks)
    shards = []
    for rank in range(ranks):
        start = min(rank * rows, shape[0])
        box = Box((start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:]))
        shards.append((rank, box))
        if not box.size[0]:
            break
    return shards


def template_of_chunk(name: str, tensor: StoredTensor, box: Box) -> ZipTemplate:
    try:
        return template_of_spec(Spec(tensor.spec.dtype, box.size))
    except CkptError as error:
        raise error.blame(tensor=name) from None


@lru_cache(maxsize=4096)
def template_of_spec(spec: Spec) -> ZipTemplate:
    """Return the archive around a tensor. It is the same for all tensors of one shape and dtype."""
    return make_zip_template(dump(tensor_rebuild_record(spec, _ONLY)), {_ONLY: spec.nbytes})


@dataclass(frozen=True, slots=True)
class KnownBytes:
    """The bytes of a file that are known before its data, generated on iteration."""

    items: list[ShardItem]

    def __iter__(self) -> Iterator[Patch]:
        for item in self.items:
            for offset, content in item.envelope.parts if item.envelope else ():
                yield item.offset + offset, content


def size_of_file(items: list[ShardItem]) -> int:
    return items[-1].offset + items[-1].nbytes if items else 0


def bytes_around_data(template: ZipTemplate, checksum: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after a tensor's data. Only those after it depend on its CRC-32, `checksum`."""
    (_, head), (start, known) = template.parts
    (hole,) = template.holes.values()
    tail = bytearray(known)
    for at in hole.crc_offsets:
        tail[at - start : at - start + 4] = checksum.to_bytes(4, "little")
    return head, bytes(tail)


def checksum_of_items(items: Iterable[ShardItem], checksums: Mapping[int, int]) -> int:
    """Return the CRC-32 of a file of items. `checksums` has the CRC-32 of each tensor's data, by its item's offset."""
    total = 0
    for item in items:
        assert item.envelope is not None
        checksum = checksums[item.offset]
        head, tail = bytes_around_data(item.envelope, checksum)
        total = crc32(head, total)
        total = combine_crc32(total, checksum, item.nbytes - len(head) - len(tail))
        total = crc32(tail, total)
    return total
