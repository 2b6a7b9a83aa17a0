"""Read the zip that torch.save writes: where the bytes of a tensor lie inside it.

Source: torch/serialization.py and caffe2/serialize/inline_container.cc; the zip fields are those of PKWARE's
APPNOTE.TXT. Local headers carry no sizes (flag bit 3), so everything is found from the central directory.
Reads a kilobyte or two per archive, never tensor data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import chain
from math import prod
from struct import Struct
from typing import Any, NamedTuple
from zlib import crc32

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.files.file import recognise
from ckptkit.formats.torchfile import inert_pickle
from ckptkit.formats.torchfile.inert_pickle import Global, Record
from ckptkit.layout import Chunk
from ckptkit.tensors.box import Box, Shape
from ckptkit.tensors.dtypes import DTYPES, DType

ReadAt = Callable[[int, int], bytes]  # (offset in the archive, length) -> bytes

_local = Struct("<4sHHHHHIIIHH")  # signature .. name length, extra length
_central = Struct("<4sHHHHHHIIIHHHHHII")
_end = Struct("<4sHHHHIIH")
_end64_locator = Struct("<4sIQI")
_end64 = Struct("<4sQHHIIQQQQ")
_ALL_ONES = 0xFFFFFFFF
_HAS_DESCRIPTOR = 8  # flag bit 3: CRC and sizes follow the content
_DIRECTORY_LIMIT = 1 << 26  # bytes; half a million entries
_CONTENT_LIMIT = 1 << 16  # bytes of `data.pkl` for one tensor, and of the other small entries
_PIECE = 1 << 20  # bytes of an entry that are read at once to be compared
GLANCE = 2048  # bytes read at each end; torch's own head and directory take about 800 and 600

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_TENSORS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_REBUILDS = (*_TENSORS, *_PARAMETERS)
_in_torch_utils = cache(partial(Global, "torch._utils"))
_SIZE = Global("torch", "Size")
_REBUILD_OF_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_REBUILD_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_PLAIN_TYPES = (
    Global("torch", "Tensor"),
    Global("torch.nn.parameter", "Parameter"),
    Global("torch.nn.parameter", "Buffer"),
)
_REFUSED = {
    "_rebuild_qtensor": "quantized",
    "_rebuild_sparse_tensor": "sparse",
    "_rebuild_nested_tensor": "nested",
    "_rebuild_meta_tensor_no_storage": "on the meta device, without data",
    "_rebuild_wrapper_subclass": "a tensor subclass",
    "_rebuild_from_type_v2": "a tensor subclass",
}
# torchao's parameters that are rounded only as a training uses them: the attribute that holds one as it is
_HOLDERS = {
    "WeightWithDynamicFloat8CastTensor": "_tensor",
    "WeightWithDelayedFloat8CastTensor": "_tensor",
    "WeightWithStaticFloat8CastTensor": "_tensor",
    "ScaledGroupedMMTensor": "_data",
    "Float8TrainingWeightWrapperTensor": "_data",
    "MXFP8TrainingWeightWrapperTensor": "_data",
    "Int8MixedPrecisionTrainingLinearWeight": "_data",
    "BitNetTrainingLinearWeight": "_data",
}
_WRAPPING = ("torchao", "transformer_engine")  # whose classes are tensors; none of what they name is imported
_MADE_ANEW = "._make_in_reduce_ex"  # what Transformer Engine calls to make one
_TORCH_NAMES = frozenset(
    [
        *(("torch", name) for name in (*DTYPES, *STORAGES, "Size", "device", "Tensor", "strided")),
        *(("torch._utils", name) for name in (*_REBUILDS, *_REFUSED)),
        ("torch._tensor", "_rebuild_from_type_v2"),
        ("torch.storage", "UntypedStorage"),
        ("torch.nn.parameter", "Parameter"),
        ("torch.nn.parameter", "Buffer"),
        ("torch.serialization", "_get_layout"),
        ("torch", "QUInt8Storage"),
        ("torch", "QInt8Storage"),
        ("torch", "QInt32Storage"),
        ("torch", "per_tensor_affine"),
        ("torch", "per_channel_affine"),
        ("collections", "OrderedDict"),
        *(("builtins", "getattr"), ("__builtin__", "getattr")),  # of a class of those; a call of it is a name
    ]
)


class _Names:
    """The names that the pickle of one tensor may have."""

    def __contains__(self, name: object) -> bool:
        match name:
            case (str(module), str()):
                return module.partition(".")[0] in _WRAPPING or name in _TORCH_NAMES
        return False


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in the archive: `length` bytes of content at `offset`, described at `record` of the archive's directory.

    A `crc32` of 0 means that none was computed.
    """

    offset: int
    length: int
    crc32: int
    record: int = 0

    @property
    def crc_at(self) -> tuple[int, int]:
        """Return where its CRC-32 stands: in the description that follows the content, and in the directory."""
        return self.offset + self.length + 4, self.record + 16


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor as `data.pkl` describes it: a view of storage `key`, offsets and strides in elements."""

    key: str
    dtype: DType
    offset: int
    shape: Shape
    strides: Shape

    @property
    def span(self) -> int:
        """Return the elements of the storage from the tensor's first to its last, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_row_major(self) -> bool:
        """Return True if its elements lie one after another in the order of their indices."""
        expected = prod(self.shape)
        for n, stride in zip(self.shape, self.strides, strict=True):
            expected //= n or 1
            if n > 1 and stride != expected:
                return False
        return True


