"""Write a delta in ckptkit's own format: safetensors with the changes, `delta.json` and a manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.checkpoints.seal import create_files, write_manifest
from ckptkit.engine.copy import check_all_units_written, copy_by_plan
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
from ckptkit.layout.plan import make_plan
from ckptkit.plugins.deltas.identity import identity_of_model
from ckptkit.plugins.deltas.open_delta import INDICES, VALUES, WHOLE, is_full_tensor_smaller, payload_specs
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
    def payload_specs_by_tensor(self) -> dict[str, dict[str, Spec]]:
        """Return the tensors that the delta stores for each changed tensor."""
        specs, changed = self.specs, self.spool.changed
        return {name: payload_specs(name, specs[name], changed[name]) for name in specs if changed[name]}

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of all tensors in the delta."""
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
    files = payload_names_by_file(payload)
    require_free_space(root, difference.payload_bytes)
    create_files(
        root, [new_payload_file(file, [payload[name] for name in names]) for file, names in files.items()], anew=True
    )
    layout = read_payload_layout(root, files)
    sums = write_changed_elements(layout, difference) | fill_full_tensors(layout, difference.fill)
    for file in files:
        check_header_with_library(
            root / file, {key: t.chunks[0] for key, t in layout.tensors.items() if t.chunks[0].path == file}
        )
    record = difference.make_record({name: file for file, names in files.items() for name in names})
    write_new_file(root / RECORD, record.to_bytes(difference.payload_bytes))
    write_manifest(layout, sums, [*files, RECORD], anew=True, source=source)
    return record


def payload_names_by_file(payload: Mapping[str, Mapping[str, Spec]]) -> dict[str, list[str]]:
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


def new_payload_file(name: str, specs_by_tensor: Iterable[Mapping[str, Spec]]) -> NewFile:
    specs = {key: spec for tensor_specs in specs_by_tensor for key, spec in tensor_specs.items()}
    header = make_header(specs)
    return NewFile(name, len(header) + sum(spec.nbytes for spec in specs.values()), ((0, header),))


def read_payload_layout(root: Path, files: Iterable[str]) -> Layout:
    """Return the layout of the tensors in the files of a delta, from their headers."""
    chunks = {key: chunk for file in files for key, chunk in read_header_chunks(root / file).items()}
    tensors = {key: StoredTensor(Spec(chunk.dtype, chunk.size), (chunk,)) for key, chunk in chunks.items()}
    return Layout(root, "hf", tensors)


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


def fill_full_tensors(layout: Layout, fill: Fill) -> dict[FileOffset, int]:
    """Fill the full tensors, and return the CRC-32 of each."""
    names = {key: key.removesuffix(WHOLE) for key in layout.tensors if key.endswith(WHOLE)}
    if not names:
        return {}
    return fill(replace(layout, tensors={key: layout.tensors[key] for key in names}), names)


def filler_from_model(after: Layout, jobs: int | None) -> Fill:
    """Return a function that fills tensors with the data of `after`."""

    def fill(wanted: Layout, names: Mapping[str, str]) -> dict[FileOffset, int]:
        source = replace(after, tensors={key: after.tensors[name] for key, name in names.items()}, blobs={}, keys={})
        plan = make_plan(locate_all_chunks(source), wanted)
        return dict(check_all_units_written(plan, copy_by_plan(plan, jobs=jobs), jobs=jobs).checksums)

    return fill
