"""The archives of torch.save: torch writes them, and we say where the bytes lie."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from struct import pack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats.archives.zip_entries import Located, ReadAt, locate_single_tensor, read_central_directory
from tests.formats.contract import SHAPES, raw_bytes
from tests.producers import DTYPES, bits, counted


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def reader(data: bytes) -> ReadAt:
    """Reads as from a file: never outside it."""

    def read(offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > len(data):
            raise Corrupt(f"{offset}:{offset + length} lies outside")
        return data[offset : offset + length]

    return read


def locate(data: bytes) -> Located:
    return locate_single_tensor(reader(data), len(data))[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_is_found(dtype: torch.dtype) -> None:
    for shape in SHAPES.values():
        tensor = bits(shape, dtype)
        data = saved(tensor)
        found = locate(data)
        assert found.tensor.dtype.name == str(dtype).removeprefix("torch.")
        assert found.tensor.shape == shape
        assert data[found.offset : found.offset + found.length] == raw_bytes(tensor)
        if tensor.numel():
            assert found.strides is None
            assert found.crc32 == zlib.crc32(raw_bytes(tensor))


@pytest.mark.parametrize(
    "tensor",
    [counted(3, 4).t(), counted(2, 3, 4).permute(2, 0, 1), counted(6, 6)[::2, 1:4], counted(3, 1).expand(3, 4)],
    ids=["transposed", "permuted", "sliced", "expanded"],
)
def test_strides_and_offsets_are_told(tensor: Tensor) -> None:
    data = saved(tensor)
    found = locate(data)
    assert found.strides == tensor.stride()
    storage = torch.frombuffer(bytearray(data[found.offset : found.offset + found.length]), dtype=tensor.dtype)
    assert torch.equal(storage.as_strided(tensor.shape, tensor.stride()), tensor)


def test_a_view_is_a_part_of_its_storage_without_a_crc() -> None:
    data = saved(counted(10)[3:7])
    found = locate(data)
    assert data[found.offset : found.offset + found.length] == raw_bytes(counted(10)[3:7])
    assert found.strides is None
    assert found.crc32 is None


def test_parameters_are_tensors() -> None:
    found = locate(saved(nn.Parameter(counted(2, 3))))
    assert found.tensor.shape == (2, 3)


@contextmanager
def option(setting: Callable[[], None], unset: Callable[[], None]) -> Iterator[None]:
    setting()
    try:
        yield
    finally:
        unset()


def test_no_crc_is_none() -> None:
    switch = torch.serialization.set_crc32_options
    with option(lambda: switch(False), lambda: switch(True)):
        data = saved(counted(3))
    assert locate(data).crc32 is None


@pytest.mark.parametrize("alignment", [64, 4096])
def test_any_alignment(alignment: int) -> None:
    from torch.utils.serialization import config

    with option(
        lambda: setattr(config.save, "storage_alignment", alignment),
        lambda: setattr(config.save, "storage_alignment", 64),
    ):
        data = saved(counted(5))
    found = locate(data)
    assert found.offset % alignment == 0
    assert data[found.offset : found.offset + found.length] == raw_bytes(counted(5))


def test_any_archive_name() -> None:
    data = saved(counted(5)).replace(b"archive/", b"a.chive/")
    assert locate(data).length == 20


@pytest.mark.parametrize(
    "value",
    [
        {"a": counted(2)},
        [counted(2)],
        7,
        None,
        "text",
        counted(2, 2).to_sparse(),
        counted(2).to("meta"),
        torch.complex(counted(2), counted(2)).conj(),
        torch._neg_view(counted(2)),
        torch.nested.nested_tensor([counted(2)], layout=torch.jagged),
    ],
    ids=["dict", "list", "number", "none", "text", "sparse", "meta", "conjugated", "negated", "nested"],
)
def test_what_is_no_plain_tensor_is_unsupported(value: object) -> None:
    with pytest.raises(Unsupported):
        locate(saved(value))


def test_big_endian_is_unsupported() -> None:
    data = saved(counted(5)).replace(b"little", b"big   ")
    with pytest.raises(CkptError):
        locate(data)


def rezipped(data: bytes, compression: int = zipfile.ZIP_STORED, **change: bytes) -> bytes:
    """The archive written again by Python, with other contents for some entries, or without one (`None`)."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change.get(name.partition("/")[2].replace("/", "_").replace(".", "_"), old.read(name)))
    return stream.getvalue()


def test_archives_of_other_zip_writers_are_read() -> None:
    tensor = counted(5)
    data = rezipped(saved(tensor))
    found = locate(data)
    assert data[found.offset : found.offset + found.length] == raw_bytes(tensor)
    assert found.crc32 == zlib.crc32(raw_bytes(tensor))


