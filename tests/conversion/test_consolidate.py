"""What `consolidate` writes, judged by `safetensors`, by torch's own casts and by the tensors that went in."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import load_state_dict_from_file
from safetensors.torch import load_file, save_file

from ckptkit import consolidate, inspect
from ckptkit.errors import CkptError, Mismatch, Occupied, Unsafe, Unsupported, Usage
from tests import producers
from tests.conftest import Produce
from tests.formats.contract import assert_same
from tests.producers import Producer, save_alone

READABLE = [
    producers.fsdp2,
    producers.hsdp,
    producers.mesh,
    producers.tensor_parallel,
    producers.many_files,
    producers.file_per_item,
    producers.no_collectives,
    producers.leftovers,
    producers.no_crc,
    producers.strided,
    producers.under_nothing,
    producers.under_model,
    producers.under_state_model,
    producers.under_app,
    producers.from_ddp,
    producers.from_compile,
    producers.from_checkpoint_wrapper,
    producers.accelerate,
    producers.hf_shards,
    producers.hf_shards_in_parts,
    producers.hf_alone,
]

WITHOUT_CHECKSUMS = [producers.no_crc, producers.hf_shards, producers.hf_shards_in_parts, producers.hf_alone]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def save(root: Path, state: Mapping[str, Any]) -> Path:
    save_alone(dict(state), root)
    return root


@pytest.mark.parametrize("producer", READABLE, ids=lambda producer: producer.__name__)
def test_every_model_tensor_comes_out_bit_for_bit(producer: Producer, produce: Produce, tmp_path: Path) -> None:
    made = produce(producer)
    done = consolidate(made.root, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found
    old_names = {new: old for old, new in done.renamed.items()}
    assert_same(found, {name: made.truth[old_names.get(name, name)] for name in found})
    total = sum(len(bits(tensor)) for tensor in found.values())
    assert done.nbytes == total == done.checked_bytes + done.unchecked_bytes
    assert done.unchecked_bytes == (total if producer in WITHOUT_CHECKSUMS else 0)


def test_the_tensors_are_those_that_torch_itself_loads(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    done = consolidate(made.root, tmp_path / "out")
    state = {"model": {new: torch.zeros_like(made.truth[old]) for old, new in done.renamed.items()}}
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.load(state, checkpoint_id=made.root, no_dist=True)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), state["model"])


def test_nothing_of_the_model_is_left_behind(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    done = consolidate(made.root, tmp_path / "out")
    assert set(done.renamed) == {name for name in made.truth if name.startswith("model.")}
    assert [(left.name, left.entries) for left in done.dropped] == [("optim", 36), ("extra", 5)]


def test_the_bytes_are_those_that_safetensors_writes(produce: Produce, tmp_path: Path) -> None:
    consolidate(produce(producers.fsdp2).root, tmp_path / "out")
    ours = tmp_path / "out" / "model.safetensors"
    save_file(load_file(ours), tmp_path / "theirs", metadata={"format": "pt"})
    assert ours.read_bytes() == (tmp_path / "theirs").read_bytes()


def test_every_dtype_that_safetensors_can_hold(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.dtypes)
    done = consolidate(made.root, tmp_path / "out", exclude=["*complex128*", "float4*.scalar"])
    found = load_file(tmp_path / "out" / "model.safetensors")
    renamed = {new: old for old, new in done.renamed.items()}
    assert_same(found, {name: made.truth[renamed.get(name, name)] for name in found})
    assert {tensor.dtype for tensor in found.values()} >= {
        torch.bfloat16,
        torch.float8_e8m0fnu,
        torch.bool,
        torch.uint64,
    }
    with pytest.raises(Unsupported, match="complex128"):
        consolidate(made.root, tmp_path / "all")


def test_shards_with_their_index(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.under_model)
    whole = consolidate(made.root, tmp_path / "whole")
    done = consolidate(made.root, tmp_path / "out", max_shard_size=64)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 1
    found = {name: tensor for file in files for name, tensor in load_file(tmp_path / "out" / file).items()}
    assert_same(found, load_file(tmp_path / "whole" / "model.safetensors"))
    assert index["weight_map"] == {name: file for file in files for name in load_file(tmp_path / "out" / file)}
    assert index["metadata"]["total_size"] == whole.nbytes == done.nbytes
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in found.values())
    assert load_state_dict_from_file(tmp_path / "out" / files[0]).keys() <= found.keys()


def test_the_same_bytes_whatever_the_threads_and_shards_of_the_source(produce: Produce, tmp_path: Path) -> None:
    outputs = []
    for i, producer in enumerate((producers.many_files, producers.file_per_item, producers.no_collectives)):
        consolidate(produce(producer).root, tmp_path / str(i), jobs=i + 1)
        outputs.append((tmp_path / str(i) / "model.safetensors").read_bytes())
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("dtype", ["bf16", "float16", "float32", "float64"])
def test_a_cast_is_torchs_and_touches_only_floats(dtype: str, tmp_path: Path) -> None:
    tensors = {
        "w32": torch.randn(300, 70),
        "w64": torch.randn(33, dtype=torch.float64),
        "w16": torch.randn(9).half(),
        "wb": torch.randn(9).bfloat16(),
        "nan": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
        "int": torch.arange(5),
        "bool": torch.tensor([True, False]),
        "fp8": torch.randn(8).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    consolidate(save(tmp_path / "ckpt", {"model": tensors}), tmp_path / "out", dtype=dtype)
    target = {"bf16": torch.bfloat16}.get(dtype) or getattr(torch, dtype)
    floats = {name for name in tensors if name.startswith("w") or name == "nan"}
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name: tensor.to(target) if name in floats else tensor for name, tensor in tensors.items()}
    assert found["nan"][0].isnan()
    assert_same({**found, "nan": found["nan"][1:]}, {**expected, "nan": expected["nan"][1:]})


def test_a_number_that_the_dtype_cannot_hold_is_an_error(tmp_path: Path) -> None:
    source = save(tmp_path / "ckpt", {"model": {"w": torch.tensor([1.0, 7e4])}})
    with pytest.raises(Unsupported, match="70000") as caught:
        consolidate(source, tmp_path / "out", dtype="float16")
    assert caught.value.tensor == "w"
    assert not (tmp_path / "out").exists()


def test_include_exclude_and_rename(tmp_path: Path) -> None:
    state = {"model": {"a.w": torch.ones(2), "a.b": torch.zeros(2), "c.w": torch.ones(1)}}
    source = save(tmp_path / "ckpt", state)
    consolidate(source, tmp_path / "out", include=["model.a.*", "model.c.*"], exclude=["*.b"], rename=[r"^a\.=>x."])
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"x.w", "c.w"}
    with pytest.raises(Mismatch, match="both"):
        consolidate(source, tmp_path / "both", rename=["^[ac]=>x"])
    with pytest.raises(Usage, match="matches no tensor"):
        consolidate(source, tmp_path / "none", include=["nothing*"])
    for rule in ("no arrow", "(=>x", r"a=>\9"):
        with pytest.raises(Usage, match="rename="):
            consolidate(source, tmp_path / "bad", rename=[rule])


def test_two_names_that_wrappers_made_different(tmp_path: Path) -> None:
    state = {"model": {"a.weight": torch.ones(2), "_orig_mod.a.weight": torch.zeros(2)}}
    with pytest.raises(Mismatch, match="both"):
        consolidate(save(tmp_path / "ckpt", state), tmp_path / "out")


def test_of_several_candidates_none_is_guessed(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.under_odd_name)
    with pytest.raises(Unsupported, match="several entries could be the model") as caught:
        consolidate(made.root, tmp_path / "out")
    assert caught.value.hint == "choose with --include 'my net.v2.*'"
    consolidate(made.root, tmp_path / "out", include=["my net.v2.*"])
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_a_checkpoint_without_a_model(produce: Produce, tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match="expected model weights"):
        consolidate(produce(producers.accelerate).root / "optimizer_0", tmp_path / "out")
    with pytest.raises(Mismatch, match="expected model weights"):
        consolidate(produce(producers.nothing).root, tmp_path / "out")


@pytest.mark.parametrize(
    ("producer", "words"),
    [
        (producers.transformed, r"stream\.inverted"),
        (producers.safetensors_items, "safetensors"),
        (producers.lazy, "conj"),
        (producers.quantized, "quint8"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_beyond_us_is_refused_by_name(producer: Producer, words: str, produce: Produce, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=words):
        consolidate(produce(producer).root, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_writes_nothing(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.fsdp2).root
    draft = consolidate(source, tmp_path / "out", dtype="bf16", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert draft.copies > draft.tensors
    assert draft.free_bytes
    done = consolidate(source, tmp_path / "out", dtype="bf16")
    assert (draft.files, draft.cast, draft.nbytes) == (done.files, done.cast, done.nbytes)


def test_the_manifest_has_sizes_and_checksums(produce: Produce, tmp_path: Path) -> None:
    from zlib import crc32

    consolidate(produce(producers.fsdp2).root, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "ckptkit.json").read_text())
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert manifest["tensors"] == {name: {"crc32": f"{crc32(bits(tensor)):08x}"} for name, tensor in found.items()}
    sizes = {name: (tmp_path / "out" / name).stat().st_size for name in manifest["files"]}
    assert {name: entry["nbytes"] for name, entry in manifest["files"].items()} == sizes


def test_what_was_consolidated_can_be_consolidated_again(produce: Produce, tmp_path: Path) -> None:
    consolidate(produce(producers.fsdp2).root, tmp_path / "one", max_shard_size=300)
    consolidate(tmp_path / "one", tmp_path / "two")
    consolidate(produce(producers.fsdp2).root, tmp_path / "three")
    name = "model.safetensors"
    assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()
    assert inspect(tmp_path / "one").layout.specs == inspect(tmp_path / "two").layout.specs


def test_the_destination_is_not_touched_unasked(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.under_model).root
    out = tmp_path / "out"
    out.mkdir()
    consolidate(source, out)  # an empty directory is no loss
    (out / "mine").write_text("precious")
    with pytest.raises(Occupied):
        consolidate(source, out)
    assert (out / "mine").read_text() == "precious"
    (out / "mine").unlink()
    before = (out / "model.safetensors").stat().st_ino
    consolidate(source, out, overwrite=True)
    assert (out / "model.safetensors").stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_source_and_destination_apart(produce: Produce, tmp_path: Path) -> None:
    source = tmp_path / "run" / "ckpt-1"
    shutil.copytree(produce(producers.under_model).root, source)
    before = sorted(source.rglob("*"))
    for destination in (source, source.parent, source / "training"):
        with pytest.raises(Unsafe):
            consolidate(source, destination, overwrite=True)
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(CkptError):
        consolidate(source, link, overwrite=True)
    assert sorted(source.rglob("*")) == before
