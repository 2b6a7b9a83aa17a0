"""Read the files of a Hugging Face model by their headers alone, for an index or a header that is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.formats.safetensors_headers import load_raw_header, parse_header_entry, read_shard_starts, require_no_gaps
from ckptkit.io.file import names_in
from ckptkit.layout import Layout, Spec, StoredTensor

_SUFFIX = ".safetensors"
_SERIES = re.compile(r"(.*?)[-_.]?([0-9]+)-of-([0-9]+)(.*)")  # such as `model-00001-of-00002.safetensors`


@dataclass(frozen=True, slots=True)
class HeaderFiles:
    """The tensors in the headers of a directory, and entries without elements. `is_series`: numbered and complete."""

    layout: Layout
    empty: Mapping[str, str]  # the file of each entry
    is_series: bool


def find_layout_in_headers(root: Path, format_name: str) -> HeaderFiles | None:
    """Return the contents of all safetensors files in a directory as a layout of the format `format_name`.

    Returns None if that is ambiguous: two files have a tensor of one name, or a rank wrote only its shards.
    """
    tensors: dict[str, StoredTensor] = {}
    empty: dict[str, str] = {}
    files = set()
    for file in sorted(file for file in names_in(root) if file.endswith(_SUFFIX)):
        header, start, size = load_raw_header(root / file)
        if read_shard_starts(header.pop("__metadata__", None), root / file):
            return None
        dropped = {key for key, entry in header.items() if is_empty_header_entry(entry)}
        chunks = {
            key: parse_header_entry(key, header[key], None, root / file, start) for key in header.keys() - dropped
        }
        require_no_gaps(chunks, root / file, start, size)
        if chunks.keys() & tensors.keys():
            return None
        for key, chunk in sorted(chunks.items()):
            tensors[key] = StoredTensor(Spec(chunk.dtype, chunk.size), (chunk,))
        empty |= dict.fromkeys(dropped, file)
        files |= {file} if chunks else set()
    matches = [match for file in files if (match := _SERIES.fullmatch(file))]
    kinds = {(match[1], int(match[3]), match[4]) for match in matches}
    numbers = {int(match[2]) for match in matches}
    is_numbered = len(matches) == len(files) and numbers == set(range(1, len(files) + 1))
    is_series = is_numbered and len(kinds) == 1 and next(iter(kinds))[1] == len(files)
    return HeaderFiles(Layout(root, format_name, tensors), empty, is_series)


def is_empty_header_entry(entry: Any) -> bool:
    """Return whether an entry is empty, without dtype and elements, like torch's `_FqnData` before it is filled."""
    if not isinstance(entry, dict) or entry.get("dtype") != "":
        return False
    offsets = entry.get("data_offsets")
    return isinstance(offsets, list) and len(offsets) == 2 and offsets[0] == offsets[1]
