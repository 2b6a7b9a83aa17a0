"""Read the versions of a policy that trainers publish in one directory: `weight_v000007`, deltas and whole models.

Sources: slime and miles, `disk_delta.py` and the engine's `/pull_weights`. A version is a directory with safetensors
and their index. One whose index names an encoding is a delta from the version before: each tensor is the zstd frame of
what changed in the bytes of the tensor of its name, and the header of its file has the digest of the result. Any other
is a whole model.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckptkit.deltas.byte_delta import OVERWRITE, XOR, ByteChange, ByteDelta
from ckptkit.deltas.digests import ADLER
from ckptkit.errors import Corrupt, NotACheckpoint, Unsupported
from ckptkit.files.file import names_in
from ckptkit.formats.change_marks import ENCODING, INDEX
from ckptkit.formats.indices import read_index
from ckptkit.formats.safetensors_headers import load_header, read_header

FORMAT = "disk-delta"
STATE = ".weight_sync/state.json"  # in an engine's own copy: the version that it is
VERSION, BASE = "version", "base_version"
COMPRESSION, CHECKSUM = "compression_format", "checksum_format"
ZSTD = "zstd"
_NAME = re.compile(r"weight_v([0-9]{6,})")


def name_of(version: int) -> str:
    """Return the name of the directory of a version."""
    return f"weight_v{version:06d}"


def versions_in(root: Path) -> dict[int, Path]:
    """Return the directories of the versions in a directory, by their numbers, in order."""
    found = {int(match[1]): root / name for name in names_in(root) if (match := _NAME.fullmatch(name))}
    return dict(sorted(found.items()))


def open_version(path: Path) -> ByteDelta:
    """Open the version at `path`, which is a delta. Raises `Corrupt` for files that do not fit the index."""
    places, metadata = read_index(path / INDEX)
    if ENCODING not in metadata:
        raise NotACheckpoint(f"expected a delta of format {FORMAT}, found no `{ENCODING}` in its index", path=path)
    encoding, compression = metadata[ENCODING], metadata.get(COMPRESSION)
    if encoding not in (XOR, OVERWRITE):
        raise Unsupported(f"expected encoding {XOR} or {OVERWRITE}, found {encoding!r}", path=path / INDEX)
    if compression != ZSTD:
        raise Unsupported(f"expected compression {ZSTD}, found {compression!r}", path=path / INDEX)
    algorithm = str(metadata.get(CHECKSUM, ADLER))
    try:
        numbers = int(metadata[VERSION]), int(metadata[BASE])
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"expected numbers in `{VERSION}` and `{BASE}` ({error!r})", path=path / INDEX) from error
    tensors: dict[str, ByteChange] = {}
    for file in sorted(set(places.values())):
        digests = load_header(path / file)[0].get("__metadata__") or {}
        for name, chunk in read_header(path / file).items():
            if places.get(name) != file:
                raise Corrupt(f"the index places it in `{places.get(name)}`", path=path / file, tensor=name)
            if name not in digests:
                raise Corrupt("expected a digest of the tensor in the header", path=path / file, tensor=name)
            tensors[name] = ByteChange(chunk, algorithm, digests[name])
    if lost := min(places.keys() - tensors.keys(), default=None):
        raise Corrupt(f"not in `{places[lost]}`, where the index places it", path=path, tensor=lost)
    return ByteDelta(path, FORMAT, *numbers, encoding, tensors)
