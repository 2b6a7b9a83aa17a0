"""Read and write `delta.json`, which marks a directory as a delta: its base, its result, and the changed tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptError, Corrupt, Incomplete, Unsupported
from ckptkit.formats.json_text import parse_json
from ckptkit.io.file import is_existing_path, missing_path_error, names_in, read_small, require_plain_file_name
from ckptkit.layout import Spec
from ckptkit.layout.dtypes import DTYPES
from ckptkit.version import __version__
from ckptkit.words import count, format_bytes, per_cent

RECORD = "delta.json"
_PAYLOAD = re.compile(r"delta-[0-9]+-of-[0-9]+\.safetensors")


def is_complete_delta(path: Path) -> bool:
    """Return whether a directory contains a complete delta; only checks for `delta.json`."""
    return path.is_dir() and is_existing_path(path / RECORD)


def is_unfinished_delta(path: Path) -> bool:
    """Return whether a directory contains files of a delta, but no `delta.json`."""
    return path.is_dir() and not is_existing_path(path / RECORD) and any(map(_PAYLOAD.fullmatch, names_in(path)))


FORMAT, VERSION = "ckptkit-delta", 1
_LIMIT = 1 << 28  # bytes
_SHOWN = 12  # digits of an identity in a message


@dataclass(frozen=True, slots=True)
class DeltaTensor:
    """A changed tensor: how many elements changed, its file, and its CRC-32 before and after."""

    spec: Spec
    changed: int
    file: str
    crc32_base: int
    crc32_new: int


@dataclass(frozen=True, slots=True)
class DeltaRecord:
    """The contents of `delta.json`: the identities of base and result, and the changed tensors.

    `unchanged` is the number of unchanged tensors; `elements` and `nbytes` count all tensors of the result.
    """

    base: str
    new: str
    tensors: Mapping[str, DeltaTensor]
    unchanged: int
    elements: int
    nbytes: int

    @property
    def changed(self) -> int:
        return sum(tensor.changed for tensor in self.tensors.values())

    @property
    def density(self) -> float:
        """Return the fraction of all elements that changed."""
        return self.changed / self.elements if self.elements else 0.0

    def summary(self, payload_bytes: int) -> Iterator[str]:
        """Yield two lines on what changed, for files with `payload_bytes` bytes of tensor data."""
        changed = len(self.tensors)
        every = count(changed + self.unchanged, "tensor")
        yield f"{per_cent(self.density)} of the elements changed, in {changed:,} of {every}"
        share = per_cent(payload_bytes / self.nbytes if self.nbytes else 0.0)
        yield f"{format_bytes(payload_bytes)}, {share} of the model's {format_bytes(self.nbytes)}"

    def to_bytes(self, payload_bytes: int) -> bytes:
        """Return the content of `delta.json`, for files with `payload_bytes` bytes of tensor data."""
        tensors = {
            name: {
                "dtype": tensor.spec.dtype.name,
                "shape": list(tensor.spec.shape),
                "changed": tensor.changed,
                "file": tensor.file,
                "crc32_base": f"{tensor.crc32_base:08x}",
                "crc32_new": f"{tensor.crc32_new:08x}",
            }
            for name, tensor in self.tensors.items()
        }
        value = {
            "format": FORMAT,
            "version": VERSION,
            "tool": f"ckptkit {__version__}",
            "base": self.base,
            "new": self.new,
            "tensors": tensors,
            "unchanged": self.unchanged,
            "elements": self.elements,
            "nbytes": self.nbytes,
            "density": self.density,
            "bytes": payload_bytes,
        }
        return (json.dumps(value, indent=1) + "\n").encode()


def read_delta_record(root: Path) -> DeltaRecord:
    """Return the record of the delta in directory `root`.

    Raises `Incomplete` if `delta.json` is missing, `NotACheckpoint` if the directory does not exist, `Corrupt` or
    `Unsupported` for an unreadable record.
    """
    path = root / RECORD
    if not is_existing_path(path):
        if not root.exists():
            raise missing_path_error(root)
        hint = "pass a complete output of `ckptkit delta`: it writes this file last"
        raise Incomplete(f"`{RECORD}` is missing: this is not a delta, or an unfinished one", path=root, hint=hint)
    value = parse_json(read_small(path, _LIMIT), path)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise Corrupt(f"expected format `{FORMAT}`, found another file", path=path)
    if value.get("version") != VERSION:
        hint = "use a newer ckptkit"
        raise Unsupported(f"expected version {VERSION}, found {value.get('version')!r}", path=path, hint=hint)
    try:
        tensors = {name: parse_delta_tensor(name, described) for name, described in value["tensors"].items()}
        numbers = (int(value[key]) for key in ("unchanged", "elements", "nbytes"))
        record = DeltaRecord(parse_identity(value["base"]), parse_identity(value["new"]), tensors, *numbers)
    except CkptError as error:
        raise error.blame(path=path) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"not a `{RECORD}` of version {VERSION} ({error!r})", path=path) from error
    for file in {tensor.file for tensor in tensors.values()}:
        require_plain_file_name(file, root)
    return record


def parse_identity(value: object) -> str:
    """Return the identity of a model. Raises ValueError unless it is a SHA-256."""
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(f"expected a SHA-256, found {value!r}")
    return value


def parse_delta_tensor(name: str, value: Mapping[str, Any]) -> DeltaTensor:
    """Return a tensor of `DeltaRecord.to_bytes`. Raises KeyError, TypeError or ValueError for other data."""
    dtype, shape = DTYPES[value["dtype"]], tuple(value["shape"])
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise Corrupt(f"expected a shape, found {list(shape)}", tensor=name)
    spec = Spec(dtype, shape)
    changed = int(value["changed"])
    if not 0 < changed <= spec.numel:
        raise Corrupt(f"expected 1 to {spec.numel} changed elements, found {changed}", tensor=name)
    sums = (int(value[key], 16) for key in ("crc32_base", "crc32_new"))
    return DeltaTensor(spec, changed, str(value["file"]), *sums)


def short_id(identity: str) -> str:
    return identity[:_SHOWN]
