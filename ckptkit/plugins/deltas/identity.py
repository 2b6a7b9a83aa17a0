"""Identify a model by its content: the same tensors give the same identity in any format and sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from ckptkit.engine.compare import row_major_checksums
from ckptkit.formats import locate_all_chunks
from ckptkit.layout import Layout, Spec, StoredTensor, edits
from ckptkit.layout.box import full_box


def identity_of_model(specs: Mapping[str, Spec], sums: Mapping[str, int]) -> str:
    """Return the SHA-256 over one line `name dtype shape crc32` per tensor, with the lines sorted.

    `sums` has the CRC-32 of the elements of each tensor, in row-major order.
    """
    lines = []
    for name, spec in specs.items():
        shape = ",".join(map(str, spec.shape))
        lines.append(f"{name} {spec.dtype.name} [{shape}] {sums[name]:08x}\n".encode("utf-8", "surrogatepass"))
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()


def find_recorded_checksum(tensor: StoredTensor) -> int | None:
    """Return the recorded CRC-32 of all elements of a tensor, row-major in its dtype; None if not recorded."""
    if not tensor.spec.numel:
        return 0
    if len(tensor.chunks) != 1 or tensor.splits is not None:
        return None
    (chunk,) = tensor.chunks
    is_plain = chunk.strides is None and chunk.run is None and chunk.where is None
    is_all = chunk.box == full_box(tensor.spec.shape) and chunk.dtype == tensor.spec.dtype
    return chunk.crc32 if is_plain and is_all else None


def checksum_by_tensor(layout: Layout, *, jobs: int | None = None) -> dict[str, int]:
    """Return the CRC-32 of each tensor of a located layout. Reads only tensors without a recorded checksum."""
    known = {name: find_recorded_checksum(tensor) for name, tensor in layout.tensors.items()}
    unknown = {name for name, crc in known.items() if crc is None}
    computed = (
        row_major_checksums(locate_all_chunks(edits.select_entries(layout, unknown.__contains__)), jobs=jobs)
        if unknown
        else {}
    )
    return {name: computed[name] if crc is None else crc for name, crc in known.items()}
