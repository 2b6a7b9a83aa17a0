"""Write a delta in ckptkit's own format: safetensors with the changes, `delta.json` and a manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.checkpoints.seal import create_files, write_manifest
from ckptkit.engine.copy import check_complete, copy
from ckptkit.formats import locate
from ckptkit.formats.safetensors_headers import check_readable, check_writable, make_header, read_header
from ckptkit.io.allocation import check_room, write_file
from ckptkit.io.crc32 import crc32
from ckptkit.io.file import OpenFiles
from ckptkit.layout import FileOffset, Layout, NewFile, Spec, StoredTensor
from ckptkit.layout.plan import make_plan
from ckptkit.plugins.deltas.identity import identify
from ckptkit.plugins.deltas.open_delta import INDICES, VALUES, WHOLE, is_whole, payload_specs
from ckptkit.plugins.deltas.record import RECORD, DeltaRecord, DeltaTensor
from ckptkit.plugins.deltas.spool import Spool

Fill = Callable[[Layout, Mapping[str, str]], dict[FileOffset, int]]

_FILE_BYTES = 5 * 10**9  # tensor data per file, unless a single tensor is larger


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
    def payload(self) -> dict[str, dict[str, Spec]]:
        """Return the tensors that the delta stores for each changed tensor."""
        specs, changed = self.specs, self.spool.changed
        return {name: payload_specs(name, specs[name], changed[name]) for name in specs if changed[name]}

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of all tensors in the delta."""
        return sum(spec.nbytes for tensor_specs in self.payload.values() for spec in tensor_specs.values())

    def record(self, files: Mapping[str, str]) -> DeltaRecord:
        """Return the record of the delta; `files` maps each changed tensor to its file."""
        specs = self.specs
        tensors = {
            name: DeltaTensor(
                specs[name], self.spool.changed[name], file, self.sums_before[name], self.sums_after[name]
            )
            for name, file in files.items()
        }
        return DeltaRecord(
            base=identify(specs, self.sums_before),
            new=identify(specs, self.sums_after),
            tensors=tensors,
            unchanged=len(specs) - len(tensors),
            elements=sum(spec.numel for spec in specs.values()),
            nbytes=sum(spec.nbytes for spec in specs.values()),
        )


def write_delta(root: Path, difference: FoundChanges, source: Mapping[str, str] | None = None) -> DeltaRecord:
    """Write a delta into the existing directory `root`, and return its record."""
    payload = difference.payload
    for specs in payload.values():
        for key, spec in specs.items():
            check_writable(key, spec)
    files = split_into_files(payload)
    check_room(root, difference.payload_bytes)
    create_files(root, [new_file(file, [payload[name] for name in names]) for file, names in files.items()], anew=True)
    layout = read_files(root, files)
    sums = write_changes(layout, difference) | fill_whole(layout, difference.fill)
    for file in files:
        check_readable(root / file, {key: t.chunks[0] for key, t in layout.tensors.items() if t.chunks[0].path == file})
    record = difference.record({name: file for file, names in files.items() for name in names})
    write_file(root / RECORD, record.to_bytes(difference.payload_bytes))
    write_manifest(layout, sums, [*files, RECORD], anew=True, source=source)
    return record


def split_into_files(payload: Mapping[str, Mapping[str, Spec]]) -> dict[str, list[str]]:
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


def new_file(name: str, held: Iterable[Mapping[str, Spec]]) -> NewFile:
    specs = {key: spec for tensor_specs in held for key, spec in tensor_specs.items()}
    header = make_header(specs)
    return NewFile(name, len(header) + sum(spec.nbytes for spec in specs.values()), ((0, header),))


def read_files(root: Path, files: Iterable[str]) -> Layout:
    """Return the layout of the tensors in the files of a delta, from their headers."""
    chunks = {key: chunk for file in files for key, chunk in read_header(root / file).items()}
    tensors = {key: StoredTensor(Spec(chunk.dtype, chunk.size), (chunk,)) for key, chunk in chunks.items()}
    return Layout(root, "hf", tensors)


def write_changes(layout: Layout, difference: FoundChanges) -> dict[FileOffset, int]:
    """Write positions and values, and return the CRC-32 of each; skips full tensors."""
    sums_by_offset: dict[FileOffset, int] = {}
    specs, spool = difference.specs, difference.spool
    with OpenFiles(layout.root, writable=True) as files:
        for name in difference.payload:
            if is_whole(specs[name], spool.changed[name]):
                continue
            chunks = [layout.tensors[name + suffix].chunks[0] for suffix in (INDICES, VALUES)]
            written, sums = [0, 0], [0, 0]
            for piece in spool.read(name):
                for i, (data, chunk) in enumerate(zip(piece, chunks, strict=True)):
                    files[chunk.path].write_at(memoryview(data), chunk.offset + written[i])
                    written[i], sums[i] = written[i] + len(data), crc32(data, sums[i])
            sums_by_offset |= {(chunk.path, chunk.offset): crc for chunk, crc in zip(chunks, sums, strict=True)}
    return sums_by_offset


def fill_whole(layout: Layout, fill: Fill) -> dict[FileOffset, int]:
    """Fill the full tensors, and return the CRC-32 of each."""
    names = {key: key.removesuffix(WHOLE) for key in layout.tensors if key.endswith(WHOLE)}
    if not names:
        return {}
    return fill(replace(layout, tensors={key: layout.tensors[key] for key in names}), names)


def fill_from(after: Layout, jobs: int | None) -> Fill:
    """Return a function that fills tensors with the data of `after`."""

    def fill(wanted: Layout, names: Mapping[str, str]) -> dict[FileOffset, int]:
        source = replace(after, tensors={key: after.tensors[name] for key, name in names.items()}, blobs={}, keys={})
        plan = make_plan(locate(source), wanted)
        return dict(check_complete(plan, copy(plan, jobs=jobs), jobs=jobs).checksums)

    return fill