class Located(NamedTuple):
    """The place of a tensor's bytes: `length` of them at `offset` of the archive, in the order `strides` gives.

    One that has only a part of its storage is checked with that, if it has a CRC-32.
    """

    tensor: TensorRecord
    offset: int
    length: int
    strides: Shape | None
    crc32: int | None
    storage: Entry | None = None

    def chunk(self, box: Box, path: str) -> Chunk:
        """Return it as a box of a tensor, in file `path`; if it is a part of its storage, with the checksum of that."""
        own = Chunk(box, path, self.offset, self.length, self.tensor.dtype, self.strides, self.crc32)
        storage = self.storage
        return own if storage is None else own._replace(crc32=storage.crc32, run=(storage.offset, storage.length))


def open_archive(read: ReadAt, length: int) -> tuple[Located, dict[str, Entry]]:
    """Return where the one tensor of an archive of `length` bytes lies, and every entry.

    Raises `Corrupt`, or `Unsupported` naming what it holds.
    """
    read = glance(read, length)
    entries = read_directory(read, length)
    check_byte_order(read, entries)
    return place_tensor(parse_tensor(read_entry(read, entries, "data.pkl")), entries), entries


def place_tensor(tensor: TensorRecord, entries: Mapping[str, Entry]) -> Located:
    """Return where the bytes of a tensor lie, by the archive's directory. Its storage may be too small: `Corrupt`."""
    storage = entries.get(f"data/{tensor.key}")
    if storage is None:
        raise Corrupt(f"the archive has no entry `data/{tensor.key}`")
    start = tensor.offset * tensor.dtype.itemsize
    nbytes = tensor.span * tensor.dtype.itemsize
    if start + nbytes > storage.length:
        raise Corrupt(f"the tensor needs bytes {start}:{start + nbytes} of a storage of {storage.length}")
    is_whole = nbytes == storage.length
    return Located(
        tensor=tensor,
        offset=storage.offset + start,
        length=nbytes,
        strides=None if tensor.is_row_major else tensor.strides,
        crc32=storage.crc32 if is_whole and storage.crc32 else None,
        storage=None if is_whole or not storage.crc32 else storage,
    )


def glance(read: ReadAt, length: int) -> ReadAt:
    """Return `read`, answering from two reads of the archive's first and last bytes made in advance, where possible."""
    head = read(0, min(length, GLANCE))
    cut = max(0, length - GLANCE)
    tail = read(cut, length - cut) if cut else head

    def read_glanced(offset: int, size: int) -> bytes:
        if offset + size <= len(head):
            return head[offset : offset + size]
        if offset >= cut:
            return tail[offset - cut : offset - cut + size]
        return read(offset, size)

    return read_glanced


