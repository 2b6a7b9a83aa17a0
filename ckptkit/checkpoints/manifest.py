"""Read the manifest `ckptkit.json`, which has a checksum for every file and tensor.

Checksums that a store keeps are compared with the manifest's. Only a manifest can expose an undamaged file that belongs
to another step, rank or model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.errors import RESTORE, CheckpointWarning, CkptError, Corrupt, Incomplete, warn
from ckptkit.formats.json_text import parse_json
from ckptkit.io.crc32 import combine_crc32, crc32
from ckptkit.io.file import find_stored_checksums, is_existing_path, read_small, require_plain_file_name
from ckptkit.io.joined_path import local_paths_of
from ckptkit.io.path import is_remote, map_in_parallel
from ckptkit.io.stores import StoredSum
from ckptkit.layout import Layout
from ckptkit.version import __version__


@dataclass(frozen=True, slots=True)
class StoreSums:
    """The checksums that a store has, by file name: `sums` for files with a CRC-32, `others` for other checksums."""

    sums: Mapping[str, FileSum]
    others: Mapping[str, StoredSum]

    def describe_checksums(self, names: Iterable[str]) -> str:
        """Return which checksums the store has of these files, as in `CRC32 of 2 files, no checksum of 1`."""
        sums = {name: ("CRC-32",) if name in self.sums else self.others[name].kinds for name in names}
        kinds = Counter(" and ".join(own) or "no checksum" for own in sums.values())
        first, *rest = (f"{kind} of {number:,}" for kind, number in sorted(kinds.items(), reverse=True))
        return ", ".join([f"{first} {'file' if max(kinds.values()) == 1 else 'files'}", *rest])


def read_store_checksums(root: Path, names: Iterable[str]) -> StoreSums:
    """Return the store's checksums for files of directory `root`. Sends one or two requests per file, in parallel."""
    if not any(map(is_remote, local_paths_of(root))):
        return StoreSums({}, {})
    wanted = list(names)
    sums: dict[str, FileSum] = {}
    others: dict[str, StoredSum] = {}
    for name, stored in zip(
        wanted, map_in_parallel(lambda name: find_stored_checksums(root / name), wanted), strict=True
    ):
        if stored is None:
            continue
        if not stored.parts or sum(nbytes for _, nbytes in stored.parts) != stored.nbytes:
            others[name] = stored  # it has no CRC-32 of the parts
            continue
        crc = 0
        for part, nbytes in stored.parts:
            crc = combine_crc32(crc, part, nbytes)
        sums[name] = FileSum(stored.nbytes, crc)
    return StoreSums(sums, others)


NAME = "ckptkit.json"
_LIMIT = 1 << 28  # bytes: bounds the memory for a damaged or hostile file
_DESCRIPTION_SUFFIXES = (".metadata", ".index.json")  # suffixes of files that describe the other files
_HINT_REPLACE = "`ckptkit manifest CKPT --overwrite` makes a new one"

ByteRange = tuple[int, int]  # offset in a file and length, in bytes


@dataclass(frozen=True, slots=True)
class FileSum:
    """The size and the CRC-32 of a file.

    `runs` has the CRC-32 of ranges of tensor bytes without a checksum in the format itself, by offset and length.
    """

    nbytes: int
    crc32: int
    runs: Mapping[ByteRange, int] = field(default_factory=dict, compare=False)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"nbytes": self.nbytes, "crc32": f"{self.crc32:08x}"}
        runs = {f"{offset}+{length}": f"{crc:08x}" for (offset, length), crc in sorted(self.runs.items())}
        return {**value, "runs": runs} if runs else value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileSum:
        """Return the object that `to_json` described. Raises KeyError, TypeError or ValueError for anything else."""
        runs = {}
        for byte_range, crc in value.get("runs", {}).items():
            offset, length = map(int, byte_range.split("+"))
            runs[offset, length] = int(crc, 16)
        return cls(int(value["nbytes"]), int(value["crc32"], 16), runs)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of one directory, and the CRC-32, in row-major order, of each contiguous tensor.

    `source` is the path and format of the checkpoint that this one was made from; None for an original. For a delta it
    also has `base`, the path of the checkpoint that the delta changes.
    """

    files: Mapping[str, FileSum]
    tensors: Mapping[str, int] = field(default_factory=dict)
    source: Mapping[str, str] | None = None

    def tensors_belong_to(self, path: Path, owns_file: Callable[[str], bool]) -> bool:
        """Return whether `tensors` describe `path`: a directory, or the only file that its format `owns_file`."""
        return path.is_dir() or [name for name in self.files if owns_file(name)] == [path.name]

    def to_bytes(self) -> bytes:
        """Return the content of the manifest file. It ends with the CRC-32 of the rest."""
        value = {
            "ckptkit": __version__,
            "source": self.source,
            "files": {name: file_sum.to_json() for name, file_sum in sorted(self.files.items())},
            "tensors": {name: {"crc32": f"{crc:08x}"} for name, crc in sorted(self.tensors.items())},
        }
        return to_json_bytes({**value, "crc32": f"{crc32(to_json_bytes(value)):08x}"})


def to_json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def source_record_of(layout: Layout) -> dict[str, str]:
    """Return a manifest's record of the checkpoint that another was made from."""
    return {"path": str(layout.root.absolute()), "format": layout.format}


