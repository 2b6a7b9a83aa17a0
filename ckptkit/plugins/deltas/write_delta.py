"""Write a delta in ckptkit's own format: safetensors with the changes, `delta.json` and a manifest."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple, Self

from ckptkit.checkpoints.finalize_files import create_files, write_manifest
from ckptkit.engine.copy import copy_by_plan, verify_copy
from ckptkit.errors import translate_os_errors
from ckptkit.formats import locate_all_chunks
from ckptkit.formats.safetensors_headers import (
    check_header_with_library,
    make_header,
    read_header_chunks,
    require_storable_spec,
)
from ckptkit.io.allocation import require_free_space, write_new_file
from ckptkit.io.crc32 import crc32
from ckptkit.io.file import OpenFiles
from ckptkit.layout import FileOffset, Layout, NewFile, Spec, StoredTensor
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.plan import make_plan
from ckptkit.plugins.deltas.chain import identity_of_model
from ckptkit.plugins.deltas.changes import Changes, count_nan
from ckptkit.plugins.deltas.open_delta import INDICES, VALUES, WHOLE, index_dtype, is_full_tensor_smaller
from ckptkit.plugins.deltas.record import RECORD, DeltaRecord, DeltaTensor

Fill = Callable[[Layout, Mapping[str, str]], dict[FileOffset, int]]

_FILE_BYTES = 5 * 10**9  # tensor data per file, unless a single tensor is larger


class SpooledBlock(NamedTuple):
    """The changes of one block: the first element of the block, their number, and their byte offset in the spool."""

    first: int
    number: int
    offset: int


class Spool:
    """Changed elements of the tensors in `specs`, in a file at `path`; without a path, they are only counted.

    Changes of a tensor are dropped once storing the full tensor takes less space.
    """

    def __init__(self, path: Path | None, specs: Mapping[str, Spec]) -> None:
        self._path = path
        self._specs = specs
        self._blocks: dict[str, list[SpooledBlock]] = defaultdict(list)
        self._end = 0
        self.changed: Counter[str] = Counter()
        self.nan = 0
        self._file: IO[bytes] = io.BytesIO()
        if path is not None:
            with translate_os_errors(path):
                self._file = path.open("w+b")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add_block_changes(self, name: str, first: int, changes: Changes) -> None:
        """Add the changes of the block that begins at element `first`; positions count from the start of the block."""
        if not len(changes.positions):
            return
        spec = self._specs[name]
        self.changed[name] += len(changes.positions)
        self.nan += count_nan(changes.values, spec.dtype.name)
        if self._path is None or is_full_tensor_smaller(spec, self.changed[name]):
            # the full tensor will be stored instead, so its blocks are not needed
            self._blocks.pop(name, None)
            return
        positions = (changes.positions + first).astype(index_dtype(spec))
        with translate_os_errors(self._path):
            self._file.seek(self._end)
            self._file.write(positions.tobytes())
            self._file.write(changes.values.tobytes())
        self._blocks[name].append(SpooledBlock(first, len(changes.positions), self._end))
        self._end += positions.nbytes + changes.values.nbytes

    def read_tensor_changes(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield positions and values of a tensor's changes, in element order."""
        spec = self._specs[name]
        width = 4 if index_dtype(spec) == "int32" else 8
        for block in sorted(self._blocks[name]):
            with translate_os_errors(self._path or "."):
                self._file.seek(block.offset)
                positions = self._file.read(block.number * width)
                values = self._file.read(block.number * spec.dtype.itemsize)
            yield positions, values


@dataclass(frozen=True, slots=True)
class FoundChanges:
    """The input of a delta: the tensors, their checksums before and after, and the changed elements.

    `fill` writes the data of full tensors into a layout and returns the CRC-32 of each; its second argument maps each
    key to the tensor name.
    """

    specs: Mapping[str, Spec]
    sums_before: Mapping[str, int]
    sums_after: Mapping[str, int]
    spool: Spool
    fill: Fill

    @property
    def payload_specs_by_tensor(self) -> dict[str, dict[str, Spec]]:
        """Return the tensors, by key, that the delta stores for each changed tensor."""
        stored: dict[str, dict[str, Spec]] = {}
        for name, spec in self.specs.items():
            changed = self.spool.changed[name]
            if changed and is_full_tensor_smaller(spec, changed):
                stored[name] = {name + WHOLE: spec}
            elif changed:
                positions = Spec(DTYPES[index_dtype(spec)], (changed,))
                stored[name] = {name + INDICES: positions, name + VALUES: Spec(spec.dtype, (changed,))}
        return stored

    @property
    def payload_bytes(self) -> int:
        return sum(
            spec.nbytes for tensor_specs in self.payload_specs_by_tensor.values() for spec in tensor_specs.values()
        )

    def make_record(self, files: Mapping[str, str]) -> DeltaRecord:
        """Return the record of the delta; `files` maps each changed tensor to its file."""
        specs = self.specs
        tensors = {
            name: DeltaTensor(
                specs[name], self.spool.changed[name], file, self.sums_before[name], self.sums_after[name]
            )
            for name, file in files.items()
        }
        return DeltaRecord(
            base=identity_of_model(specs, self.sums_before),
            new=identity_of_model(specs, self.sums_after),
            tensors=tensors,
            unchanged=len(specs) - len(tensors),
            elements=sum(spec.numel for spec in specs.values()),
            nbytes=sum(spec.nbytes for spec in specs.values()),
        )