def read_directory(read: ReadAt, length: int) -> dict[str, Entry]:
    """Return every entry of the archive, by its name after the first slash (torch prefixes the archive's own name)."""
    count, size, offset = find_directory(read, length)
    if offset + size > length or size > _DIRECTORY_LIMIT:
        raise Corrupt(f"the zip directory at {offset}:{offset + size} does not fit an archive of {length} bytes")
    directory = read(offset, size)
    entries: dict[str, Entry] = {}
    at = 0
    for _ in range(count):
        if at + _central.size > size:
            raise Corrupt("the zip directory is cut short")
        fields = _central.unpack_from(directory, at)
        record = offset + at
        name_length, extra_length, comment_length = fields[10:13]
        at += _central.size
        raw_name = directory[at : at + name_length]
        extra = directory[at + name_length : at + name_length + extra_length]
        at += name_length + extra_length + comment_length
        name = raw_name.decode("utf-8", "replace").partition("/")[2]
        if name in entries:
            raise Corrupt(f"the archive has two entries `{name}`")
        entries[name] = Entry(*read_entry_place(read, fields, raw_name, extra, offset), fields[7], record)
    return entries


def read_entry_place(
    read: ReadAt, fields: tuple[Any, ...], raw_name: bytes, extra: bytes, limit: int
) -> tuple[int, int]:
    """Return offset and length of the content of a central-directory entry; `limit` is where the directory starts."""
    signature, flags, method, checksum, packed, unpacked, header = (fields[i] for i in (0, 3, 4, 7, 8, 9, 16))
    if signature != b"PK\x01\x02":
        raise Corrupt("the zip directory is garbled")
    packed, unpacked, header = widen(unpacked, packed, header, extra)
    if method != 0 or packed != unpacked or flags & 1:
        raise Unsupported(
            f"entry `{raw_name.decode('utf-8', 'replace')}` is compressed or encrypted; torch stores plainly"
        )
    if header + _local.size > limit:
        raise Corrupt(f"a zip entry starts at {header}, past the {limit} bytes of the archive's entries")
    local = _local.unpack(read(header, _local.size))
    start = header + _local.size
    if local[0] != b"PK\x03\x04" or read(start, local[9]) != raw_name:
        raise Corrupt(f"the zip directory says that an entry starts at byte {header}, and none does")
    offset = start + local[9] + local[10]
    if offset + unpacked > limit:
        raise Corrupt(
            f"a zip entry at {offset}:{offset + unpacked} does not fit the {limit} bytes of the archive's entries"
        )
    if flags & _HAS_DESCRIPTOR and read(offset + unpacked, 8) != b"PK\x07\x08" + checksum.to_bytes(4, "little"):
        raise Corrupt(f"the zip entry at {offset}:{offset + unpacked} is not followed by its own description")
    return offset, unpacked


def widen(unpacked: int, packed: int, header: int, extra: bytes) -> tuple[int, int, int]:
    """Return packed size, unpacked size and header offset, those that do not fit 32 bits from the zip64 field."""
    values = [unpacked, packed, header]
    while len(extra) >= 4:
        kind, size = int.from_bytes(extra[:2], "little"), int.from_bytes(extra[2:4], "little")
        field, extra = extra[4 : 4 + size], extra[4 + size :]
        if kind == 1:
            for i, value in enumerate(values):
                if value == _ALL_ONES and len(field) >= 8:
                    values[i], field = int.from_bytes(field[:8], "little"), field[8:]
    return values[1], values[0], values[2]


def find_directory(read: ReadAt, length: int) -> tuple[int, int, int]:
    """Return number of entries, size and offset of the central directory, from the archive's last bytes."""
    if length < _end.size:
        raise Corrupt(f"{length} bytes are too few for an archive")
    end = _end.unpack(read(length - _end.size, _end.size))
    if end[0] != b"PK\x05\x06":
        head = read(0, min(length, 64))
        if head[8:9] == b"{":
            raise Unsupported(
                "the bytes are safetensors, not torch.save's archive: saved with another serialization format"
            )
        raise Corrupt("not an archive of torch.save, or its end is missing", hint=recognise(head))
    count, size, offset = end[4:7]
    if count == 0xFFFF or _ALL_ONES in (size, offset):
        at = length - _end.size - _end64_locator.size
        locator = _end64_locator.unpack(read(at, _end64_locator.size)) if at >= 0 else (b"",)
        if locator[0] != b"PK\x06\x07" or locator[2] + _end64.size > length:
            raise Corrupt("the zip64 end of the archive is missing")
        end64 = _end64.unpack(read(locator[2], _end64.size))
        if end64[0] != b"PK\x06\x06":
            raise Corrupt("the zip64 end of the archive is garbled")
        count, size, offset = end64[7:10]
    if count * _central.size > size:
        raise Corrupt(f"a zip directory of {size} bytes cannot hold {count} entries")
    return count, size, offset


