"""Metadata of many chunks, read in tables: the same layout, or the same refusal, as without them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptkit.errors import CkptError
from ckptkit.formats.dcp.read_metadata import Reading, read_metadata
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.inert_pickle import InstanceTable
from ckptkit.formats.pickles.tables import decode_opcodes, fetched_memo_indices, has_many_instances
from ckptkit.layout import Layout

RANKS = 150
SHAPES = {
    "embed.weight": (70_000 * RANKS, 8),
    "a name of more than 96 characters, which is stepped over alone: " + "x" * 80: (RANKS, 3),
    "größe.bias": (40 * RANKS,),
    "conv.weight": (RANKS, 2, 3, 5),
    "cube": (RANKS, 2**33, 1),
}
SHARDED = len(SHAPES) * RANKS
Of = Callable[[Any], Any]  # what a writer has of a value: itself, or a copy


def copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def same(value: Any) -> Any:
    return value


def make(name_of: Of, path_of: Of, size_of: Of, *, transforms: bool = False, index: int | None = 0) -> Metadata:
    """Return what the coordinator of many ranks gathers: texts and sizes that are shared, or copies."""
    metadata = Metadata({}, planner_data={}, storage_data={})
    paths = {rank: f"__{rank}_0.distcp" for rank in range(RANKS)}
    for number, (name, shape) in enumerate(SHAPES.items()):
        chunks = []
        for rank in range(RANKS):
            size = torch.Size([shape[0] // RANKS, *shape[1:]])
            start = torch.Size([rank * size[0], *[0] * (len(shape) - 1)])
            chunks.append(ChunkStorageMetadata(start, size_of(size)))
            info = _StorageInfo(path_of(paths[rank]), (rank % 3) << (8 * (rank % 6)), 1000 + number)
            if transforms and rank % 50 == 7:
                info.transform_descriptors = ["zstd"]
            metadata.storage_data[MetadataIndex(name_of(name), size_of(start), index and rank)] = info
        properties = TensorProperties(dtype=torch.float32)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    scalar = torch.Size([])
    metadata.state_dict_metadata["step"] = TensorStorageMetadata(
        TensorProperties(dtype=torch.int64), scalar, [ChunkStorageMetadata(scalar, scalar)]
    )
    metadata.storage_data[MetadataIndex("step", scalar, 0)] = _StorageInfo(paths[0], 5, 6)
    return metadata


KINDS = {
    "copies": partial(make, copy, copy, copy),
    "paths are shared": partial(make, copy, same, copy),
    "all is shared": partial(make, same, same, same),
    "some are compressed": partial(make, copy, same, copy, transforms=True),
    "without numbers": partial(make, copy, same, copy, index=None),
}


def read(data: bytes, tmp_path: Path, least: int, monkeypatch: pytest.MonkeyPatch) -> Layout | str:
    """Return the layout that a pickle describes, or the error; with tables if it has `least` bytes."""
    monkeypatch.setattr(inert_pickle, "TABLES_FROM", least)
    (tmp_path / ".metadata").write_bytes(data)
    reading = Reading(tmp_path)
    try:
        reading.add_metadata(read_metadata(tmp_path / ".metadata"), tmp_path / ".metadata")
        return reading.to_layout("dcp")
    except CkptError as error:
        return str(error)


def count_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each table of the test adds how many rows it has."""
    counts: list[int] = []
    make_table = InstanceTable.__init__

    def counting(self: InstanceTable, sides: Any) -> None:
        counts.append(len(next(iter(sides[0].values()))))
        make_table(self, sides)

    monkeypatch.setattr(InstanceTable, "__init__", counting)
    return counts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_tables_say_the_same(kind: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(KINDS[kind](), protocol)
    rows = count_rows(monkeypatch)
    expected = read(data, tmp_path, 1 << 40, monkeypatch)
    assert isinstance(expected, Layout)
    assert not rows
    assert read(data, tmp_path, 0, monkeypatch) == expected
    if protocol > 2 and kind != "all is shared":
        assert sum(rows) > 1000  # of 750 chunks and 750 places
    else:
        assert (protocol > 2) == bool(rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["copies", "paths are shared"])
def test_damage_is_found_as_without_tables(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, random = pickle.dumps(KINDS[kind](), 4), Random(kind)
    for _ in range(80):
        damaged = bytearray(data)
        damaged[random.randrange(len(data))] = random.choice([0, 1, 0x28, 0x68, 0x6A, 0x94, random.randrange(256)])
        expected = read(bytes(damaged), tmp_path, 1 << 40, monkeypatch)
        assert read(bytes(damaged), tmp_path, 0, monkeypatch) == expected


def test_a_dict_of_instances_of_one_class_is_read_without_tables(tmp_path: Path) -> None:
    entries = {MetadataIndex("x", torch.Size([n])): MetadataIndex("y", torch.Size([n])) for n in range(300)}
    data = pickle.dumps(Metadata({}, planner_data={}, storage_data=entries))
    (tmp_path / ".metadata").write_bytes(data + bytes(inert_pickle.TABLES_FROM))
    assert len(read_metadata(tmp_path / ".metadata")["storage_data"]) == 300


def test_few_chunks_a_tensor_are_read_without_tables() -> None:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    for chunks, is_worth in ((1, False), (3, False), (300, True)):
        lists = [
            [ChunkStorageMetadata(chunk.offsets, chunk.sizes) for _ in range(chunks)] for _ in range(20_000 // chunks)
        ]
        assert has_many_instances(pickle.dumps(lists, 4), 0) is is_worth


def test_every_fetch_of_a_pickle_is_found() -> None:
    shared = [f"text {n}" for n in range(3000)]
    data = pickle.dumps([shared, [shared[n] for n in (300, 0x6A6A % 3000, 2999)], "proj", shared[1000]], 4)
    fetched = {int.from_bytes(data[i + 1 : i + 5], "little") for i in range(len(data)) if data[i] == 0x6A}
    assert {place for place in fetched if place < 3010} <= set(fetched_memo_indices(data, 0))


def test_values_of_opcodes() -> None:
    for value in (0, 255, 256, 65_535, 65_536, -1, 2**31 - 1, 2**31, 2**40, None, "größe"):
        opcodes = pickle.dumps(value, 4)[2:-1]
        assert decode_opcodes(opcodes[9:] if opcodes[:1] == b"\x95" else opcodes) == value  # without its frame
    assert decode_opcodes(b")") == ()
    assert decode_opcodes(b"K\x01M\x00\x02J\x00\x00\x01\x00\x87\x94") == (1, 512, 65_536)
    assert decode_opcodes(b"(K\x01K\x02K\x03\x8a\x05\x00\x00\x00\x00\x01t\x94") == (1, 2, 3, 2**32)
