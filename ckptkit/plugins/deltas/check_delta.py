"""Read all that a delta holds, and check it: checksums, positions, and values that engines refuse."""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.errors import CkptError, Corrupt, Report, refuse
from ckptkit.io.progress import Told
from ckptkit.layout import edits
from ckptkit.plugins.deltas.changes import view
from ckptkit.plugins.deltas.identity import sums_of
from ckptkit.plugins.deltas.nan import count_nan
from ckptkit.plugins.deltas.open_delta import Delta
from ckptkit.plugins.deltas.patch import load_changes, read_all
from ckptkit.plugins.deltas.payload import WHOLE


@dataclass(frozen=True, slots=True)
class CheckedDelta:
    """What was found in a delta: bytes that had a checksum, bytes that had none, and new values that are NaN."""

    checked_bytes: int = 0
    unchecked_bytes: int = 0
    nan: int = 0


def check_delta(delta: Delta, report: Report = refuse, told: Told | None = None) -> CheckedDelta:
    """Read all that a delta holds, and report each tensor that is damaged.

    Positions must be strictly increasing and inside the tensor; a tensor that is held whole must have the CRC-32 that
    `delta.json` calls for.
    """
    nan = 0
    for name in delta.record.tensors:
        try:
            nan += check_tensor(delta, name)
        except CkptError as error:
            report(error.blame(path=delta.file_of(name), tensor=name))
        if told:
            told(delta.nbytes_of(name))
    sizes = [(t.chunks[0].crc32 is not None, t.spec.nbytes) for t in delta.layout.tensors.values()]
    checked = sum(nbytes for is_checked, nbytes in sizes if is_checked)
    return CheckedDelta(checked, sum(nbytes for _, nbytes in sizes) - checked, nan)


def check_tensor(delta: Delta, name: str) -> int:
    """Check what a delta holds of one tensor, and return how many new values are NaN."""
    tensor = delta.record.tensors[name]
    if not delta.holds_whole(name):
        return count_nan(load_changes(delta, name).values, tensor.spec.dtype.name)
    key = name + WHOLE
    found = sums_of(edits.select(delta.layout, key.__eq__))[key]
    if found != tensor.crc32_new:
        message = f"expected CRC-32 {tensor.crc32_new:08x} of the whole tensor, found {found:08x}"
        raise Corrupt(message)
    return count_nan(view(read_all(delta, key), tensor.spec.dtype.itemsize), tensor.spec.dtype.name)
