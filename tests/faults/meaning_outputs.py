"""Look for things in what a command made: bytes of tensors in any file, and values by torch's own loaders.

Reads by torch, safetensors and plain files alone.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tests.faults.subjects import inert

_SAVED = frozenset({".pt", ".pth", ".bin", ".ckpt", ".pkl"})
_PIECES = (1, 2, 3)  # in which the ranks of an output may have a row of a tensor of one dimension


@dataclass(frozen=True)
class Output:
    """Everything below a path."""

    root: Path

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The content of every file by its path below the root; of a single file by its name."""
        if self.root.is_file():
            return {self.root.name: self.root.read_bytes()}
        found = sorted(path for path in self.root.rglob("*") if path.is_file())
        return {str(path.relative_to(self.root)): path.read_bytes() for path in found}

    @cached_property
    def values(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Every leaf of what torch.save and DCP wrote, with the keys that lead to it."""
        found = [
            leaf for name, raw in self.files.items() if Path(name).suffix in _SAVED for leaf in _leaves(_load(raw))
        ]
        roots = [path.parent for path in self.root.rglob(".metadata")] if self.root.is_dir() else []
        return found + [leaf for root in roots for leaf in _dcp_leaves(root)]

    def is_mtp_tensor(self, value: Tensor) -> bool:
        """True if every row of a tensor is in some file, in its dtype or rounded to another."""
        return any(all(self._has_row(row) for row in rows) for rows in _spellings(value))

    def _has_row(self, row: Tensor) -> bool:
        return any(all(map(self._has_bytes, _bytes_of(row, pieces))) for pieces in _PIECES)

    def _has_bytes(self, row: bytes) -> bool:
        return any(row in content for content in self.files.values())

    def has_bytes(self, content: bytes) -> bool:
        """True if a file has exactly this content."""
        return content in self.files.values()

    def has_value(self, path: tuple[Any, ...], value: Any) -> bool:
        """True if a value of this type is under keys that end so, each of the same type too.

        DCP makes text of keys and takes every mapping apart, as torch's own planner does.
        """
        if any(_same_end(keys, path) and _same(found, value) for keys, found in self.values):
            return True
        if not self._is_dcp:
            return False
        if isinstance(value, Mapping):
            return all(self.has_value((*path, key), member) for key, member in value.items())
        texts = tuple(map(str, path))
        return any(_same_end(tuple(map(str, keys)), texts) and _same(found, value) for keys, found in self.values)

    @property
    def _is_dcp(self) -> bool:
        return (self.root / ".metadata").exists()


def rows_of(value: Tensor) -> list[bytes]:
    """The bytes of each row along the last dimension."""
    return [row for each in _rows(value) for row in _bytes_of(each, 1)]


def _rows(value: Tensor) -> list[Tensor]:
    flat = value.detach().contiguous()
    return list(flat.reshape(-1, flat.shape[-1])) if flat.dim() else [flat.reshape(1)]


def _bytes_of(row: Tensor, pieces: int) -> list[bytes]:
    return [piece.contiguous().view(torch.uint8).numpy().tobytes() for piece in row.chunk(pieces)]


def _spellings(value: Tensor) -> Iterator[list[Tensor]]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if value.is_floating_point() else ()
    for dtype in dict.fromkeys((value.dtype, *dtypes)):
        yield _rows(value.to(dtype))


def _load(raw: bytes) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(io.BytesIO(raw), weights_only=True)
        except Exception:  # noqa: BLE001 - of whichever kind
            pass
        try:
            return torch.load(io.BytesIO(raw), weights_only=False, pickle_module=inert)
        except Exception:  # noqa: BLE001
            return None


def _dcp_leaves(root: Path) -> Iterator[tuple[tuple[Any, ...], Any]]:
    metadata = FileSystemReader(root).read_metadata()
    for index, place in metadata.storage_data.items():
        path = tuple((metadata.planner_data or {}).get(index.fqn, (index.fqn,)))
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            content = (root / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
            yield from ((path + keys, value) for keys, value in _leaves(_load(content)))
        else:
            yield path, metadata.state_dict_metadata[index.fqn]


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, tree
    pairs: Any = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, branch in pairs:
        yield from _leaves(branch, (*path, key))


def _same_end(keys: tuple[Any, ...], end: tuple[Any, ...]) -> bool:
    last = keys[-len(end) :]
    return len(last) == len(end) and all(_same(one, other) for one, other in zip(last, end, strict=True))


def _same(one: Any, other: Any) -> bool:
    if isinstance(other, Tensor):
        shape = getattr(one, "shape", getattr(one, "size", None))
        dtype = getattr(one, "dtype", getattr(getattr(one, "properties", None), "dtype", None))
        return dtype == other.dtype and tuple(shape or ()) == tuple(other.shape)
    if isinstance(one, dict) and isinstance(other, dict):
        return one == other  # an OrderedDict or a dict
    return type(one) is type(other) and bool(one == other)


def words_of(said: str) -> str:
    """What a command said, without the list of all that it wrote in its JSON: to be listed there is to be written."""
    if not said.startswith("{"):
        return said
    told: dict[str, Any] = json.loads(said)
    if "output" in told:
        told.pop("tensors", None)
        if isinstance(told.get("entries"), dict):
            told["entries"].pop("written", None)
    return json.dumps(told)


def pickled(value: Any) -> bytes:
    """A value as pickle writes it."""
    return pickle.dumps(value)
