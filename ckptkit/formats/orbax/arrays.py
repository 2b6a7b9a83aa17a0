"""Open arrays of zarr with tensorstore, and find their cells: boxes that are each one compressed piece.

Source: google/tensorstore, its drivers `zarr`, `zarr3` and `ocdbt`. Cells have no checksums; the nodes of OCDBT that
say where cells lie have a CRC-32C, which tensorstore compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, product
from math import prod
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, Incomplete, Unsupported
from ckptkit.files.joined import JoinedPath
from ckptkit.files.path import RemotePath
from ckptkit.layout import Chunk, Spec, StoredTensor, Wrapped
from ckptkit.tensors.box import Box
from ckptkit.tensors.dtypes import DTYPES

MANIFEST = "manifest.ocdbt"
ZARR = "zarr"  # the wrapper of a chunk that is a cell
_CACHE = 1 << 26  # bytes of nodes and cells that tensorstore keeps
_FILES = {"zarr": ".zarray", "zarr3": "zarr.json"}


@dataclass(frozen=True, slots=True)
class Cell(Wrapped):
    """The bytes are those of a box of an array, which tensorstore reads through one of its drivers."""

    array: str
    driver: str
    box: Box


class Arrays:
    """The arrays of a checkpoint, each opened once."""

    def __init__(self, root: Path) -> None:
        if isinstance(root, RemotePath | JoinedPath):
            hint = "copy the checkpoint to a local directory first"
            raise Unsupported("arrays of zarr, not in one local directory", path=root, hint=hint)
        try:
            import tensorstore
        except ImportError as error:
            hint = "run `pip install 'ckptkit-fsdp[orbax]'`"
            raise Unsupported("orbax's arrays need the package `tensorstore`", path=root, hint=hint) from error
        self._root = root.absolute()
        self._library: Any = tensorstore
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE}})
        self._opened: dict[tuple[str, str], Any] = {}
        self._cells = count(1)  # no file shows where a cell lies in it: an offset below 0 tells it from others

    def describe(self, name: str, driver: str, *, is_ocdbt: bool, stored: int) -> StoredTensor:
        """Return the tensor that an array is, with a chunk for each cell. The files of the tree have `stored` bytes.

        Raises `Corrupt` if it cannot be opened, `Incomplete` for a cell that is not there: to zarr it would be zeros.
        """
        file = MANIFEST if is_ocdbt else f"{name}/{_FILES[driver]}"
        array = self.open(file, name, driver)
        dtype = DTYPES.get(array.dtype.name)
        if dtype is None:
            message = f"torch does not have the dtype `{array.dtype.name}`"
            raise Unsupported(message, path=self._root / file, tensor=name)
        shape = tuple(array.shape)
        grid = tuple(array.chunk_layout.read_chunk.shape or ())
        expected = prod(-(-extent // step) for extent, step in zip(shape, grid, strict=True))
        if expected > stored:  # each cell takes a byte at least
            message = f"expected {expected} cells, found {stored} bytes in all files"
            raise Incomplete(message, path=self._root / file, tensor=name, hint="use another checkpoint")
        boxes = list(cells(shape, grid))
        self.check_stored(array, name, file, boxes)
        chunks = (Chunk(box, file, -next(self._cells), 0, dtype, where=Cell(ZARR, name, driver, box)) for box in boxes)
        return StoredTensor(Spec(dtype, shape), tuple(chunks))

    def open(self, file: str, name: str, driver: str) -> Any:
        """Return the array, by the file that chunks of it name: the manifest of OCDBT, or what describes it alone."""
        if (file, name) not in self._opened:
            place = self._root / file
            store: dict[str, Any] = {"driver": "file", "path": f"{place.parent}/"}
            if place.name == MANIFEST:
                store = {"driver": "ocdbt", "base": store, "path": f"{name}/"}
            with naming(place, name):
                opened = self._library.open(
                    {"driver": driver, "kvstore": store}, context=self._context, open=True, read=True
                )
                self._opened[file, name] = opened.result()
        return self._opened[file, name]

    def check_stored(self, array: Any, name: str, file: str, boxes: list[Box]) -> None:
        """Raise `Incomplete` for the first cell that no file has."""
        with naming(self._root / file, name):
            if is_stored(array):
                return
            missing = [box for box in boxes if not is_stored(array[slices(box)])]
        first = missing[0]
        message = (
            f"expected {len(boxes)} cells, found {len(boxes) - len(missing)}: "
            f"{list(first.size)} elements at {list(first.start)} are missing"
        )
        hint = "use another checkpoint, or save this one again with a newer orbax, which stores cells of zeros too"
        raise Incomplete(message, path=self._root / file, tensor=name, hint=hint)

    def read(self, file: str, cell: Cell) -> bytes:
        """Return the bytes of a cell, row-major. Raises `Corrupt` if it cannot be decompressed."""
        with naming(self._root / file, cell.array):
            return bytes(self.open(file, cell.array, cell.driver)[slices(cell.box)].read().result().tobytes())


def is_stored(array: Any) -> bool:
    return bool(array.storage_statistics(query_fully_stored=True).result().fully_stored)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))


def cells(shape: tuple[int, ...], grid: tuple[int, ...]) -> Iterator[Box]:
    """Yield the boxes that a regular grid cuts a shape in; the last along each axis may be smaller."""
    starts = (range(0, extent, step) for extent, step in zip(shape, grid, strict=True))
    for start in product(*starts):
        yield Box(start, tuple(map(min, grid, (extent - a for extent, a in zip(shape, start, strict=True)))))


@contextmanager
def naming(path: Path, name: str) -> Iterator[None]:
    """Turn what tensorstore raises into a `Corrupt` that names the file and the tensor."""
    try:
        yield
    except (KeyError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition(" [tensorstore_spec")[0].partition(" [source")[0]
        hint = "use another checkpoint"
        raise Corrupt(f"tensorstore cannot read it: {reason}", path=path, tensor=name, hint=hint) from error
