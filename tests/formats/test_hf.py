"""Hugging Face directories, with safetensors and huggingface_hub as the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckptkit.dtypes import DTYPES
from ckptkit.errors import CkptError, Corrupt, Unsafe, Unsupported
from ckptkit.formats import open_layout
from ckptkit.formats.hf import HuggingFace
from ckptkit.layout import Layout, Options, Spec, StoredTensor
from tests.formats.contract import WriterContract, assert_holds
from tests.producers import counted


class TestHuggingFace(WriterContract):
    format = "hf"
    cannot_hold = frozenset({torch.complex128})

    def write(self, root: Path, tensors: dict[str, Tensor]) -> None:
        root.mkdir()
        save_file(tensors, root / "model.safetensors", {"format": "pt"})

    def load(self, root: Path) -> dict[str, Tensor]:
        return {name: tensor for file in root.glob("*.safetensors") for name, tensor in load_file(file).items()}

    def of_every_kind(self) -> dict[str, Tensor]:
        """But for a 0-d tensor of packed 4-bit numbers, which safetensors cannot spell."""
        return {name: t for name, t in super().of_every_kind().items() if name != "float4_e2m1fn_x2.scalar"}

    def test_reads_what_the_hub_shards(self, tmp_path: Path) -> None:
        tensors = {f"layers.{i}.weight": counted(4, i + 1) for i in range(9)}
        save_torch_state_dict(dict(tensors), tmp_path, max_shard_size=200)
        assert (tmp_path / "model.safetensors.index.json").exists()
        assert_holds(open_layout(tmp_path), tensors)

    def test_reads_a_file_by_its_name(self, tmp_path: Path) -> None:
        tensors = {"w": counted(3)}
        save_file(tensors, tmp_path / "adapter.safetensors")
        assert_holds(open_layout(tmp_path / "adapter.safetensors"), tensors)

    def test_writes_what_the_library_would(self, tmp_path: Path) -> None:
        tensors = self.of_every_kind()
        self.make(tmp_path / "ours", tensors)
        save_file(tensors, tmp_path / "theirs", {"format": "pt"})
        assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()

    def test_headers_are_padded_and_say_pt(self, tmp_path: Path) -> None:
        self.make(tmp_path / "there", {"w": counted(3)})
        file = tmp_path / "there" / "model.safetensors"
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}

    def test_the_index_says_where_and_how_much(self, tmp_path: Path) -> None:
        tensors = {f"layers.{i}.weight": counted(4, 4) for i in range(12)}
        self.make(tmp_path / "there", tensors, max_shard_size=3 * 64)
        index = json.loads((tmp_path / "there" / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_parameters": 12 * 16, "total_size": 12 * 64}
        files = sorted(path.name for path in (tmp_path / "there").glob("*.safetensors"))
        assert files == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
        for name, file in index["weight_map"].items():
            assert name in load_file(tmp_path / "there" / file)
        in_order = [index["weight_map"][f"layers.{i}.weight"] for i in range(12)]
        assert in_order == sorted(in_order), "layers lie in natural order"

    def test_a_shard_is_no_larger_than_asked(self, tmp_path: Path) -> None:
        self.make(tmp_path / "there", {str(i): counted(10) for i in range(9)}, max_shard_size=100)
        assert all(
            sum(t.nbytes for t in load_file(f).values()) <= 100 for f in (tmp_path / "there").glob("*.safetensors")
        )


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


# -- the index ---------------------------------------------------------------------------------------------------------


def sharded(root: Path) -> dict[str, Any]:
    """A model in two files; its index, to be written again after a change."""
    save_file({"a": counted(2)}, root / "model-00001-of-00002.safetensors")
    save_file({"b": counted(3)}, root / "model-00002-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 20}, "weight_map": places}
    write_index(root, index)
    return index


def write_index(root: Path, index: Any) -> None:
    (root / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "sub/x", "", "..", "a\0b", "a\\b"])
def test_an_index_may_only_name_files_beside_it(tmp_path: Path, file: str) -> None:
    index = sharded(tmp_path)
    index["weight_map"]["b"] = file
    write_index(tmp_path, index)
    with pytest.raises(Unsafe):
        open_layout(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"a": "model-00002-of-00002.safetensors"},
        {"c": "model-00001-of-00002.safetensors"},
        {"b": "model-00003-of-00002.safetensors"},
        {"b": 7},
    ],
    ids=["wrong file", "no such tensor", "missing file", "no name"],
)
def test_an_index_that_contradicts_its_files_is_corrupt(tmp_path: Path, change: dict[str, Any]) -> None:
    index = sharded(tmp_path)
    index["weight_map"] |= change
    write_index(tmp_path, index)
    with pytest.raises(Corrupt):
        open_layout(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', "null", "\x00" * 20]
)
def test_a_broken_index_is_corrupt(tmp_path: Path, text: str) -> None:
    sharded(tmp_path)
    write_index(tmp_path, text)
    with pytest.raises(Corrupt) as raised:
        open_layout(tmp_path)
    assert raised.value.path == tmp_path / "model.safetensors.index.json"


def test_a_tensor_that_the_index_does_not_know_is_corrupt(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    save_file({"b": counted(3), "stray": counted(1)}, tmp_path / "model-00002-of-00002.safetensors")
    write_index(tmp_path, index)
    with pytest.raises(Corrupt) as raised:
        open_layout(tmp_path)
    assert raised.value.tensor == "stray"


def test_shards_without_their_index_are_corrupt(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(Corrupt, match="index"):
        open_layout(tmp_path)


def test_an_old_single_file_beside_new_shards_is_ambiguous(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a": counted(2)}, tmp_path / "model.safetensors")
    with pytest.raises(Corrupt):
        open_layout(tmp_path)


def test_a_linked_shard_is_unsafe(tmp_path: Path) -> None:
    sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unsafe):
        open_layout(tmp_path)


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_the_header_cannot_hold_is_unsupported(name: str) -> None:
    stored = StoredTensor(Spec(DTYPES["float32"], (2,)), ())
    with pytest.raises(Unsupported) as raised:
        HuggingFace().arrange(Layout(Path(), "raw", {name: stored}), Options(1 << 40))
    assert raised.value.tensor == name


def test_strange_names_survive(tmp_path: Path) -> None:
    names = ["line\nbreak", "\x1b[31m", 'quote"', "back\\slash", "", "../up"]
    TestHuggingFace().check_writing(tmp_path / "there", {name: counted(1) + i for i, name in enumerate(names)})
