"""Open a delta in ckptkit's own format: its record, and the byte ranges of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptkit.checkpoints.manifest import read_manifest
from ckptkit.errors import Corrupt
from ckptkit.formats.safetensors_headers import read_header_chunks
from ckptkit.io.path import to_path
from ckptkit.layout import Layout, Spec, StoredTensor
from ckptkit.layout.dtypes import DTYPES
from ckptkit.plugins.deltas.record import FORMAT, DeltaRecord, read_delta_record, short_id
from ckptkit.summary import Summarized

VALUES, INDICES, WHOLE = ".values", ".indices", ".whole"
_INT32, _INT64 = DTYPES["int32"], DTYPES["int64"]
_SMALL = 1 << 31  # positions below this fit into int32


def index_dtype(spec: Spec) -> str:
    """Return the dtype of the positions in a tensor: int32 if they fit, else int64."""
    return (_INT32 if spec.numel < _SMALL else _INT64).name


def is_full_tensor_smaller(spec: Spec, changed: int) -> bool:
    """Return whether the full tensor takes less space than `changed` positions and values."""
    return changed * (DTYPES[index_dtype(spec)].itemsize + spec.dtype.itemsize) > spec.nbytes


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta in directory `path`: its record, and the layout of its tensors by their keys in the files."""

    path: Path
    record: DeltaRecord
    layout: Layout

    def has_full_tensor(self, name: str) -> bool:
        """Return whether the delta contains the full tensor instead of positions and values."""
        return name + WHOLE in self.layout.tensors

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def payload_path_of(self, name: str) -> Path:
        return self.path / self.record.tensors[name].file


def open_delta(path: Path) -> Delta:
    """Open the delta in directory `path`.

    Raises `Incomplete` if `delta.json` or a file is missing, `Corrupt` if the files do not match `delta.json`.
    """
    record = read_delta_record(path)
    manifest = read_manifest(path)
    sums = {} if manifest is None else manifest.tensors
    tensors: dict[str, StoredTensor] = {}
    for file in sorted({tensor.file for tensor in record.tensors.values()}):
        for key, chunk in read_header_chunks(path / file).items():
            if key in tensors:
                raise Corrupt(f"the tensor is also in `{tensors[key].chunks[0].path}`", path=path / file, tensor=key)
            tensors[key] = StoredTensor(Spec(chunk.dtype, chunk.size), (chunk._replace(crc32=sums.get(key)),))
    check_payload(path, record, tensors)
    return Delta(path, record, Layout(path, "hf", tensors))


def check_payload(path: Path, record: DeltaRecord, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise `Corrupt` unless the files contain positions and values, or the full tensor, for each changed tensor.

    Each must have the dtype, shape and file that `delta.json` records.
    """
    known: set[str] = set()
    for name, tensor in record.tensors.items():
        stored = {suffix: tensors[name + suffix] for suffix in (WHOLE, INDICES, VALUES) if name + suffix in tensors}
        known |= {name + suffix for suffix in stored}
        if stored.keys() not in ({WHOLE}, {INDICES, VALUES}):
            suffixes = ", ".join(sorted(stored)) or "nothing"
            message = f"expected {INDICES} and {VALUES}, or {WHOLE}, found {suffixes}"
            raise Corrupt(message, path=path / tensor.file, tensor=name)
        for suffix, payload in stored.items():
            shape = tensor.spec.shape if suffix == WHOLE else (tensor.changed,)
            dtypes = (_INT32, _INT64) if suffix == INDICES else (tensor.spec.dtype,)
            if payload.spec.shape != shape or payload.spec.dtype not in dtypes:
                message = f"expected {Spec(dtypes[0], shape)} in {suffix}, found {payload.spec}"
                raise Corrupt(message, path=path / tensor.file, tensor=name)
            if payload.chunks[0].path != tensor.file:
                message = f"expected {suffix} in `{tensor.file}`, found it in `{payload.chunks[0].path}`"
                raise Corrupt(message, path=path, tensor=name)
    if stray := min(tensors.keys() - known, default=None):
        raise Corrupt("`delta.json` does not name this tensor", path=path, tensor=stray)


@dataclass(frozen=True, slots=True)
class InspectedDelta(Summarized):
    """A summary of a delta: its `delta.json`, and the bytes of tensor data that it contains."""

    path: Path
    format: str
    record: DeltaRecord
    nbytes: int

    def summary(self) -> Iterator[str]:
        yield f"{self.path}: {self.format}, from {short_id(self.record.base)} to {short_id(self.record.new)}"
        yield from self.record.summary(self.nbytes)


def inspect_delta(path: str | Path) -> InspectedDelta:
    """Return a summary of the delta in directory `path`.

    Raises `Incomplete` if it is not finished, `Corrupt` if its files do not fit together.
    """
    delta = open_delta(to_path(path))
    return InspectedDelta(delta.path, FORMAT, delta.record, delta.nbytes)
