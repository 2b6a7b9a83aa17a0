"""Write a version of a policy for engines: the bytes that changed, compressed, with digests of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from ckptkit.deltas.byte_delta import OVERWRITE, XOR
from ckptkit.deltas.digests import new_digest
from ckptkit.deltas.disk_delta import BASE, CHECKSUM, COMPRESSION, VERSION, ZSTD
from ckptkit.deltas.new_blocks import blocks_of
from ckptkit.deltas.zstd import compressing
from ckptkit.destinations.allocation import check_room, create_file, write_file
from ckptkit.errors import Mismatch, Unsupported, translate_os_errors
from ckptkit.files.file import OpenFiles
from ckptkit.formats.change_marks import ENCODING, INDEX
from ckptkit.formats.indices import dump_index
from ckptkit.formats.safetensors_headers import make_header, read_header
from ckptkit.layout import Layout, Spec
from ckptkit.progress import Told
from ckptkit.tensors.dtypes import DTYPES

_FILE_BYTES = 5 * 10**9  # of tensors in a file, unless a single one is larger
_LEVEL = 1
_LARGEST = 1 << 32  # bytes that positions of four bytes reach
_COPIED = 1 << 20  # bytes at once
_UINT8 = DTYPES["uint8"]


@dataclass(frozen=True, slots=True)
class VersionTerms:
    """What a version is to be: its number, the encoding, the digests, and those that its base must have."""

    version: int
    encoding: str
    algorithm: str
    base_digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """What changed in a tensor: where its frame lies in the spool, its digests, and how many bytes differ."""

    offset: int
    length: int
    before: str
    digest: str
    changed: int


def encode_tensor(before: Layout, after: Layout, name: str, terms: VersionTerms, spool: IO[bytes]) -> EncodedTensor:
    """Compare a tensor and append what changed to the spool."""
    nbytes = before.tensors[name].spec.nbytes
    if terms.encoding == OVERWRITE and nbytes >= _LARGEST:
        hint = f"pass --encoding {XOR}"
        raise Unsupported(f"{OVERWRITE} reaches {_LARGEST} bytes of a tensor, found {nbytes}", tensor=name, hint=hint)
    offset, changed = spool.seek(0, 2), 0
    old_digest, new_digest_ = new_digest(terms.algorithm), new_digest(terms.algorithm)
    frame = compressing(_LEVEL, nbytes)
    places: list[bytes] = []
    values: list[bytes] = []
    at = 0
    for (_, old), (_, new) in zip(blocks_of(before, name), blocks_of(after, name), strict=True):
        old_digest.update(memoryview(old))
        new_digest_.update(memoryview(new))
        differ = np.bitwise_xor(np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8))
        changed += int(np.count_nonzero(differ))
        if terms.encoding == XOR:
            spool.write(frame.compress(differ.data))
        else:
            where = np.flatnonzero(differ)
            places.append((where + at).astype("<u4").tobytes())
            values.append(np.frombuffer(new, np.uint8)[where].tobytes())
        at += len(new)
    if terms.encoding == OVERWRITE:
        frame = compressing(_LEVEL, 4 + 5 * changed)
        for piece in (changed.to_bytes(4, "little"), *places, *values):
            spool.write(frame.compress(piece))
    spool.write(frame.flush())
    if not changed:
        spool.seek(offset)
        spool.truncate()
    return EncodedTensor(offset, spool.tell() - offset, old_digest.hexdigest(), new_digest_.hexdigest(), changed)


def encode(
    before: Layout, after: Layout, terms: VersionTerms, spool: IO[bytes], told: Told | None
) -> dict[str, EncodedTensor]:
    """Compare all tensors, and append what changed to the spool."""
    found: dict[str, EncodedTensor] = {}
    for name, spec in before.specs.items():
        if spec.numel:
            found[name] = encode_tensor(before, after, name, terms, spool)
        if told:
            told(2 * spec.nbytes)
    return found


def is_written(found: Mapping[str, EncodedTensor], terms: VersionTerms) -> bool:
    """Return whether the newest version is what the checkpoint after is, and the one before is not.

    Raises `Mismatch` if it is neither.
    """
    known = {name: digest for name, digest in terms.base_digests.items() if name in found}
    wrong = [name for name, digest in known.items() if found[name].before != digest]
    if not wrong:
        return False
    if all(found[name].digest == digest for name, digest in known.items()):
        return True
    expected, name = known[wrong[0]], wrong[0]
    message = f"expected {terms.algorithm} {expected} as in the newest version, found {found[name].before}"
    raise Mismatch(message, tensor=name, hint="pass the checkpoint that the newest version was made from as BASE")


def write_version(root: Path, found: Mapping[str, EncodedTensor], terms: VersionTerms, spool: IO[bytes]) -> list[str]:
    """Write the files of a version into directory `root`, the index last. Return their names."""
    shares = share_out(found)
    check_room(root, sum(one.length for one in found.values()))
    places = {name: file for file, names in shares.items() for name in names}
    for file, names in shares.items():
        specs = {name: Spec(_UINT8, (found[name].length,)) for name in names}
        header = make_header(specs, {name: found[name].digest for name in names})
        create_file(root / file, len(header) + sum(spec.nbytes for spec in specs.values()), [(0, header)])
        with OpenFiles(root, writable=True) as files, translate_os_errors(root):
            for name, chunk in read_header(root / file).items():
                spool.seek(found[name].offset)
                for start in range(0, chunk.length, _COPIED):
                    data = spool.read(min(_COPIED, chunk.length - start))
                    files[file].write_at(memoryview(data), chunk.offset + start)
    metadata = {
        VERSION: f"{terms.version:06d}",
        BASE: f"{terms.version - 1:06d}",
        ENCODING: terms.encoding,
        COMPRESSION: ZSTD,
        CHECKSUM: terms.algorithm,
    }
    write_file(root / INDEX, dump_index(metadata, places))
    return [*shares, INDEX]


def share_out(found: Mapping[str, EncodedTensor]) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, which are numbered from 0."""
    shares: list[list[str]] = []
    room = 0
    for name, one in found.items():
        if one.length > room:
            shares.append([])
            room = max(_FILE_BYTES, one.length)
        shares[-1].append(name)
        room -= one.length
    return {f"model-{i:05d}-of-{len(shares):05d}.safetensors": names for i, names in enumerate(shares)}
