"""Headers of safetensors files, right and wrong, with the safetensors library as the oracle."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError, Unsupported
from ckptkit.formats.safetensors_headers import read_header_chunks
from tests.formats.contract import assert_holds
from tests.producers import counted


def file_of(header: Any, data: bytes = b"", *, pad: int = 0, length: int | None = None) -> bytes:
    """A safetensors file of any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, *, dtype: str = "U8", shape: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]} | more


REJECTED = {
    "empty file": b"",
    "seven bytes": b"\x00" * 7,
    "header beyond the file": file_of({"a": entry(0, 2)}, b"ab", length=1 << 62),
    "header of 200 MB": file_of({}, length=200_000_000),
    "no JSON": file_of(b"not json"),
    "no object": file_of(b"[1, 2]"),
    "not UTF-8": file_of(b'{"\xff": 1}'),
    "byte order mark": file_of(b"\xef\xbb\xbf{}"),
    "JSON in JSON in JSON": file_of(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "hole": file_of({"a": entry(0, 2), "b": entry(3, 4)}, b"abcd"),
    "overlap": file_of({"a": entry(0, 2), "b": entry(1, 3)}, b"abc"),
    "same range twice": file_of({"a": entry(0, 2), "b": entry(0, 2)}, b"ab"),
    "first not at 0": file_of({"a": entry(1, 2)}, b"ab"),
    "bytes after the data": file_of({"a": entry(0, 2)}, b"abc"),
    "bytes missing": file_of({"a": entry(0, 2)}, b"a"),
    "end before begin": file_of({"a": entry(2, 0, shape=[0])}, b"ab"),
    "shape of other size": file_of({"a": entry(0, 2, shape=[3])}, b"ab"),
    "shape that overflows": file_of({"a": entry(0, 2, shape=[1 << 62, 1 << 62, 4])}, b"ab"),
    "negative dimension": file_of({"a": entry(0, 2, shape=[-2])}, b"ab"),
    "fractional dimension": file_of({"a": entry(0, 2, shape=[2.0])}, b"ab"),
    "true for a dimension": file_of({"a": entry(0, 1, shape=[True])}, b"a"),
    "unknown dtype": file_of({"a": entry(0, 2, dtype="F7")}, b"ab"),
    "no dtype": file_of({"a": {"shape": [2], "data_offsets": [0, 2]}}, b"ab"),
    "entry is a list": file_of({"a": [1]}, b"ab"),
    "offsets of three": file_of({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1, 2]}}, b"ab"),
    "metadata of numbers": file_of({"__metadata__": {"step": 1}, "a": entry(0, 2)}, b"ab"),
    "equal keys": file_of(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b"ab",
    ),
    "equal keys at the end of many": file_of(
        ("{" + ",".join(f'"{i}":{{}}' for i in range(200_000)) + ',"199999":{}}').encode()
    ),
    "end beyond any file": file_of({"a": entry(0, 2**64 - 1)}, b"ab"),
    "size that overflows": file_of({"a": entry(0, 0, shape=[2**40] * 50_000)}),
    "dtype is a list": file_of(
        b'{"a":{"dtype":' + b"[" * 900 + b"]" * 900 + b',"shape":[],"data_offsets":[0,1]}}', b"a"
    ),
    "shape is text": file_of({"a": {"dtype": "U8", "shape": "2", "data_offsets": [0, 2]}}, b"ab"),
    "number of 5000 digits": file_of(b'{"a":' + b"9" * 5000 + b"}"),
    "archive in front": b"PK\x03\x04" + bytes(60) + file_of({"a": entry(0, 2)}, b"ab"),
    "zeros": bytes(4096),
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n",
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_the_library_rejects_we_reject(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(REJECTED[name])
    with pytest.raises((SafetensorError, OSError)):
        load_file(path)
    with pytest.raises(CkptError) as raised:
        open_layout(path)
    assert raised.value.exit_code == 3
    assert raised.value.path == path


ACCEPTED = {
    "unpadded": file_of({"a": entry(0, 2)}, b"ab", pad=1),
    "offsets in another order": file_of({"b": entry(1, 2), "a": entry(0, 1)}, b"ab"),
    "no metadata": file_of({"a": entry(0, 2)}, b"ab"),
    "scalar": file_of({"a": entry(0, 1, shape=[])}, b"a"),
    "empty tensors at one place": file_of({"a": entry(0, 0), "b": entry(0, 0), "c": entry(0, 1)}, b"x"),
    "misaligned": file_of({"a": entry(0, 1), "b": entry(1, 5, dtype="F32", shape=[1])}, b"xabcd"),
    "nothing": file_of({}),
    "more fields": file_of({"a": entry(0, 1, comment="x")}, b"x"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_library_accepts_we_accept(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(ACCEPTED[name])
    assert_holds(open_layout(path), load_file(path))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "model.safetensors"
    save_file({"a": counted(2, 3), "b": counted(4, dtype=torch.int16), "c": torch.tensor(1.5)}, path)
    return path.read_bytes()


@settings(max_examples=300)
@given(data=st.data())
def test_a_damaged_header_is_read_as_the_library_reads_it_or_refused(
    tmp_path_factory: pytest.TempPathFactory, sound: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    damaged = bytearray(sound)
    length = 8 + int.from_bytes(sound[:8], "little")
    for _ in range(data.draw(st.integers(1, 2))):
        damaged[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        layout = open_layout(path)
    except CkptError:
        return
    assert_holds(layout, load_file(path))


def test_every_cut_is_refused(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "model.safetensors"
    for end in range(len(sound)):
        path.write_bytes(sound[:end])
        with pytest.raises(CkptError):
            open_layout(path)


def test_more_axes_than_anything_could_read_are_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({"a": entry(0, 1, shape=[1] * 65)}, b"a"))
    with pytest.raises(Unsupported, match="at most 64 axes, found 65"):
        read_header_chunks(path)
    path.write_bytes(file_of({"a": entry(0, 1, shape=[1] * 64)}, b"a"))
    assert read_header_chunks(path)["a"].size == (1,) * 64


def test_no_value_in_any_place_makes_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values: tuple[Any, ...] = (
        *(None, True, -1, 1.5, 2**63, 2**64, 1e400, "", "F32"),
        *([], [[]], {}, {"a": 1}, [None], [2**63], ["x"]),
    )
    for value in values:
        for place in ("dtype", "shape", "data_offsets"):
            path.write_bytes(file_of({"a": entry(0, 2) | {place: value}}, b"ab"))
            with pytest.raises(CkptError):
                read_header_chunks(path)
        for header in (value, {"a": value}, {"__metadata__": value, "a": entry(0, 2)}, {"__metadata__": {"x": value}}):
            path.write_bytes(file_of(header, b"ab"))
            with suppress(CkptError):
                read_header_chunks(path)
