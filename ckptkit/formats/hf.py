"""Hugging Face checkpoints: safetensors files, and the index that says which tensor is in which.

Source: https://github.com/huggingface/safetensors#format and huggingface_hub's `split_torch_state_dict_into_shards`.
A file is 8 bytes of header length, a JSON header, and the tensors without a gap.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckptkit.box import Shape, whole
from ckptkit.dtypes import DTYPES, DType
from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.files import check_name, open_regular, read_at, read_small, recognise
from ckptkit.layout import Chunk, Layout, NewFile, Options, Part, Place, Spec, StoredTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000  # bytes; the safetensors library's own limit
_INDEX_LIMIT = 1 << 28

# in the order in which the safetensors library lays them out: largest alignment first
_SPELLINGS: dict[str, str] = {
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
_DTYPES = {spelling: DTYPES[name] for name, spelling in _SPELLINGS.items()}
_RANK = {name: rank for rank, name in enumerate(_SPELLINGS)}
_PACKED = "float4_e2m1fn_x2"  # two numbers in an element of torch's; the header counts numbers


class HuggingFace:
    """Reads and writes `model.safetensors`, or several such files with their index."""

    name = "hf"

    def detect(self, path: Path) -> bool:
        """True for a safetensors file, or a directory with one or with an index of several."""
        if path.is_dir():
            return any((path / name).exists() for name in (SINGLE, INDEX)) or bool(list(path.glob("*.safetensors")))
        return path.suffix == ".safetensors"

    def is_complete(self, path: Path) -> bool:
        """True if the file or the index is there; the files are written first."""
        return self.detect(path)

    def read(self, path: Path) -> Layout:
        """The layout of a file, or of the directory whose index or single file says what belongs to it."""
        root, names = files_of(path)
        tensors: dict[str, StoredTensor] = {}
        for name in names:
            for tensor, stored in read_header(root / name).items():
                if tensor in tensors:
                    other = tensors[tensor].chunks[0].path
                    raise Corrupt(f"the tensor is in `{other}` and again in `{name}`", path=root, tensor=tensor)
                tensors[tensor] = stored
        if (root / INDEX).exists() and path.is_dir():
            check_index(root / INDEX, tensors)
        return Layout(root, self.name, tensors)

    def locate(self, layout: Layout) -> Layout:
        """The layout itself: a header gives the place of every byte."""
        return layout

    def arrange(self, wanted: Layout, options: Options) -> tuple[NewFile, ...]:
        """The files for the tensors of `wanted`: headers, index, and room for the data. Blobs have no place in them."""
        specs = wanted.specs
        for name, spec in specs.items():
            check_writable(name, spec)
        shards = split(specs, options.max_shard_size)
        names = shard_names(len(shards))
        files = [
            new_file(file, {name: specs[name] for name in members}) for file, members in zip(names, shards, strict=True)
        ]
        if len(shards) > 1:
            places = {name: file for file, members in zip(names, shards, strict=True) for name in members}
            index = make_index(specs, places)
            files.append(NewFile(INDEX, len(index), ((0, index),)))
        return tuple(files)

    def seal(self, made: Layout, checksums: Mapping[Place, int]) -> Iterable[tuple[str, Part]]:  # noqa: ARG002
        """Nothing: safetensors keep no checksums."""
        return ()


def new_file(name: str, specs: Mapping[str, Spec]) -> NewFile:
    """A safetensors file with its header, and holes for the tensors."""
    header = make_header(specs)
    return NewFile(name, len(header) + sum(spec.nbytes for spec in specs.values()), ((0, header),))


def files_of(path: Path) -> tuple[Path, list[str]]:
    """The directory of a checkpoint and the names of its files; an index beside a single file is ambiguous."""
    if not path.is_dir():
        return path.parent, [path.name]
    has_index, has_single = (path / INDEX).exists(), (path / SINGLE).exists()
    if has_index:
        names = sorted(set(read_index(path / INDEX).values()))
        if has_single and SINGLE not in names:
            raise Corrupt(
                f"both `{SINGLE}` and `{INDEX}` are here, of different exports",
                path=path,
                hint="loaders disagree on which one counts: remove the older",
            )
        missing = [name for name in names if not os.path.lexists(path / name)]
        if missing:
            raise Corrupt(f"{len(missing)} of {len(names)} files are missing: {', '.join(missing[:8])}", path=path)
        return path, names
    if has_single:
        return path, [SINGLE]
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if any(re.fullmatch(r"model-\d+-of-\d+\.safetensors", name) for name in names):
        raise Corrupt(f"the files of a sharded model are here, but not `{INDEX}`", path=path)
    if len(names) != 1:
        raise Unsupported(
            f"{len(names)} safetensors files and no index that says which belong together",
            path=path,
            hint=f"name one of them: {', '.join(names[:4])}",
        )
    return path, names


def read_index(path: Path) -> dict[str, str]:
    """`weight_map` of an index: tensor name to file name."""
    index = parse_json(read_small(path, _INDEX_LIMIT), path)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise Corrupt("the index has no `weight_map` from names to files", path=path)
    for file in set(places.values()):
        check_name(file, path.parent)
    return places


def check_index(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise `Corrupt` unless the index and the headers of its files name the same tensors in the same files."""
    places = read_index(path)
    for name, file in places.items():
        found = tensors[name].chunks[0].path if name in tensors else None
        if found != file:
            where = f"it is in `{found}`" if found else "it is in none of the files"
            raise Corrupt(f"the index places the tensor in `{file}`, but {where}", path=path, tensor=name)
    extra = next((name for name in tensors if name not in places), None)
    if extra is not None:
        raise Corrupt(
            f"`{tensors[extra].chunks[0].path}` holds a tensor that the index does not name", path=path, tensor=extra
        )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Refuses all that the safetensors library refuses, and equal keys besides."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        head = read_at(fd, min(size, 512), 0, path)
        length = int.from_bytes(head[:8], "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            message = (
                f"a header of {length} bytes does not fit the file's {size}" if size >= 8 else f"only {size} bytes"
            )
            raise Corrupt(message, path=path, hint=recognise(head))
        header = parse_json(read_at(fd, length, 8, path), path)
    finally:
        os.close(fd)
    if not isinstance(header, dict):
        raise Corrupt("the header is no JSON object", path=path)
    check_metadata(header.pop("__metadata__", None), path)
    tensors = {name: read_entry(name, entry, path, 8 + length) for name, entry in header.items()}
    check_contiguous(tensors, path, 8 + length, size)
    return tensors


