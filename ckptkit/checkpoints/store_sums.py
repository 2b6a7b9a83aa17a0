"""Ask the store of a checkpoint for the checksums that it keeps of files, to compare them with a manifest's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptkit.checkpoints.manifest import FileSum
from ckptkit.checkpoints.problems import abridge
from ckptkit.errors import Unsupported
from ckptkit.io.crc32 import combine
from ckptkit.io.file import stored_sum
from ckptkit.io.joined import roots_of
from ckptkit.io.path import at_once, is_remote
from ckptkit.io.stores import StoredSum
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
