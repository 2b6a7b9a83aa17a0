"""Describe zarr arrays, and find and decompress their cells. A zarr cell (chunk) is one value of the orbax tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate, count, product
from math import prod
from operator import mul, sub
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptError, Corrupt, Incomplete, Report, Unsupported, raise_problem, translate_os_errors
from ckptkit.formats.json_text import parse_json
from ckptkit.io.allocation import TemporaryFile, require_free_space
from ckptkit.io.file import OpenFiles
from ckptkit.io.local_file import open_existing_for_writing
from ckptkit.io.remote_file import Range
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor, Wrapped
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.dtypes import DTYPES
from ckptkit.plugins.orbax.values import Value, memory_store_with, read_value, translate_tensorstore_errors


def decompress_cells(layout: Layout, report: Report = raise_problem) -> Layout:
    """Return the layout with all cells decompressed into a temporary file, one cell in memory at a time.

    Reports a damaged cell and leaves it compressed. Raises `NoRoom` if the disk is too small for the tensors.
    """
    chunks = [(name, chunk) for name, tensor in layout.tensors.items() for chunk in tensor.chunks]
    stored = [(name, chunk) for name, chunk in chunks if isinstance(chunk.where, Cell)]
    *offsets, total = accumulate((chunk.box.numel * chunk.dtype.itemsize for _, chunk in stored), initial=0)
    temporary = TemporaryFile()
    require_free_space(temporary.path, total)
    with translate_os_errors(temporary.path):
        os.truncate(temporary.path, total)
    moved: dict[tuple[str, Box], Chunk] = {}
    with OpenFiles(layout.root) as files, closing(open_existing_for_writing(temporary.path)) as file:
        for (name, chunk), offset in zip(stored, offsets, strict=True):
            try:
                data = decompress_cell(chunk, files, layout.root / chunk.path)
            except CkptError as error:
                report(error.blame(path=layout.root / chunk.path, tensor=name))
                continue
            file.write_at(data, offset)
            place = str(temporary.path)
            moved[name, chunk.box] = chunk._replace(path=place, offset=offset, length=len(data), where=None)
    tensors = {
        name: replace(tensor, chunks=tuple(moved.get((name, chunk.box), chunk) for chunk in tensor.chunks))
        for name, tensor in layout.tensors.items()
    }
    return replace(layout, tensors=tensors, keeper=(layout.keeper, temporary))


ZARR = "zarr"  # wrapper name of a chunk that is a cell
_METADATA = {"zarr": ".zarray", "zarr3": "zarr.json"}
_USE_ANOTHER = "use another checkpoint"
_inline = count(1)  # a cell inside a node has no file offset: a unique negative one identifies it


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """An array: its name, the tensorstore driver that reads it, and its JSON metadata."""

    name: str
    driver: str
    metadata: bytes

    def open_with_cells(self, cells: Mapping[str, bytes]) -> Any:
        """Return the tensorstore array, with the values of `cells` by key."""
        import tensorstore

        context = tensorstore.Context()
        store = memory_store_with({_METADATA[self.driver]: self.metadata, **cells}, context)
        spec = {"driver": self.driver, "kvstore": store.spec().to_json()}
        return tensorstore.open(spec, context=context, open=True, read=True).result()


@dataclass(frozen=True, slots=True)
class Cell(Wrapped):
    """Marks a chunk as a compressed cell of an array; `content` has its bytes if they are inside an OCDBT node."""

    array: ZarrArray
    key: str
    content: bytes | None


def decompress_cell(chunk: Chunk, files: OpenFiles, path: Path) -> memoryview:
    """Return the decompressed row-major bytes of a cell in file `path`. Raises `Corrupt` if that fails."""
    cell = chunk.where
    assert isinstance(cell, Cell)
    data = read_value(Value(chunk.path, chunk.offset, chunk.length, cell.content), files)
    slices = tuple(map(slice, chunk.box.start, chunk.box.stop))
    with translate_tensorstore_errors(path, cell.array.name):
        box = cell.array.open_with_cells({cell.key: data})[slices]
        is_whole = bool(box.storage_statistics(query_fully_stored=True).result().fully_stored)
        decompressed = memoryview(box.read().result().reshape(-1).view("uint8"))
    expected = chunk.box.numel * chunk.dtype.itemsize
    if not is_whole or len(decompressed) != expected:
        message = f"expected {expected} bytes in a cell, found {len(decompressed) if is_whole else 'a part of them'}"
        raise Corrupt(message, path=path, hint=_USE_ANOTHER)
    return decompressed


def array_metadata_range(name: str, driver: str, values: Mapping[str, Value]) -> list[Range]:
    """Return the byte range of the JSON metadata of an array, if it is not inside an OCDBT node."""
    value = values.get(f"{name}/{_METADATA[driver]}")
    return [value.byte_range] if value is not None and value.content is None else []


def tensor_of_array(root: Path, name: str, driver: str, values: Mapping[str, Value], files: OpenFiles) -> StoredTensor:
    """Return the tensor of an array, with one chunk per cell.

    `values` are the values of the tree. Raises `Corrupt` if the array cannot be opened, `Incomplete` if a cell is
    missing, because zarr would fill it with zeros.
    """
    described = values.get(f"{name}/{_METADATA[driver]}")
    if described is None:
        message = f"the array does not exist: `{name}/{_METADATA[driver]}` is missing"
        raise Incomplete(message, path=root, tensor=name, hint=_USE_ANOTHER)
    path = root / described.path
    array = ZarrArray(name, driver, read_value(described, files))
    with translate_tensorstore_errors(path, name):
        opened = array.open_with_cells({})
    dtype = DTYPES.get(opened.dtype.name)
    if dtype is None:
        raise Unsupported(f"torch does not have the dtype `{opened.dtype.name}`", path=path, tensor=name)
    spec, grid = Spec(dtype, tuple(opened.shape)), tuple(opened.chunk_layout.write_chunk.shape or ())
    expected = prod(-(-extent // step) for extent, step in zip(spec.shape, grid, strict=True))
    if expected > len(values):  # before the boxes are listed: a damaged array may claim any shape
        message = f"expected {expected} chunks for shape {list(spec.shape)}, found {len(values)} in the checkpoint"
        raise Incomplete(message, path=path, tensor=name, hint=_USE_ANOTHER)
    name_cell = cell_key_function(parse_json(array.metadata, path))
    boxes = {name_cell(position): box for position, box in grid_cells(spec.shape, grid)}
    missing = [box for key, box in boxes.items() if f"{name}/{key}" not in values]
    if missing:
        lost = f"{list(missing[0].size)} elements at {list(missing[0].start)} are missing"
        message = f"expected {len(boxes)} chunks, found {len(boxes) - len(missing)}: {lost}"
        hint = "use another checkpoint, or save this one again with a newer orbax, which stores cells of zeros too"
        raise Incomplete(message, path=path, tensor=name, hint=hint)
    chunks = []
    for key, box in boxes.items():
        value = values[f"{name}/{key}"]
        offset = value.offset if value.content is None else -next(_inline)
        cell = Cell(ZARR, array, key, value.content)
        chunks.append(Chunk(box, value.path, offset, value.length, dtype, where=cell))
    return StoredTensor(spec, tuple(chunks))


def cell_key_function(described: dict[str, Any]) -> Callable[[Shape], str]:
    """Return a function that returns the key of the cell at a grid position, from the array's JSON.

    https://zarr-specs.readthedocs.io/en/latest/v3/chunk-key-encodings/
    """
    encoding = described.get("chunk_key_encoding", {})
    is_default = encoding.get("name") == "default"
    first, usual = (["c"], "/") if is_default else ([], described.get("dimension_separator", "."))
    separator = encoding.get("configuration", {}).get("separator", usual)
    return lambda position: separator.join([*first, *map(str, position)]) or "0"


def grid_cells(shape: Shape, cell_shape: Shape) -> Iterator[tuple[Shape, Box]]:
    """Yield the grid position and the box of each cell of a regular grid over a shape.

    The last cell along each axis may be smaller.
    """
    steps = (range(-(-extent // step)) for extent, step in zip(shape, cell_shape, strict=True))
    for position in product(*steps):
        start = tuple(map(mul, position, cell_shape))
        yield position, Box(start, tuple(map(min, cell_shape, map(sub, shape, start))))