def parse_json(data: bytes, path: Path) -> Any:
    """The JSON value in `data`; two equal keys in one object are `Corrupt`, not the last of them."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys)
    except CkptError as error:
        raise error.blame(path=path) from None
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not valid JSON ({error})", path=path, hint=recognise(data[:512])) from error


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Corrupt("the key occurs twice", tensor=twice)
    return found


def check_metadata(metadata: Any, path: Path) -> None:
    """Raise `Corrupt` unless the free metadata is absent or maps strings to strings."""
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise Corrupt("`__metadata__` maps to something else than strings", path=path)


def read_entry(name: str, entry: Any, path: Path, data_start: int) -> StoredTensor:
    """One tensor of a header: `{"dtype", "shape", "data_offsets": [begin, end]}`, offsets counted from the data."""
    try:
        spelling, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise Corrupt("the header's entry lacks dtype, shape or data_offsets", path=path, tensor=name) from error
    if not all(type(n) is int and 0 <= n < 2**64 for n in (*shape, begin, end)) or end < begin:
        raise Corrupt("the header's entry has an impossible shape or place", path=path, tensor=name)
    dtype = _DTYPES.get(spelling) if isinstance(spelling, str) else None
    if dtype is None:
        raise Unsupported(f"dtype `{spelling!a}`", path=path, tensor=name)
    spec = Spec(dtype, unpack_shape(dtype, shape, path, name))
    if spec.nbytes != end - begin:
        raise Corrupt(f"{spec} needs {spec.nbytes} bytes, the header gives it {end - begin}", path=path, tensor=name)
    chunk = Chunk(whole(spec.shape), path.name, data_start + begin, spec.nbytes, dtype)
    return StoredTensor(spec, (chunk,))


def unpack_shape(dtype: DType, shape: Shape, path: Path, name: str) -> Shape:
    """The shape as torch counts it: of a packed dtype the header counts single numbers in the last axis."""
    if dtype.name != _PACKED:
        return shape
    if not shape or shape[-1] % 2:
        raise Unsupported(f"an odd number of 4-bit numbers in shape {list(shape)}", path=path, tensor=name)
    return (*shape[:-1], shape[-1] // 2)


def pack_shape(spec: Spec) -> Shape:
    """The shape as the header counts it."""
    if spec.dtype.name != _PACKED:
        return spec.shape
    return (*spec.shape[:-1], spec.shape[-1] * 2)


def check_contiguous(tensors: Mapping[str, StoredTensor], path: Path, start: int, size: int) -> None:
    """Raise `Corrupt` unless the tensors fill the file from `start` to `size` without gap or overlap."""
    places = sorted((t.chunks[0].offset, t.chunks[0].length, name) for name, t in tensors.items())
    at = start
    for offset, length, name in places:
        if offset != at:
            what = "overlaps the one before" if offset < at else "leaves a gap before it"
            raise Corrupt(f"the tensor at byte {offset} {what}, which ends at {at}", path=path, tensor=name)
        at += length
    if at != size:
        raise Corrupt(
            f"the header describes {at} bytes, the file has {size}",
            path=path,
            hint="the file is truncated" if size < at else "something was appended to the file",
        )


def check_writable(name: str, spec: Spec) -> None:
    """Raise `Unsupported` for a tensor that safetensors has no spelling for."""
    if spec.dtype.name not in _SPELLINGS:
        raise Unsupported(
            f"safetensors cannot hold dtype {spec.dtype}", tensor=name, hint="leave it out with --exclude"
        )
    if spec.dtype.name == _PACKED and not spec.shape:
        raise Unsupported("safetensors cannot hold a 0-d tensor of 4-bit numbers", tensor=name)
    if name == "__metadata__":
        raise Unsupported("safetensors keeps this name for itself", tensor=name)
    if any(0xD800 <= ord(c) <= 0xDFFF for c in name):
        raise Unsupported("the name is no valid Unicode", tensor=name, hint="give it another with --rename")


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key by which `layers.9` comes before `layers.10`."""
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in re.split(r"([0-9]+)", name)]


