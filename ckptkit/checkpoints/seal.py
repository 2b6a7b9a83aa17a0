"""Make the files of one folder of an output, and complete them when their data is there.

create_files -> read_made -> (the data is written) -> seal -> write_manifest

A conversion fills the files by its plan, a save from the memory of every rank; both do all else here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from ckptkit.checkpoints.manifest import NAME, Manifest
from ckptkit.checkpoints.sums import sum_files
from ckptkit.destinations.allocation import create_file, make_folder, write_file, write_parts
from ckptkit.engine.sources import place_of
from ckptkit.errors import Mismatch, translate_os_errors
from ckptkit.formats import FormatWriter
from ckptkit.layout import Chunk, Extent, FileOffset, Layout, NewFile, edits


def create_files(root: Path, files: Iterable[NewFile], *, anew: bool) -> None:
    """Create files in directory `root` with their size and the bytes known beforehand.

    With `anew` false a file may be there already: it keeps what lies in its holes.
    """
    make_folder(root)
    for file in files:
        make_folder((root / file.name).parent)
        create_file(root / file.name, file.nbytes, file.parts, anew=anew)


def read_made(writer: FormatWriter, root: Path, tensors: Collection[str], entries: Collection[str] = ()) -> Layout:
    """Return where the bytes of tensors, and of other entries, belong in directory `root`, as the format's reader says.

    The chunks are not located yet. Raises `Mismatch` if the format has lost a tensor.
    """
    names = {*tensors, *entries}
    with translate_os_errors(root):
        made = edits.select(writer.read(root), names.__contains__)
    lost = set(tensors) - made.tensors.keys()
    if lost:
        raise Mismatch(f"{writer.name} would lose {len(lost)} tensors", path=root, tensor=min(lost))
    return made


def seal(writer: FormatWriter, made: Layout, checksums: Mapping[FileOffset, int]) -> None:
    """Write the bytes that had to wait for the data, such as checksums in headers.

    `checksums` has the CRC-32 of every chunk of `made`. Raises `Corrupt` if the format's own library reads something
    else than `made`.
    """
    write_parts(made.root, writer.seal(made, checksums))
    writer.check(made)


def write_manifest(
    made: Layout,
    checksums: Mapping[FileOffset, int],
    names: Iterable[str],
    *,
    anew: bool,
    entries: Iterable[Extent] = (),
    source: Mapping[str, str] | None = None,
) -> None:
    """Write the manifest of the files `names`; only bytes without a checksum are read.

    `checksums` has the CRC-32 of chunks and blobs of `made`, `entries` are further bytes that have one. `source` is
    the checkpoint that the output was made of. With `anew` false there may be a manifest already.
    """
    sums = sum_files(made.root, names, (*extents_of(made, checksums), *entries))
    write_file(made.root / NAME, Manifest(sums, sums_of_tensors(made, checksums), source).to_bytes(), anew=anew)


def extents_of(made: Layout, checksums: Mapping[FileOffset, int]) -> Iterator[Extent]:
    """Yield the bytes of each chunk and blob that has a checksum."""
    for name, stored in made.stored:
        offset, length = stored.bytes if isinstance(stored, Chunk) else (stored.offset, stored.length)
        if length and (stored.path, offset) in checksums:
            yield Extent(stored.path, offset, length, checksums[stored.path, offset], name)


def sums_of_tensors(made: Layout, checksums: Mapping[FileOffset, int]) -> dict[str, int]:
    """Return by name the CRC-32 of each tensor that lies in one chunk: 0, that of no bytes, of an empty one."""
    whole = {name: tensor.chunks[0] for name, tensor in made.tensors.items() if len(tensor.chunks) == 1}
    return {name: checksums[place_of(chunk)] if chunk.box.numel else 0 for name, chunk in whole.items()}
