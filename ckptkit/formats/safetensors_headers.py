"""Read and write the header of a safetensors file: its tensors and their offsets.

Source: https://github.com/huggingface/safetensors#format. A file is 8 bytes of header length, a JSON header, and the
tensors without gaps. `HuggingFaceStorageWriter` of torch.distributed.checkpoint adds the position of each shard in its
tensor, since a rank has only its shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ckptkit.errors import RESTORE, Corrupt, Report, Unsupported, raise_problem, truncated_error
from ckptkit.formats.json_text import parse_json
from ckptkit.io.file import find_missing_content_error, opening, read_at
from ckptkit.layout import Chunk, Spec
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.dtypes import DTYPES

_LIMIT = 100_000_000  # bytes; the limit of the safetensors library
_MOST_AXES = 64  # numpy's limit
_STARTS = "DCP_SHARDING_INFO"
_START = "saved_offsets"

# in the order in which the safetensors library lays them out: largest alignment first
SPELLINGS: dict[str, str] = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "float4_e2m1fn_x2": "F4",
    "bool": "BOOL",
}
_DTYPES = {spelling: DTYPES[name] for name, spelling in SPELLINGS.items()}
_RANK = {name: rank for rank, name in enumerate(SPELLINGS)}
_OWN = re.compile("format$|DCP_")  # keys that describe the file, not the model
_PACKED = "float4_e2m1fn_x2"  # torch counts two numbers as one element; the header counts numbers
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_header_chunks(path: Path) -> dict[str, Chunk]:
    """Return the chunk of each tensor in a file, as `read_header_with_metadata`."""
    return read_header_with_metadata(path, is_shard=False)[0]


def read_header_with_metadata(
    path: Path, *, is_shard: bool, report: Report = raise_problem
) -> tuple[dict[str, Chunk], dict[str, str]]:
    """Return the chunk of each tensor, and `__metadata__` without torch's keys and without tensor names as keys.

    Refuses everything that the safetensors library refuses, and equal keys. A chunk is a full tensor, unless the
    metadata has its position in a larger one. With `is_shard`, every tensor must have a position. Reports a file of
    another size.
    """
    header, data_start, size = load_raw_header(path)
    metadata = header.pop("__metadata__", None)
    starts = read_shard_starts(metadata, path)
    if is_shard and starts.keys() != header.keys():
        name = next(iter(starts.keys() ^ header.keys()))
        raise Corrupt(f"the header and its `{_STARTS}` do not name the same tensors", path=path, tensor=name)
    chunks = {
        name: parse_header_entry(name, entry, starts.get(name), path, data_start) for name, entry in header.items()
    }
    require_no_gaps(chunks, path, data_start, size, report)
    free = {key: text for key, text in (metadata or {}).items() if key not in chunks and not _OWN.match(key)}
    return chunks, free


def load_raw_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the unchecked header, the offset of the data, and the size of the file."""
    with opening(path) as file:
        size = file.size
        head = read_at(file, min(size, 512), 0)
        length = int.from_bytes(head[:8], "little")
        if size < 8 or length > min(size - 8, _LIMIT):
            raise find_missing_content_error(head, path) or truncated_error(
                length + 8 if size >= 8 else 8, size, path=path, recorded_in="header"
            )
        header = parse_json(read_at(file, length, 8), path)
    if not isinstance(header, dict):
        raise Corrupt("the header is not a JSON object", path=path)
    return header, 8 + length, size


def read_shard_starts(metadata: Any, path: Path) -> dict[str, tuple[Any, ...]]:
    """Return the start index of each shard in its tensor, as torch recorded it in `__metadata__`; {} without it."""
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Corrupt("expected strings in `__metadata__`, found other values", path=path)
    if _STARTS not in metadata:
        return {}
    noted = parse_json(metadata[_STARTS].encode("utf-8", "surrogatepass"), path)
    try:
        return {name: tuple(entry[_START]) for name, entry in noted.items()}
    except (AttributeError, TypeError, KeyError) as error:
        raise Corrupt(f"`{_STARTS}` does not map names to lists `{_START}`", path=path) from error