def split(specs: Mapping[str, Spec], limit: int) -> list[list[str]]:
    """Names shared out to files of at most `limit` bytes, in natural order; a larger tensor gets its own file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in sorted(specs, key=natural):
        nbytes = specs[name].nbytes
        if shards[-1] and filled + nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    return shards


def shard_names(count: int) -> list[str]:
    """File names of a model in `count` files."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def make_header(specs: Mapping[str, Spec]) -> bytes:
    """Length and JSON of a file's header, in the library's order and padding: the same tensors give the same bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in sorted(specs, key=lambda name: (_RANK[specs[name].dtype.name], name.encode("utf-8", "surrogatepass"))):
        spec = specs[name]
        header[name] = {
            "dtype": _SPELLINGS[spec.dtype.name],
            "shape": list(pack_shape(spec)),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise Unsupported(
            f"{len(specs)} tensors need a header of {len(text)} bytes, more than loaders accept",
            hint="a smaller --max-shard-size makes more files with smaller headers",
        )
    return len(text).to_bytes(8, "little") + text


def make_index(specs: Mapping[str, Spec], places: Mapping[str, str]) -> bytes:
    """The index, as transformers writes it."""
    metadata = {
        "total_parameters": sum(spec.numel for spec in specs.values()),
        "total_size": sum(spec.nbytes for spec in specs.values()),
    }
    return (json.dumps({"metadata": metadata, "weight_map": dict(places)}, indent=2, sort_keys=True) + "\n").encode()