def write_delta(root: Path, difference: FoundChanges, source: Mapping[str, str] | None = None) -> DeltaRecord:
    """Write a delta into the existing directory `root`, and return its record."""
    payload = difference.payload_specs_by_tensor
    for specs in payload.values():
        for key, spec in specs.items():
            require_storable_spec(key, spec)
    files = split_payload_into_files(payload)
    require_free_space(root, difference.payload_bytes)
    new_files = []
    for file, names in files.items():
        specs_in_file = {key: spec for name in names for key, spec in payload[name].items()}
        header = make_header(specs_in_file)
        nbytes = len(header) + sum(spec.nbytes for spec in specs_in_file.values())
        new_files.append(NewFile(file, nbytes, ((0, header),)))
    create_files(root, new_files, must_be_new=True)
    chunks = {key: chunk for file in files for key, chunk in read_header_chunks(root / file).items()}
    tensors = {key: StoredTensor(Spec(chunk.dtype, chunk.size), (chunk,)) for key, chunk in chunks.items()}
    layout = Layout(root, "hf", tensors)
    sums = write_changed_elements(layout, difference)
    full = {key: key.removesuffix(WHOLE) for key in layout.tensors if key.endswith(WHOLE)}
    if full:
        sums |= difference.fill(replace(layout, tensors={key: layout.tensors[key] for key in full}), full)
    for file in files:
        check_header_with_library(root / file, {key: chunk for key, chunk in chunks.items() if chunk.path == file})
    record = difference.make_record({name: file for file, names in files.items() for name in names})
    write_new_file(root / RECORD, record.to_bytes(difference.payload_bytes))
    write_manifest(layout, sums, [*files, RECORD], must_be_new=True, source=source)
    return record


def split_payload_into_files(payload: Mapping[str, Mapping[str, Spec]]) -> dict[str, list[str]]:
    """Return the names of the changed tensors by file; all data of one tensor is in the same file."""
    files: list[list[str]] = []
    room = 0
    for name, specs in payload.items():
        nbytes = sum(spec.nbytes for spec in specs.values())
        if nbytes > room:
            files.append([])
            room = max(_FILE_BYTES, nbytes)
        files[-1].append(name)
        room -= nbytes
    return {f"delta-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


def write_changed_elements(layout: Layout, difference: FoundChanges) -> dict[FileOffset, int]:
    """Write positions and values, and return the CRC-32 of each; skips full tensors."""
    sums_by_offset: dict[FileOffset, int] = {}
    specs, spool = difference.specs, difference.spool
    with OpenFiles(layout.root, writable=True) as files:
        for name in difference.payload_specs_by_tensor:
            if is_full_tensor_smaller(specs[name], spool.changed[name]):
                continue
            chunks = [layout.tensors[name + suffix].chunks[0] for suffix in (INDICES, VALUES)]
            written, sums = [0, 0], [0, 0]
            for piece in spool.read_tensor_changes(name):
                for i, (data, chunk) in enumerate(zip(piece, chunks, strict=True)):
                    files[chunk.path].write_at(memoryview(data), chunk.offset + written[i])
                    written[i], sums[i] = written[i] + len(data), crc32(data, sums[i])
            sums_by_offset |= {(chunk.path, chunk.offset): crc for chunk, crc in zip(chunks, sums, strict=True)}
    return sums_by_offset


def filler_from_model(after: Layout, jobs: int | None) -> Fill:
    """Return a function that fills tensors with the data of `after`."""

    def fill(wanted: Layout, names: Mapping[str, str]) -> dict[FileOffset, int]:
        source = replace(after, tensors={key: after.tensors[name] for key, name in names.items()}, blobs={}, keys={})
        plan = make_plan(locate_all_chunks(source), wanted)
        return dict(verify_copy(plan, copy_by_plan(plan, jobs=jobs), jobs=jobs).checksums)

    return fill