def test_compressed_entries_are_unsupported() -> None:
    with pytest.raises(Unsupported):
        locate(rezipped(saved(counted(5000)), zipfile.ZIP_DEFLATED))


def test_big_endian_of_another_writer_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="big-endian"):
        locate(rezipped(saved(counted(5)), byteorder=b"big"))


def test_a_storage_too_small_for_its_tensor_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="storage"):
        locate(rezipped(saved(counted(5)), data_0=bytes(19)))


def test_a_damaged_description_is_corrupt() -> None:
    data = bytearray(saved(counted(5)))
    at = data.index(b"FloatStorage")
    data[at : at + 12] = b"DoubleStorag"
    with pytest.raises(CkptError):
        locate(bytes(data))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_entries_of_one_name_are_corrupt() -> None:
    data = saved(counted(5))
    stream = io.BytesIO(rezipped(data))
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("archive/data/0", bytes(20))
    with pytest.raises(Corrupt, match="two entries"):
        locate(stream.getvalue())


def test_every_cut_is_corrupt() -> None:
    data = saved(counted(5))
    for end in range(len(data)):
        with pytest.raises(CkptError):
            locate(data[:end])


@settings(max_examples=500)
@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_damaged_byte_moves_nothing(at: int, flip: int) -> None:
    sound = saved(counted(5, 3))
    damaged = bytearray(sound)
    damaged[at % len(sound)] ^= flip
    try:
        found = locate(bytes(damaged))
    except CkptError:
        return
    expected = locate(sound)
    assert (found.offset, found.length, found.strides) == (expected.offset, expected.length, expected.strides)
    assert (found.tensor.dtype, found.tensor.shape) == (expected.tensor.dtype, expected.tensor.shape)


# -- zip64: an archive whose middle is not there -----------------------------------------------------------------------


class Sparse:
    """Bytes of which only some pieces exist; the rest is zeros and takes no memory."""

    def __init__(self) -> None:
        self.pieces: dict[int, bytes] = {}
        self.length = 0

    def append(self, data: bytes) -> int:
        at = self.length
        self.pieces[at] = data
        self.length += len(data)
        return at

    def read(self, offset: int, length: int) -> bytes:
        assert length < 1 << 20, "nobody needs the data itself"
        assert 0 <= offset <= offset + length <= self.length
        out = bytearray(length)
        for at, piece in self.pieces.items():
            low, high = max(at, offset), min(at + len(piece), offset + length)
            if low < high:
                out[low - offset : high - offset] = piece[low - at : high - at]
        return bytes(out)


def test_storages_past_4_gib_are_found() -> None:
    """As torch writes them: sizes and offsets of all ones, and the true ones in the zip64 field of the directory."""
    nbytes = (5 << 30) + 4
    pickled = zipfile.ZipFile(io.BytesIO(saved(counted(5)))).read("archive/data.pkl")
    small, large = b"K\x05", b"\x8a\x05" + (nbytes // 4).to_bytes(5, "little")
    assert pickled.count(small) >= 2

    archive = Sparse()
    directory = b""
    for name, content, hole in (
        (b"archive/data/0", b"", nbytes),
        (b"archive/data.pkl", pickled.replace(small, large), 0),
    ):
        local = pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, 0x800, 0, 0, 0, 0, 0, 0, len(name), 0)
        header = archive.append(local + name + content)
        archive.length += hole
        directory += central(name, len(content) + hole, header, zlib.crc32(content) if content else 0)
    start = archive.append(directory)
    end = archive.append(pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 0, 0, 0, 0, 2, 2, len(directory), start))
    archive.append(pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
    archive.append(pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 2, 2, len(directory), ONES, 0))

    found = locate_single_tensor(archive.read, archive.length)[0]

    assert (found.offset, found.length) == (44, nbytes)
    assert found.tensor.shape == (nbytes // 4,)


ONES = 0xFFFFFFFF


def central(name: bytes, size: int, header: int, crc: int) -> bytes:
    """An entry of the central directory, with what is too large for it in a zip64 field."""
    values = [value for value in (size, size, header) if value >= ONES]
    extra = pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    short = min(size, ONES)
    fields = (0, 0, 0x800, 0, 0, 0, crc, short, short, len(name), len(extra), 0, 0, 0, 0, min(header, ONES))
    return pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", *fields) + name + extra


def test_a_directory_lists_every_entry_without_its_prefix() -> None:
    data = saved({"a": counted(2), "b": counted(3)})
    assert {"data.pkl", "data/0", "data/1", "version", "byteorder"} <= read_central_directory(
        reader(data), len(data)
    ).keys()
