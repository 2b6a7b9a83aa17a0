"""Hugging Face directories, with safetensors and huggingface_hub as the oracle."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.conversion.convert import convert
from ckptkit.errors import CkptError, Corrupt, Unsafe, Unsupported
from ckptkit.formats.hf import HuggingFace
from ckptkit.formats.safetensors_headers import SPELLINGS, safetensors_supports_dtype
from ckptkit.layout import Layout, Spec, StoredTensor, WriterOptions
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DTYPES
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


# -- checking what was written -----------------------------------------------------------------------------------------


def three(root: Path) -> Layout:
    """Three tensors that we wrote, of which the last has no bytes."""
    return TestHuggingFace().make(root, {"a": counted(2, 3), "b": counted(3, 2), "empty": counted(0, 4)})


def changed(layout: Layout, name: str, **fields: Any) -> Layout:
    """The layout with other fields of a tensor's chunk."""
    tensor = layout.tensors[name]
    chunk = tensor.chunks[0]._replace(**fields)
    return replace(layout, tensors={**layout.tensors, name: replace(tensor, chunks=(chunk,))})


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("a", {"dtype": DTYPES["int32"]}, r"expected \('I32', \(2, 3\)\), as written, found \('F32', \(2, 3\)\)"),
        ("a", {"box": full_box((3, 2))}, r"expected \('F32', \(3, 2\)\), as written, found \('F32', \(2, 3\)\)"),
        ("a", {"offset": 1 << 30}, "in another order"),
        ("empty", {"box": full_box((0, 5))}, r"expected \('F32', \(0, 5\)\), as written"),
    ],
    ids=["dtype", "shape", "offset", "empty"],
)
def test_the_library_sees_what_was_not_meant(tmp_path: Path, name: str, fields: dict[str, Any], words: str) -> None:
    layout = three(tmp_path / "there")
    HuggingFace().check_with_own_library(layout)
    with pytest.raises(Corrupt, match=words) as raised:
        HuggingFace().check_with_own_library(changed(layout, name, **fields))
    assert raised.value.path == tmp_path / "there" / "model.safetensors"


def test_the_library_sees_too_much_or_too_little(tmp_path: Path) -> None:
    layout = three(tmp_path / "there")
    tensors = dict(layout.tensors)
    with pytest.raises(Corrupt, match="expected None, as written"):
        HuggingFace().check_with_own_library(replace(layout, tensors={name: tensors[name] for name in ("a", "empty")}))
    with pytest.raises(Corrupt, match="found None in the safetensors library"):
        HuggingFace().check_with_own_library(replace(layout, tensors=tensors | {"c": tensors["a"]}))


def test_the_library_cannot_read_it(tmp_path: Path) -> None:
    layout = three(tmp_path / "there")
    file = tmp_path / "there" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Corrupt, match="cannot read what was written"):
        HuggingFace().check_with_own_library(layout)


def test_a_dtype_that_the_library_does_not_know_is_refused_before_anything_is_written() -> None:
    assert all(map(safetensors_supports_dtype, SPELLINGS.values()))
    assert not safetensors_supports_dtype("F6_E0M5")


def test_nothing_is_shown_that_the_library_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three(tmp_path / "there")

    def unreadable(_: HuggingFace, made: Layout) -> None:
        raise Corrupt("not as meant", path=made.root)

    monkeypatch.setattr(HuggingFace, "check_with_own_library", unreadable)
    with pytest.raises(Corrupt, match="not as meant"):
        convert(tmp_path / "there", tmp_path / "out", to="hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there", "there-source"]


def test_checking_imports_no_torch(tmp_path: Path) -> None:
    three(tmp_path / "there")
    code = (
        "import sys; from pathlib import Path; from ckptkit.formats import get_writer\n"
        "writer = get_writer('hf'); writer.check_with_own_library(writer.read(Path(sys.argv[1])))\n"
        "print(*{'torch', 'safetensors'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "there"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["safetensors"]


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


def test_numbered_files_are_whole_without_their_index_if_all_are_there(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert HuggingFace().is_complete(tmp_path)
    assert_holds(open_layout(tmp_path), {"a": counted(2), "b": counted(3)})
    save_file({"a": counted(2)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(Corrupt, match="overlap") as raised:
        open_layout(tmp_path)
    assert raised.value.tensor == "a"


@pytest.mark.parametrize("with_index", [True, False])
def test_a_numbered_file_that_is_missing_is_named(tmp_path: Path, with_index: bool) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    if not with_index:
        (tmp_path / "model.safetensors.index.json").unlink()
    assert_refused(tmp_path, "model-00001-of-00002.safetensors")


def test_numbers_of_two_saves_are_corrupt(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"c": counted(2)}, tmp_path / "model-00001-of-00003.safetensors")
    assert_refused(tmp_path, "one of 2 files, one of 3 files")


def test_a_count_beyond_all_bounds_costs_nothing(tmp_path: Path) -> None:
    save_file({"c": counted(2)}, tmp_path / f"model-00001-of-{'9' * 200}.safetensors")
    assert_refused(tmp_path, "model-00002-of-999")


def test_a_numbered_file_may_be_read_alone(tmp_path: Path) -> None:
    sharded(tmp_path)
    assert HuggingFace().is_complete(tmp_path / "model-00001-of-00002.safetensors")
    assert_holds(open_layout(tmp_path / "model-00001-of-00002.safetensors"), {"a": counted(2)})


def test_files_that_nothing_holds_together_are_not_complete(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: counted(2)}, tmp_path / f"{name}.safetensors")
    assert_refused(tmp_path, "expected an index of the 2 safetensors files")


def assert_refused(root: Path, words: str) -> None:
    """What keeps a checkpoint from being read is told by names alone, in the words in which reading it fails."""
    (problem,) = HuggingFace().problems(root)
    assert words in problem.message
    assert not HuggingFace().is_complete(root)
    with pytest.raises(CkptError) as raised:
        open_layout(root)
    assert raised.value.to_json() == problem.to_json()


def test_an_index_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_index(tmp_path, "{")
    assert_refused(tmp_path, "not valid JSON")


def test_a_tensor_in_two_files_is_corrupt(tmp_path: Path) -> None:
    sharded(tmp_path)
    for again in (counted(2), counted(0)):
        save_file({"a": again, "b": counted(3)}, tmp_path / "model-00002-of-00002.safetensors")
        with pytest.raises(Corrupt, match=r"00001.*00002") as raised:
            open_layout(tmp_path)
        assert raised.value.tensor == "a"


def test_an_old_single_file_beside_new_shards_is_ambiguous(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a": counted(2)}, tmp_path / "model.safetensors")
    assert_refused(tmp_path, "from different exports")
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_refused(tmp_path, "from different exports")


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
        HuggingFace().lay_out_files(Layout(Path(), "raw", {name: stored}), WriterOptions(1 << 40))
    assert raised.value.tensor == name


def test_names_of_any_digits_can_be_ordered(tmp_path: Path) -> None:
    names = ["layers.10.w", "layers.9.w", "layers.010.w", "9" * 5000, "layers.٣.w"]
    TestHuggingFace().check_writing(tmp_path / "there", {name: counted(1) + i for i, name in enumerate(names)})


def test_strange_names_survive(tmp_path: Path) -> None:
    names = ["line\nbreak", "\x1b[31m", 'quote"', "back\\slash", "", "../up"]
    TestHuggingFace().check_writing(tmp_path / "there", {name: counted(1) + i for i, name in enumerate(names)})
