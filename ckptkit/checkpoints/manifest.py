"""Read `ckptkit.json`, the manifest, which has a checksum for every file and tensor.

A store may keep checksums itself: those are compared with the manifest.

A file of another step, another rank or another model, whole and undamaged, can only be told by one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.problems import abridge
from ckptkit.errors import CheckpointWarning, CkptError, Corrupt, Incomplete, Unsupported, warn
from ckptkit.formats.json_text import parse_json
from ckptkit.io.crc32 import combine, crc32
from ckptkit.io.file import check_name, file_size, is_there, read_small, stored_sum
from ckptkit.io.joined import roots_of
from ckptkit.io.path import at_once, is_remote
from ckptkit.io.stores import StoredSum
from ckptkit.layout import Layout
from ckptkit.version import __version__
from ckptkit.words import count, format_bytes


@dataclass(frozen=True, slots=True)
class StoreSums:
    """What a store says of files, by name: `sums` of those whose CRC-32 it knows, the checksums it has of `others`."""

    sums: Mapping[str, FileSum]
    others: Mapping[str, StoredSum]

    @property
    def is_empty(self) -> bool:
        """Return whether the store said nothing, or the files are local."""
        return not (self.sums or self.others)

    def describe(self, names: Iterable[str]) -> str:
        """Return which checksums the store has of some of the files, as in `CRC32 of 2 files, no checksum of 1`."""
        kinds = Counter(self._kind(name) for name in names)
        first, *rest = (f"{kind} of {number:,}" for kind, number in sorted(kinds.items(), reverse=True))
        return ", ".join([f"{first} {'file' if max(kinds.values()) == 1 else 'files'}", *rest])

    def _kind(self, name: str) -> str:
        if name in self.sums:
            return "CRC-32"
        return " and ".join(self.others[name].kinds) or "no checksum"


def ask_store(root: Path, names: Iterable[str]) -> StoreSums:
    """Return what the store says of files of directory `root`; one or two requests a file, many at a time."""
    if not any(map(is_remote, roots_of(root))):
        return StoreSums({}, {})
    wanted = list(names)
    found = dict(zip(wanted, at_once(lambda name: stored_sum(root / name), wanted), strict=True))
    told = {name: one for name, one in found.items() if one is not None}
    sums = {name: whole for name, one in told.items() if (whole := whole_sum(one)) is not None}
    return StoreSums(sums, {name: one for name, one in told.items() if name not in sums})


def whole_sum(told: StoredSum) -> FileSum | None:
    """Return size and CRC-32 of a file from those of its parts; None if the store does not tell these."""
    if not told.parts or sum(nbytes for _, nbytes in told.parts) != told.nbytes:
        return None
    crc = 0
    for part, nbytes in told.parts:
        crc = combine(crc, part, nbytes)
    return FileSum(told.nbytes, crc)


def tell_proved(sizes: Mapping[str, int], proved: Collection[str]) -> list[str]:
    """Return a remark on the files whose CRC-32 in the store was compared, if there are any."""
    total = format_bytes(sum(sizes[name] for name in proved))
    return [f"{count(len(proved), 'file')}, {total}: compared with the store's CRC-32"] if proved else []


def tell_unproved(path: Path, sizes: Mapping[str, int], names: Collection[str], told: StoreSums) -> Unsupported:
    """Return the problem that the store has no CRC-32 of these files, or the manifest does not list them."""
    total = format_bytes(sum(sizes[name] for name in names))
    without = [name for name in names if name in told.others]
    unlisted = [name for name in names if name in told.sums]
    why = [
        *([f"the store has {told.describe(without)}"] if without else []),
        *([f"the manifest does not list {abridge(unlisted)}"] if unlisted else []),
    ]
    message = f"no CRC-32 to compare of {len(names):,} of {count(len(sizes), 'file')}, {total}: {'; '.join(why)}"
    return Unsupported(message, path=path, hint="run `ckptkit verify` without --fast: it reads every byte")


NAME = "ckptkit.json"
_LIMIT = 1 << 28  # bytes
_DESCRIBED_BY = (".metadata", ".index.json")  # how the names end of files that describe the others
_REPLACE = "`ckptkit manifest --overwrite` makes a new one"

ByteRange = tuple[int, int]  # offset in a file and length, in bytes


@dataclass(frozen=True, slots=True)
class FileSum:
    """The size and the CRC-32 of a file.

    `runs` has the CRC-32 of the runs of tensor bytes that no format records one for, by offset and length.
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
        """Return the sums that `to_json` described. Raises KeyError, TypeError or ValueError for anything else."""
        runs = {}
        for place, crc in value.get("runs", {}).items():
            offset, length = map(int, place.split("+"))
            runs[offset, length] = int(crc, 16)
        return cls(int(value["nbytes"]), int(value["crc32"], 16), runs)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of one directory; the CRC-32, in row-major order, of each tensor that lies in one piece.

    `source` is what it was made of, if that was another checkpoint: its path and format.
    """

    files: Mapping[str, FileSum]
    tensors: Mapping[str, int] = field(default_factory=dict)
    source: Mapping[str, str] | None = None

    def has_tensors_of(self, path: Path, owns: Callable[[str], bool]) -> bool:
        """Return whether `tensors` are of what lies at `path`, and not of other files that its format `owns`."""
        return path.is_dir() or [name for name in self.files if owns(name)] == [path.name]

    def to_bytes(self) -> bytes:
        """Return the file, which ends with a CRC-32 of its own."""
        value = {
            "ckptkit": __version__,
            "source": self.source,
            "files": {name: found.to_json() for name, found in sorted(self.files.items())},
            "tensors": {name: {"crc32": f"{crc:08x}"} for name, crc in sorted(self.tensors.items())},
        }
        return dump({**value, "crc32": f"{crc32(dump(value)):08x}"})


def dump(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def source_of(layout: Layout) -> dict[str, str]:
    """Return what a manifest says of the checkpoint that another was made of."""
    return {"path": str(layout.root.absolute()), "format": layout.format}


def read_manifest(root: Path) -> Manifest | None:
    """Return the manifest in directory `root`, None if there is none. Raises `Corrupt` for one that is damaged."""
    path = root / NAME
    if not is_there(path):
        return None
    value = parse_json(read_small(path, _LIMIT), path)
    try:
        recorded = int(value.pop("crc32"), 16)
        if crc32(dump(value)) != recorded:
            hint = "delete the manifest, run `ckptkit verify`, then `ckptkit manifest`"
            raise Corrupt("the manifest itself is damaged or was edited", path=path, hint=hint)
        files = {name: FileSum.from_json(found) for name, found in value["files"].items()}
        tensors = {name: int(found["crc32"], 16) for name, found in value["tensors"].items()}
        source = value["source"]
    except CkptError as error:
        raise error.blame(path=path) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        hint = "run `ckptkit manifest` to make a new one: it reads every byte first"
        raise Corrupt("another version of ckptkit wrote the manifest", path=path, hint=hint) from error
    for name in files:
        for step in name.split("/"):  # of a file in a directory, such as a rank's
            check_name(step, root)
    if is_of_earlier_save(root, files):
        warn(f"{path}: ignoring the manifest of an earlier save: {_REPLACE}", StaleManifest)
        return None
    return Manifest(files, tensors, source)


def has_stale_manifest(root: Path) -> bool:
    """Return whether the manifest in a directory is that of an earlier save, as `read_manifest` ignores it."""
    try:
        return is_there(root / NAME) and read_manifest(root) is None
    except Corrupt:
        return False


def lost_since(error: CkptError, root: Path) -> CkptError:
    """Return the error for metadata that a manifest lists and that is gone; any other error as it is.

    The file was there when the manifest was made, so the save did finish.
    """
    names = error.files if isinstance(error, Incomplete) else ()
    lost = [name for name in names if name.endswith(_DESCRIBED_BY)]
    try:
        manifest = read_manifest(root) if lost and root.is_dir() else None
    except Corrupt:
        manifest = None
    if manifest is None or not manifest.files.keys() >= set(lost):
        return error
    message = f"{', '.join(f'`{name}`' for name in lost)} is missing: it was deleted after the save ({NAME} lists it)"
    hint = f"restore the file from a copy{f', or {error.hint}' if error.hint else ''}"
    return Incomplete(message, path=error.path, files=names, hint=hint)


class StaleManifest(CheckpointWarning):
    """A manifest that describes the files of an earlier save in the same directory."""


def is_of_earlier_save(root: Path, files: Mapping[str, FileSum]) -> bool:
    """Return whether others have saved a checkpoint again over the files that a manifest lists.

    Then the file that describes all others has another content, and was written after the manifest together with
    files that it describes. A damaged one differs as well, but nothing else is newer with it. Only on a disk: a store
    does not tell when a file was changed, only when it was sent.
    """
    described = [name for name in files if name.endswith(_DESCRIBED_BY)]
    if not described or is_remote(root):
        return False
    made = (root / NAME).stat().st_mtime_ns
    newer = {name for name in files if (root / name).is_file() and (root / name).stat().st_mtime_ns > made}
    return len(newer) > 1 and any(differs(root / name, files[name]) for name in described if name in newer)


def differs(path: Path, known: FileSum) -> bool:
    """Return whether a file is not the one that a manifest has recorded."""
    return file_size(path) != known.nbytes or crc32(read_small(path, _LIMIT)) != known.crc32
