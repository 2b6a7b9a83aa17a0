"""Read the value of a non-tensor entry, or replace it, without running code.

The groups of an optimizer's state dict are as in torch/optim/optimizer.py, `state_dict`: parameters have indices that
count through all groups, or names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptkit.errors import errors_at
from ckptkit.formats.archives.flatten import contains_weights, find_dict_items
from ckptkit.formats.archives.locate import ZSTD
from ckptkit.formats.archives.zip_entries import ReadAt, read_central_directory, read_entry_content
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.inert_pickle import ANY_NAME
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.io.file import OpenFiles, opening, read_at
from ckptkit.layout import Blob

_SMALLEST_READ = 1 << 13  # bytes: more than the state of a random generator, which every rank may have saved


def load_value(root: Path, blob: Blob) -> Any:
    """Return the value of a blob in directory `root`, as `inert_pickle.load` gives it."""
    if blob.content is not None:
        return inert_pickle.load(blob.content, ANY_NAME)[0]
    with errors_at(path=root / blob.path):
        return load_archived_value(*blob_reader(root, blob))


def load_archived_value(read: ReadAt, length: int) -> Any:
    data = read_entry_content(read, read_central_directory(read, length), "data.pkl", limit=length)
    return inert_pickle.load(data, ANY_NAME)[0]


def has_weights_inside(root: Path, blob: Blob) -> bool:
    """Return whether a blob contains weights, as `contains_weights` says. Small and compressed blobs are not read."""
    if blob.content is not None or blob.wrapper or blob.length < _SMALLEST_READ:
        return False
    with errors_at(path=root / blob.path), opening(root / blob.path) as file:
        return contains_weights(
            load_archived_value(lambda offset, length: read_at(file, length, blob.offset + offset), blob.length)
        )


def blob_reader(root: Path, blob: Blob) -> tuple[ReadAt, int]:
    """Return a function that reads from a blob, and its size. The blob is read, and decompressed, at once."""
    if blob.wrapper == ZSTD:
        from ckptkit.formats.archives.zstd import decompress, make_decompressor  # few checkpoints are compressed

        with OpenFiles(root) as files:
            data = b"".join(decompress(blob, files, make_decompressor(root)))
    else:
        with opening(root / blob.path) as file:
            data = read_at(file, blob.length, blob.offset)
    return lambda offset, length: data[offset : offset + length], len(data)


def with_new_value(blob: Blob, value: Any) -> Blob:
    return blob._replace(length=0, content=dump(value), where=None)


def find_parameter_indices_by_group(value: Any) -> list[list[int]] | None:
    """Return the parameter indices in each group of an optimizer's state dict; None if it has names instead."""
    numbers = find_group_values(value, "params")
    if numbers is None or not all(
        isinstance(in_group, list) and all(type(n) is int for n in in_group) for in_group in numbers
    ):
        return None
    return [list(in_group) for in_group in numbers]


def find_group_values(value: Any, key: str) -> list[Any] | None:
    """Return the value of `key` in each group of an optimizer's state dict, None where missing; None without groups."""
    groups = dict(find_dict_items(value) or ()).get("param_groups")
    if not isinstance(groups, list):
        return None
    return [dict(find_dict_items(group) or ()).get(key) for group in groups]