def check_contents(data: bytes) -> None:
    """Raise `Corrupt` unless everything in an archive, given whole, has the CRC-32 that is recorded for it."""

    def read(offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > len(data):
            raise Corrupt(f"bytes {offset}:{offset + length} lie outside the entry's {len(data)}")
        return data[offset : offset + length]

    check_archive(read, len(data))


def check_archive(read: ReadAt, length: int) -> None:
    """Raise `Corrupt` unless everything in an archive of `length` bytes has the CRC-32 that is recorded for it."""
    for name, entry in read_directory(glance(read, length), length).items():
        pieces = range(entry.offset, entry.offset + entry.length, _PIECE)
        found = 0
        for start in pieces if entry.crc32 else ():
            found = crc32(read(start, min(_PIECE, entry.offset + entry.length - start)), found)
        if found != entry.crc32:
            raise damaged(name, entry, found)


def damaged(name: str, entry: Entry, found: int) -> Corrupt:
    """Return the error for an entry of an archive that has another CRC-32 than is recorded for it."""
    return Corrupt(f"entry `{name}` is damaged: CRC-32 is {found:08x}, recorded {entry.crc32:08x}")


def large_entries(read: ReadAt, length: int) -> Iterator[Entry]:
    """Return the entries of an archive of `length` bytes that are too large to be looked at here.

    Raises `Corrupt` unless every other entry has the CRC-32 that is recorded for it.
    """
    read = glance(read, length)
    entries = read_directory(read, length)
    for name, entry in entries.items():
        if entry.length > _CONTENT_LIMIT or (entry.length and not entry.crc32):
            yield entry
        else:
            read_entry(read, entries, name)


def read_entry(read: ReadAt, entries: Mapping[str, Entry], name: str, *, limit: int = _CONTENT_LIMIT) -> bytes:
    """Return the content of an entry of at most `limit` bytes, its CRC compared."""
    entry = entries.get(name)
    if entry is None:
        raise Corrupt(f"the archive has no entry `{name}`")
    if entry.length > limit:
        raise Unsupported(f"entry `{name}` has {entry.length} bytes, more than the {limit} it should need")
    content = read(entry.offset, entry.length)
    if entry.crc32 and crc32(content) != entry.crc32:
        raise damaged(name, entry, crc32(content))
    return content


def check_byte_order(read: ReadAt, entries: Mapping[str, Entry]) -> None:
    """Raise `Unsupported` for an archive written on a big-endian machine; torch before 2.1 did not say."""
    if "byteorder" in entries and read_entry(read, entries, "byteorder").strip() != b"little":
        raise Unsupported("the tensor was saved in big-endian byte order")


@lru_cache(maxsize=256)
def parse_tensor(data: bytes) -> TensorRecord:
    """Return the tensor that a `data.pkl` describes; the same few hundred bytes for every chunk of one shape."""
    value, _ = inert_pickle.load(data, _Names())
    return as_tensor(value)


def is_tensor(value: object) -> bool:
    """Return True if `value` would have been made by a function of torch's that makes tensors, known to us or not."""
    return (
        isinstance(value, Record)
        and isinstance(value.of, Global)
        and (
            (value.of.module in ("torch._utils", "torch._tensor") and value.of.name.startswith("_rebuild"))
            or value.of.name.endswith(_MADE_ANEW)
        )
    )


def as_tensor(value: object) -> TensorRecord:
    """Return the tensor that a pickled value would have been. Raises `Unsupported` naming what it is instead."""
    call = unwrap(value)
    if not any(is_call(call, name) for name in _TENSORS):
        made_by = call.of.name if isinstance(call, Record) and isinstance(call.of, Global) else ""
        what = _REFUSED.get(made_by, f"something else than a plain tensor ({made_by or type(call).__name__})")
        if made_by.endswith(_MADE_ANEW):
            what = f"a tensor subclass, `{str(call.of).removesuffix(_MADE_ANEW)}`"
        if isinstance(call, Record) and call.of == _REBUILD_OF_TYPE and len(call.args) > 1:
            what += f", `{call.args[1]}`"
        raise Unsupported(
            f"the entry holds {what}", hint="save it as a plain dense tensor, or leave it out with --exclude"
        )
    return parse_rebuild(call)


def unwrap(value: object) -> Any:
    """Return the call that makes the plain tensor in a parameter, a buffer or a tensor with attributes of its own."""
    while isinstance(value, Record) and isinstance(value.args, tuple):
        if any(is_call(value, name) for name in _PARAMETERS) and value.args:
            value = value.args[0]
        elif value.of == _REBUILD_OF_TYPE and len(value.args) == 4 and value.args[1] in _PLAIN_TYPES:
            function, _, arguments, _ = value.args
            value = Record(function, arguments)
        elif (held := held_by(value)) is not None:
            value = held
        else:
            break
    return value


def held_by(value: Record) -> Any | None:
    """Return the tensor that one of torchao's holds as it is, None if it is another. `Corrupt` if its shape differs."""
    match value:
        case Record(of=of, args=(function, Global() as kind, (_, _, size, *_), state)):
            attribute = _HOLDERS.get(kind.name) if kind.module.partition(".")[0] in _WRAPPING else None
            attributes = state[0] if isinstance(state, tuple) and state else state
            if of != _REBUILD_OF_TYPE or function != _REBUILD_WRAPPER or attribute is None:
                return None
            held = attributes.get(attribute) if isinstance(attributes, dict) else None
            if held is None or as_tensor(held).shape != as_shape(size):
                raise Corrupt(f"a `{kind}` of shape {size} does not hold a tensor of it in `{attribute}`")
            return held
    return None


def is_call(value: object, name: str) -> bool:
    """Return True if `value` would have been made by calling torch's function `name`."""
    return isinstance(value, Record) and value.of == _in_torch_utils(name)


def parse_rebuild(call: Record) -> TensorRecord:
    """Parse `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, [dtype], [bits])`.

    In torch 0.4 and before, the storage could itself be a view of a larger one, `(key, offset, size)`.
    """
    try:
        storage, offset, shape, strides = call.args[:4]
        shape, strides = as_shape(shape), as_shape(strides)
        kind, storage_type, key, _location, _numel, *view = storage.value
        offset += view[0][1] if view and view[0] else 0
        typed = not is_call(call, "_rebuild_tensor_v3")
        dtype = DTYPES[STORAGES[storage_type.name] if typed else call.args[6].name]
        bits = call.args[6 if typed else 7 :]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise Unsupported("data.pkl describes a tensor of a kind that ckptkit does not know") from error
    flags = [bit for bits_of in bits if isinstance(bits_of, dict) for bit, value in bits_of.items() if value]
    if flags:
        raise Unsupported(f"the tensor is a lazy view ({', '.join(map(str, flags))}): its bytes are not its values")
    if kind != "storage" or type(key) is not str or type(offset) is not int or offset < 0 or len(shape) != len(strides):
        raise Corrupt("data.pkl describes an impossible tensor")
    return TensorRecord(key, dtype, offset, shape, strides)


def as_shape(value: object) -> Shape:
    """Return a tuple of non-negative integers, bare or in a `torch.Size`. Raises `ValueError` for anything else."""
    if isinstance(value, Record) and value.of == _SIZE:
        (value,) = value.args
    shape = tuple(value) if isinstance(value, (tuple, list)) else (None,)
    for n in shape:
        if type(n) is not int or not 0 <= n < 2**63:
            raise ValueError("shape")
    return shape


def as_shapes(values: list[Any]) -> list[Shape]:
    """Return each of many values as `as_shape` does; fast if they are tuples of integers. Negative ones may be left."""
    if {tuple}.issuperset(map(type, values)) and {int}.issuperset(map(type, chain.from_iterable(values))):
        return values
    return list(map(as_shape, values))