def parse_header_entry(name: str, entry: Any, start: tuple[Any, ...] | None, path: Path, data_start: int) -> Chunk:
    """Return the chunk of a header's entry. `start` is where a shard begins in its tensor, None at the beginning."""
    try:
        dtype, shape, (begin, end) = _DTYPES.get(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise Corrupt("the header's entry lacks dtype, shape or data_offsets", path=path, tensor=name) from error
    start = (0,) * len(shape) if start is None else start
    if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, *start, begin, end)) or end < begin:
        raise Corrupt("the header gives an impossible shape or offset", path=path, tensor=name)
    if len(shape) > _MOST_AXES:
        raise Unsupported(f"expected at most {_MOST_AXES} axes, found {len(shape)}", path=path, tensor=name)
    if len(start) != len(shape):
        message = f"`{_START}`: expected {len(shape)} numbers for shape {list(shape)}, found {len(start)}"
        raise Corrupt(message, path=path, tensor=name)
    if dtype is None:
        raise Unsupported(f"dtype `{entry['dtype']!a}`", path=path, tensor=name)
    if dtype.name == _PACKED:
        if not shape or shape[-1] % 2:
            message = f"expected an even number of 4-bit numbers, found shape {list(shape)}"
            raise Unsupported(message, path=path, tensor=name)
        shape = (*shape[:-1], shape[-1] // 2)
    spec = Spec(dtype, shape)
    if spec.nbytes != end - begin:
        message = f"expected {spec.nbytes} bytes for {spec}, found {end - begin} in the header"
        raise Corrupt(message, path=path, tensor=name)
    return Chunk(Box(start, spec.shape), path.name, data_start + begin, end - begin, dtype)


def shape_for_header(spec: Spec) -> Shape:
    """Return the shape in the header, where the last axis of a 4-bit dtype is twice as long."""
    if spec.dtype.name != _PACKED:
        return spec.shape
    return (*spec.shape[:-1], spec.shape[-1] * 2)


def require_no_gaps(
    chunks: Mapping[str, Chunk], path: Path, data_start: int, file_nbytes: int, report: Report = raise_problem
) -> None:
    """Raise `Corrupt` for a gap or overlap of the chunks, the first at `data_start`; report a file of another size."""
    places = sorted((chunk.offset, chunk.length, name) for name, chunk in chunks.items())
    at = data_start
    for offset, length, name in places:
        if offset != at:
            what = "overlap" if offset < at else "there is a gap"
            message = f"expected the tensor at byte {at}, the end of the one before, found it at byte {offset}: {what}"
            raise Corrupt(message, path=path, tensor=name)
        at += length
    if file_nbytes < at:
        report(truncated_error(at, file_nbytes, path=path, recorded_in="header"))
    if file_nbytes > at:
        report(
            Corrupt(f"expected {at} bytes (header), found {file_nbytes}: bytes were appended", path=path, hint=RESTORE)
        )


def require_storable_spec(name: str, spec: Spec) -> None:
    """Raise `Unsupported` for a tensor that the installed safetensors library cannot store."""
    if spec.dtype.name not in SPELLINGS:
        raise Unsupported(f"safetensors does not have dtype {spec.dtype}", tensor=name, hint="drop it with --exclude")
    if not safetensors_supports_dtype(SPELLINGS[spec.dtype.name]):
        hint = "install a newer version, or drop the tensor with --exclude"
        raise Unsupported(f"the safetensors library here does not know dtype {spec.dtype}", tensor=name, hint=hint)
    if spec.dtype.name == _PACKED and not spec.shape:
        raise Unsupported("safetensors cannot store a 0-d tensor of 4-bit numbers", tensor=name)
    if name == "__metadata__":
        raise Unsupported("safetensors reserves this name", tensor=name)
    if not name.isascii() and _SURROGATE.search(name):
        raise Unsupported("the name is not valid Unicode", tensor=name, hint="rename the tensor with --rename")


@cache
def safetensors_supports_dtype(spelling: str) -> bool:
    """Return True if the installed safetensors library has a dtype of this name; some are recent."""
    from safetensors import SafetensorError, deserialize

    header = json.dumps({"": {"dtype": spelling, "shape": [0], "data_offsets": [0, 0]}}).encode()
    try:
        deserialize(len(header).to_bytes(8, "little") + header)  # type: ignore[no-untyped-call]
    except SafetensorError:
        return False
    return True


def check_header_with_library(path: Path, chunks: Mapping[str, Chunk]) -> None:
    """Raise `Corrupt` unless the safetensors library finds exactly these tensors in file `path`, each one chunk.

    The library does not show offsets. But it refuses gaps, and tensors whose length does not fit dtype and shape, so
    the order of the tensors proves their offsets. Tensors without bytes are ignored.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            actual = {name: (slice_.get_dtype(), tuple(slice_.get_shape())) for name, slice_ in slices.items()}
            order = [name for name in opened.offset_keys() if name not in chunks or chunks[name].length]
    except (SafetensorError, OSError) as error:
        raise Corrupt(f"the safetensors library cannot read what was written: {error}", path=path) from error
    specs = {name: Spec(chunk.dtype, chunk.size) for name, chunk in chunks.items()}
    expected = {name: (SPELLINGS[spec.dtype.name], shape_for_header(spec)) for name, spec in specs.items()}
    wrong = min(
        (name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name)), default=None
    )
    if wrong is not None:
        message = f"expected {expected.get(wrong)}, as written, found {actual.get(wrong)} in the safetensors library"
        raise Corrupt(message, path=path, tensor=wrong)
    if order != sorted(order, key=lambda name: chunks[name].offset):
        raise Corrupt("the safetensors library sees the tensors in another order than they were written", path=path)


def make_header(specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a file's header with its length, in the library's order and padding: equal tensors give equal bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    at = 0
    for name in sorted(specs, key=lambda name: (_RANK[specs[name].dtype.name], name)):
        spec = specs[name]
        start, at = at, at + spec.nbytes
        shape = list(shape_for_header(spec))
        header[name] = {"dtype": SPELLINGS[spec.dtype.name], "shape": shape, "data_offsets": [start, at]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > _LIMIT:
        message = f"{len(specs)} tensors need a header of {len(text)} bytes, more than loaders accept"
        raise Unsupported(message, hint="pass a smaller --max-shard-size: more files have smaller headers")
    return len(text).to_bytes(8, "little") + text
