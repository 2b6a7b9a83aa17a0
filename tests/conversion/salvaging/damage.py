"""Damage to checkpoints, and the brute-force judge of what may be saved of them. ckptkit is not imported here."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.producers import Truth


def flip(file: Path, offset: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 1 << bit
    file.write_bytes(data)


def cut(file: Path, size: int) -> None:
    """Leave the first bytes of a file."""
    file.write_bytes(file.read_bytes()[:size])


def bytes_of_tensors(root: Path) -> dict[str, list[tuple[str, int, int]]]:
    """By name the runs of bytes of each tensor of a DCP directory that hold its numbers: file, start and stop.

    Found by looking for the storage of each item in the file as torch writes it, `*/data/0`.
    """
    metadata = FileSystemReader(root).read_metadata()
    found: dict[str, list[tuple[str, int, int]]] = {}
    for index, place in metadata.storage_data.items():
        if not isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            continue
        item = (root / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        archive = zipfile.ZipFile(io.BytesIO(item))
        entry = next((one for one in archive.infolist() if one.filename.endswith("/data/0")), None)
        if entry is None or not entry.file_size:
            continue
        names = int.from_bytes(item[entry.header_offset + 26 : entry.header_offset + 28], "little")
        extra = int.from_bytes(item[entry.header_offset + 28 : entry.header_offset + 30], "little")
        start = place.offset + entry.header_offset + 30 + names + extra
        found.setdefault(index.fqn, []).append((place.relative_path, start, start + entry.file_size))
    return found


def items_of_tensors(root: Path) -> dict[str, list[tuple[str, int, int]]]:
    """By name the items of each entry of a DCP directory: file, start and stop."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for index, place in FileSystemReader(root).read_metadata().storage_data.items():
        found.setdefault(index.fqn, []).append((place.relative_path, place.offset, place.offset + place.length))
    return found


def names_in(places: Mapping[str, Iterable[tuple[str, int, int]]], file: str, start: int, stop: int) -> set[str]:
    """The names that have bytes in a range of a file."""
    return {
        name
        for name, runs in places.items()
        if any(path == file and low < stop and start < high for path, low, high in runs)
    }


def load_dcp(root: Path) -> Truth:
    """Every tensor of a DCP directory, by torch."""
    metadata = FileSystemReader(root).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.load(state, storage_reader=FileSystemReader(root), no_dist=True)
    return state


def load_hf(root: Path) -> Truth:
    """Every tensor of a directory of safetensors, by the library."""
    return {name: tensor for file in sorted(root.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def forget_place(root: Path, name: str) -> None:
    """Take one chunk's place out of the metadata of a DCP directory."""
    with (root / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    index = next(index for index in metadata.storage_data if index.fqn == name)
    del metadata.storage_data[index]
    with (root / ".metadata").open("wb") as file:
        pickle.dump(metadata, file, protocol=4)


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor's numbers."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_truth(found: Truth, truth: Truth) -> None:
    """Every tensor is the true one to the last bit."""
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (truth[name].dtype, truth[name].shape), name
        assert bits(tensor) == bits(truth[name]), name
