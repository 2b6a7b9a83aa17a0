"""What is saved where whole files of a model are lost: safetensors, and torch.save in several files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ckptkit import consolidate, convert, verify
from ckptkit.errors import CkptError, Corrupt
from tests import producers
from tests.conftest import Produce
from tests.conversion.salvaging.damage import assert_truth, cut, flip, load_hf

CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}


def weights(seed: int = 0) -> dict[str, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    state = LlamaForCausalLM(LlamaConfig(**CONFIG)).state_dict()
    return {name: value.clone() for name, value in state.items() if "rotary" not in name}


def save(root: Path, truth: Mapping[str, Tensor], *, index: bool = True, config: bool = True) -> Path:
    """The model in three files."""
    root.mkdir()
    names = sorted(truth)
    files = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: truth[name] for name in names if files[name] == file}, root / file, {"format": "pt"})
    if index:
        (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    if config:
        (root / "config.json").write_text(json.dumps(CONFIG))
    return root


def in_file(root: Path, number: int) -> set[str]:
    index = json.loads((root / "model.safetensors.index.json").read_text())["weight_map"]
    return {name for name, file in index.items() if file.startswith(f"model-0000{number}")}


@pytest.mark.parametrize("how", ["missing", "cut in the data", "cut in the header", "empty"])
@pytest.mark.parametrize("config", [True, False])
def test_a_shard_of_safetensors(how: str, config: bool, tmp_path: Path) -> None:
    truth = weights()
    root = save(tmp_path / "model", truth, config=config)
    file = root / "model-00002-of-00003.safetensors"
    if how == "missing":
        file.unlink()
    else:
        cut(file, {"cut in the data": file.stat().st_size - 5, "cut in the header": 30, "empty": 0}[how])
    lost = {max(in_file(root, 2))} if how == "cut in the data" else in_file(root, 2)  # the library sorts by name
    done = consolidate(root, tmp_path / "out", salvage=True)
    assert done.salvaged is not None
    assert {one.name for one in done.salvaged.lost} == lost
    assert all(one.path == file for one in done.salvaged.lost)
    found = load_hf(tmp_path / "out")
    assert found.keys() == truth.keys() - lost
    assert_truth(found, truth)


def test_one_file_that_is_cut_keeps_what_is_before_the_cut(tmp_path: Path) -> None:
    truth = weights()
    (tmp_path / "model").mkdir()
    save_file(truth, tmp_path / "model/model.safetensors", {"format": "pt"})
    cut(tmp_path / "model/model.safetensors", (tmp_path / "model/model.safetensors").stat().st_size - 5)
    assert [problem.code for part in verify(tmp_path / "model") for problem in part.problems] == ["corrupt"]
    with pytest.raises(Corrupt, match="truncated"):
        consolidate(tmp_path / "model", tmp_path / "out")
    done = consolidate(tmp_path / "model", tmp_path / "out", salvage=True)
    assert done.salvaged is not None
    assert [one.name for one in done.salvaged.lost] == [max(truth)]
    assert_truth(load_hf(tmp_path / "out"), truth)


def test_files_without_an_index(tmp_path: Path) -> None:
    """Without an index config.json says what was in the file that is not there; without that nothing does."""
    truth = weights()
    root = save(tmp_path / "model", truth)
    lost = in_file(root, 2)
    (root / "model.safetensors.index.json").unlink()
    (root / "model-00002-of-00003.safetensors").unlink()
    done = consolidate(root, tmp_path / "out", salvage=True)
    assert done.salvaged is not None
    assert {one.name for one in done.salvaged.lost} == lost
    (root / "config.json").unlink()
    done = consolidate(root, tmp_path / "bare", salvage=True)
    assert done.salvaged is not None
    assert [one.name for one in done.salvaged.lost] == [""]
    assert_truth(load_hf(tmp_path / "bare"), truth)


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("index", [True, False])
def test_another_model_fills_it(config: bool, index: bool, tmp_path: Path) -> None:
    truth, other = weights(), weights(1)
    root = save(tmp_path / "model", truth, config=config)
    lost = in_file(root, 2)
    (root / "model-00002-of-00003.safetensors").unlink()
    if not index:
        (root / "model.safetensors.index.json").unlink()
    save(tmp_path / "other", other)
    done = consolidate(root, tmp_path / "out", salvage=True, fill_from=tmp_path / "other")
    assert done.salvaged is not None
    assert {one.name for one in done.salvaged.filled} == lost
    assert_truth(load_hf(tmp_path / "out"), {name: (other if name in lost else truth)[name] for name in truth})


def test_a_manifest_tells_damage_in_safetensors(tmp_path: Path) -> None:
    truth = weights()
    torch.save(truth, tmp_path / "model.pt")
    consolidate(tmp_path / "model.pt", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    flip(file, file.stat().st_size - 1)
    done = consolidate(tmp_path / "model", tmp_path / "out", salvage=True)
    assert done.salvaged is not None
    assert len(done.salvaged.lost) == 1
    assert_truth(load_hf(tmp_path / "out"), truth)


def test_shards_of_ranks_say_no_shapes(produce: Produce, tmp_path: Path) -> None:
    """The files that each rank writes do not say how long a tensor is: where one is lost, nothing is certain."""
    made = produce(producers.hf_shards)
    root = Path(shutil.copytree(made.root, tmp_path / "model"))
    min(root.glob("shard-00002*")).unlink()
    with pytest.raises(CkptError):
        consolidate(root, tmp_path / "out", salvage=True)


@pytest.mark.parametrize("how", ["missing", "cut"])
def test_several_files_of_torch_save(how: str, tmp_path: Path) -> None:
    truth = weights()
    root = tmp_path / "model"
    root.mkdir()
    names = sorted(truth)
    files = {name: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(files.values()):
        torch.save({name: truth[name] for name in names if files[name] == file}, root / file)
    (root / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (root / "config.json").write_text(json.dumps(CONFIG))
    gone = root / "pytorch_model-00001-of-00002.bin"
    if how == "missing":
        gone.unlink()
    else:
        cut(gone, gone.stat().st_size // 2)
    done = consolidate(root, tmp_path / "out", salvage=True)
    assert done.salvaged is not None
    lost = {one.name for one in done.salvaged.lost}
    assert lost == {name for name, place in files.items() if place == gone.name}
    found = load_hf(tmp_path / "out")
    assert found.keys() == truth.keys() - lost
    assert_truth(found, truth)


def test_a_file_of_torch_save_with_a_flipped_bit(tmp_path: Path) -> None:
    truth = {f"layers.{i}.weight": torch.randn(16, 16) for i in range(6)}
    torch.save(truth, tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    at = data.index(truth["layers.3.weight"].numpy().tobytes())
    flip(tmp_path / "model.pt", at + 100)
    make_other = convert(tmp_path / "model.pt", tmp_path / "out.pt", to="pt", salvage=True)
    assert make_other.salvaged is not None
    assert [one.name for one in make_other.salvaged.lost] == ["layers.3.weight"]
    found = torch.load(tmp_path / "out.pt")
    assert found.keys() == truth.keys() - {"layers.3.weight"}
    assert_truth(found, truth)


def test_a_tied_weight_is_a_copy(tmp_path: Path) -> None:
    """Where config.json ties the head to the embedding and both are there, one of them is enough."""
    truth = weights()
    truth["lm_head.weight"] = truth["model.embed_tokens.weight"].clone()
    root = tmp_path / "model"
    root.mkdir()
    torch.save(truth, root / "pytorch_model.bin")
    (root / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    data = (root / "pytorch_model.bin").read_bytes()
    flip(root / "pytorch_model.bin", data.index(truth["model.embed_tokens.weight"].numpy().tobytes()))
    done = consolidate(root, tmp_path / "out", salvage=True)
    assert done.salvaged is not None
    found = load_hf(tmp_path / "out")
    assert "model.embed_tokens.weight" in found
    assert_truth(found, truth)
