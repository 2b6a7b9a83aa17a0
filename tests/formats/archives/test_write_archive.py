"""What we wrap, torch.load and zipfile open, whatever the dtype and the size; and our own reader finds it again."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckptkit.errors import Unsupported
from ckptkit.formats.archives.write_archive import ZipTemplate, make_zip_template, tensor_rebuild_record
from ckptkit.formats.archives.zip_entries import locate_single_tensor
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout import Spec
from ckptkit.layout.dtypes import DTYPES
from tests.formats.contract import SHAPES, raw_bytes, spec_of
from tests.producers import DTYPES as TORCH_DTYPES
from tests.producers import bits, counted


def filled(envelope: ZipTemplate, data: Mapping[str, bytes], *, sealed: bool = True) -> bytes:
    """An envelope with bytes in its holes."""
    whole = bytearray(envelope.nbytes)
    places = [(hole.offset, data[key]) for key, hole in envelope.holes.items()]
    sums = {key: zlib.crc32(data[key]).to_bytes(4, "little") for key in envelope.holes}
    places_of_sums = [(at, sums[key]) for key, hole in envelope.holes.items() for at in hole.crc_offsets]
    seals = places_of_sums if sealed else []
    for offset, content in (*envelope.parts, *places, *seals):
        assert offset + len(content) <= len(whole)
        whole[offset : offset + len(content)] = content
    return bytes(whole)


def wrap(tensor: Tensor, *, sealed: bool = True) -> bytes:
    spec = spec_of(tensor)
    envelope = make_zip_template(dump(tensor_rebuild_record(spec, "0")), {"0": spec.nbytes})
    return filled(envelope, {"0": raw_bytes(tensor)}, sealed=sealed)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_torch_loads_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = bits(shape, dtype)
    found = torch.load(io.BytesIO(wrap(tensor)), weights_only=True)
    assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert raw_bytes(found) == raw_bytes(tensor)


def test_torch_maps_it_to_memory(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(wrap(counted(5, 7)))
    assert torch.equal(torch.load(tmp_path / "t", mmap=True), counted(5, 7))


def test_zipfile_finds_nothing_wrong() -> None:
    with zipfile.ZipFile(io.BytesIO(wrap(counted(5, 7)))) as archive:
        assert archive.testzip() is None
    with zipfile.ZipFile(io.BytesIO(wrap(counted(5, 7), sealed=False))) as archive:
        assert archive.testzip() == "archive/data/0"


def test_our_reader_finds_the_bytes_and_their_checksum() -> None:
    tensor = counted(5, 7)
    data = wrap(tensor)
    found = locate_single_tensor(lambda offset, length: data[offset : offset + length], len(data))[0]
    assert data[found.offset : found.offset + found.length] == raw_bytes(tensor)
    assert found.crc32 == zlib.crc32(raw_bytes(tensor))
    assert found.offset % 64 == 0


def test_known_storages_and_holes_stand_side_by_side() -> None:
    one, two = counted(3), counted(4, dtype=torch.int64)
    pickle = dump(
        {"one": tensor_rebuild_record(spec_of(one), "0"), "two": tensor_rebuild_record(spec_of(two), "1"), "n": 3}
    )
    envelope = make_zip_template(pickle, {"0": raw_bytes(one), "1": two.nbytes})
    assert list(envelope.holes) == ["1"]
    found = torch.load(io.BytesIO(filled(envelope, {"1": raw_bytes(two)})), weights_only=True)
    assert found["n"] == 3
    assert torch.equal(found["one"], one)
    assert torch.equal(found["two"], two)


def test_more_than_4_gib_in_one_storage_and_behind_it(tmp_path: Path) -> None:
    rows = (1 << 32) + 7
    large = tensor_rebuild_record(Spec(DTYPES["uint8"], (rows,)), "0")
    small = tensor_rebuild_record(Spec(DTYPES["int64"], (3,)), "1")
    envelope = make_zip_template(dump({"large": large, "small": small}), {"0": rows, "1": 24})
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(envelope.nbytes)
        data = raw_bytes(torch.tensor([1, 2, 3]))
        for offset, content in (*envelope.parts, (envelope.holes["1"].offset, data)):
            file.seek(offset)
            file.write(content)
    found = torch.load(path, mmap=True)
    assert found["large"].shape == (rows,)
    assert found["small"].tolist() == [1, 2, 3]
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == rows


def test_a_quantized_tensor_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="scales"):
        tensor_rebuild_record(Spec(DTYPES["quint8"], (2,)), "0")