def read_manifest(root: Path) -> Manifest | None:
    """Return the manifest in directory `root`, None if there is none. Raises `Corrupt` for a damaged one.

    Warns about the manifest of an earlier save, and returns None.
    """
    path = root / NAME
    if not is_existing_path(path):
        return None
    value = parse_json(read_small(path, _LIMIT), path)
    try:
        recorded = int(value.pop("crc32"), 16)
        if crc32(to_json_bytes(value)) != recorded:
            hint = "delete the manifest, run `ckptkit verify`, then `ckptkit manifest`"
            raise Corrupt("the manifest itself is damaged or was edited", path=path, hint=hint)
        files = {name: FileSum.from_json(record) for name, record in value["files"].items()}
        tensors = {name: int(record["crc32"], 16) for name, record in value["tensors"].items()}
        source = value["source"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        hint = "run `ckptkit manifest` to make a new one: it reads every byte first"
        raise Corrupt("another version of ckptkit wrote the manifest", path=path, hint=hint) from error
    for name in files:
        for step in name.split("/"):  # a file may be in a subdirectory, such as a rank's
            require_plain_file_name(step, root)
    if is_of_earlier_save(root, files):
        warn(f"{path}: ignoring the manifest of an earlier save: {_HINT_REPLACE}", StaleManifest)
        return None
    return Manifest(files, tensors, source)


def has_stale_manifest(root: Path) -> bool:
    """Return whether the manifest in a directory belongs to an earlier save, so that `read_manifest` ignores it."""
    try:
        return is_existing_path(root / NAME) and read_manifest(root) is None
    except Corrupt:
        return False


def explain_deleted_metadata(error: CkptError, root: Path) -> CkptError:
    """Return the error that metadata was deleted after the save, if the manifest lists it; else `error` unchanged.

    The file existed when the manifest was made, so the save was complete.
    """
    names = error.files if isinstance(error, Incomplete) else ()
    lost = [name for name in names if name.endswith(_DESCRIPTION_SUFFIXES)]
    try:
        manifest = read_manifest(root) if lost and root.is_dir() else None
    except Corrupt:
        manifest = None
    if manifest is None or not manifest.files.keys() >= set(lost):
        return error
    message = f"{', '.join(f'`{name}`' for name in lost)} is missing: it was deleted after the save ({NAME} lists it)"
    hint = f"{RESTORE}{f', or {error.hint}' if error.hint else ''}"
    return Incomplete(message, path=error.path, files=names, hint=hint)


class StaleManifest(CheckpointWarning):
    """The manifest describes files of an earlier save in the same directory."""


def is_of_earlier_save(root: Path, files: Mapping[str, FileSum]) -> bool:
    """Return whether another program saved a checkpoint again over the files that a manifest lists.

    Then the file that describes the others has other content and is newer than the manifest, as are files that it
    describes. A damaged file also differs, but then no other file is newer. Checked on local disks only: stores have no
    modification time, only an upload time.
    """
    described = [name for name in files if name.endswith(_DESCRIPTION_SUFFIXES)]
    if not described or is_remote(root):
        return False
    manifest_time = (root / NAME).stat().st_mtime_ns
    newer = {name for name in files if (root / name).is_file() and (root / name).stat().st_mtime_ns > manifest_time}
    if len(newer) <= 1:
        return False
    contents = ((files[name], read_small(root / name, _LIMIT)) for name in newer.intersection(described))
    return any((known.nbytes, known.crc32) != (len(content), crc32(content)) for known, content in contents)
