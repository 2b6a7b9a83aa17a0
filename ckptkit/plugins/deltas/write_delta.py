"""Write a delta in ckptkit's own format: safetensors with what changed, `delta.json` and a manifest."""

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

_FILE_BYTES = 5 * 10**9  # of tensors in a file, unless a single one is larger


@dataclass(frozen=True, slots=True)
class FoundChanges:
    """What a delta is made of: the tensors, their sums before and after, and the elements that changed.

    `fill` fills tensors of a layout, which the delta holds whole, and returns the CRC-32 of each; it gets their names.
    """

    specs: Mapping[str, Spec]
    sums_before: Mapping[str, int]
    sums_after: Mapping[str, int]
    spool: Spool
    fill: Fill

    @property
    def payload(self) -> dict[str, dict[str, Spec]]:
        """Return what the delta will hold of each tensor that changed."""
        specs, changed = self.specs, self.spool.changed
        return {name: payload_specs(name, specs[name], changed[name]) for name in specs if changed[name]}

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of all tensors in the delta."""
        return sum(spec.nbytes for held in self.payload.values() for spec in held.values())

    def record(self, files: Mapping[str, str]) -> DeltaRecord:
        """Return what the delta says of itself, with its tensors in these files."""
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
    """Write a delta into the directory `root`, which is there, and return what it says of itself."""
    held = difference.payload
    for specs in held.values():
        for key, spec in specs.items():
            check_writable(key, spec)
    files = split_into_files(held)
    check_room(root, difference.payload_bytes)
    create_files(root, [new_file(file, [held[name] for name in names]) for file, names in files.items()], anew=True)
    made = read_files(root, files)
    sums = write_changes(made, difference) | fill_whole(made, difference.fill)
    for file in files:
        check_readable(root / file, {key: t.chunks[0] for key, t in made.tensors.items() if t.chunks[0].path == file})
    record = difference.record({name: file for file, names in files.items() for name in names})
    write_file(root / RECORD, record.to_bytes(difference.payload_bytes))
    write_manifest(made, sums, [*files, RECORD], anew=True, source=source)
    return record


def split_into_files(held: Mapping[str, Mapping[str, Spec]]) -> dict[str, list[str]]:
    """Return the names of the tensors in each file; what is held of a tensor is in one file."""
    shares: list[list[str]] = []
    room = 0
    for name, specs in held.items():
        nbytes = sum(spec.nbytes for spec in specs.values())
        if nbytes > room:
            shares.append([])
            room = max(_FILE_BYTES, nbytes)
        shares[-1].append(name)
        room -= nbytes
    return {f"delta-{i:05d}-of-{len(shares):05d}.safetensors": names for i, names in enumerate(shares, 1)}


def new_file(name: str, held: Iterable[Mapping[str, Spec]]) -> NewFile:
    specs = {key: spec for each in held for key, spec in each.items()}
    header = make_header(specs)
    return NewFile(name, len(header) + sum(spec.nbytes for spec in specs.values()), ((0, header),))


def read_files(root: Path, files: Iterable[str]) -> Layout:
    """Return where the tensors of a delta lie in its files, as their headers say."""
    chunks = {key: chunk for file in files for key, chunk in read_header(root / file).items()}
    tensors = {key: StoredTensor(Spec(chunk.dtype, chunk.size), (chunk,)) for key, chunk in chunks.items()}
    return Layout(root, "hf", tensors)


def write_changes(made: Layout, difference: FoundChanges) -> dict[FileOffset, int]:
    """Write positions and values of the tensors that are not held whole, and return the CRC-32 of each."""
    found: dict[FileOffset, int] = {}
    specs, spool = difference.specs, difference.spool
    with OpenFiles(made.root, writable=True) as files:
        for name in difference.payload:
            if is_whole(specs[name], spool.changed[name]):
                continue
            places = [made.tensors[name + suffix].chunks[0] for suffix in (INDICES, VALUES)]
            at, sums = [0, 0], [0, 0]
            for piece in spool.read(name):
                for i, (data, chunk) in enumerate(zip(piece, places, strict=True)):
                    files[chunk.path].write_at(memoryview(data), chunk.offset + at[i])
                    at[i], sums[i] = at[i] + len(data), crc32(data, sums[i])
            found |= {(chunk.path, chunk.offset): crc for chunk, crc in zip(places, sums, strict=True)}
    return found


def fill_whole(made: Layout, fill: Fill) -> dict[FileOffset, int]:
    """Fill the tensors that are held whole, and return the CRC-32 of each."""
    names = {key: key.removesuffix(WHOLE) for key in made.tensors if key.endswith(WHOLE)}
    if not names:
        return {}
    return fill(replace(made, tensors={key: made.tensors[key] for key in names}), names)


def copying_from(after: Layout, jobs: int | None) -> Fill:
    """Return what fills tensors with those of a layout."""

    def fill(wanted: Layout, names: Mapping[str, str]) -> dict[FileOffset, int]:
        source = replace(after, tensors={key: after.tensors[name] for key, name in names.items()}, blobs={}, keys={})
        plan = make_plan(locate(source), wanted)
        return dict(check_complete(plan, copy(plan, jobs=jobs), jobs=jobs).checksums)

    return fill
