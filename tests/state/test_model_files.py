"""config.json, whose it is and where it is looked for, and what the files of a model say besides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ckptkit
from ckptkit.errors import NotACheckpoint
from tests.producers import save_alone

WEIGHT = torch.arange(8.0).reshape(4, 2)
OTHERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "diffusers": ({"_class_name": "UNet", "_diffusers_version": "0.42"}, "diffusion_pytorch_model", "to diffusers"),
    "timm": ({"architecture": "resnet18", "pretrained_cfg": {"tag": "a1"}}, "model", "to timm"),
    "lerobot": ({"type": "pi0", "n_obs_steps": 1}, "model", "to LeRobot"),
    "unknown": ({"depth": 3}, "model", "to an unknown library"),
    "mamba": ({"d_model": 8, "n_layer": 2, "ssm_cfg": {}}, "model", "mamba_ssm loads only `pytorch_model.bin`"),
}


@pytest.mark.parametrize(("config", "stem", "words"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("shards", [False, True])
def test_a_config_of_another_library_goes_along_unchanged(
    tmp_path: Path, config: dict[str, Any], stem: str, words: str, shards: bool
) -> None:
    base, source = tmp_path / "base", tmp_path / "model.pt"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    torch.save({"a.weight": WEIGHT, "b.weight": WEIGHT + 1}, source)
    done = ckptkit.consolidate(source, tmp_path / "out", base=str(base), max_shard_size=40 if shards else 10**9)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert any(words in line for line in (*done.notes, *done.warnings))
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert (f"{stem}.safetensors.index.json" if shards else f"{stem}.safetensors") in names
    assert torch.equal(ckptkit.open(tmp_path / "out")["b.weight"].torch(), WEIGHT + 1)
    again = ckptkit.convert(tmp_path / "out", tmp_path / "again", to="hf")
    assert "config.json" in again.files


def test_the_processors_of_a_lerobot_policy_go_along(tmp_path: Path) -> None:
    """LeRobot opens a policy with the files that normalize its observations and actions."""
    policy = tmp_path / "pretrained_model"
    policy.mkdir()
    save_file({"a.weight": WEIGHT}, policy / "model.safetensors")
    (policy / "config.json").write_text('{"type": "act", "n_obs_steps": 1}')
    (policy / "train_config.json").write_text("{}")
    (policy / "policy_preprocessor.json").write_text('{"steps": []}')
    statistics = policy / "policy_preprocessor_step_3_normalizer_processor.safetensors"
    save_file({"action.mean": WEIGHT[0]}, statistics)
    done = ckptkit.consolidate(policy, tmp_path / "out")
    assert (tmp_path / "out" / statistics.name).read_bytes() == statistics.read_bytes()
    assert {"policy_preprocessor.json", statistics.name, "model.safetensors", "config.json"} <= done.files.keys()
    assert {left.name for left in done.left_behind} == {"train_config.json"}


def test_a_base_without_config_is_refused(tmp_path: Path) -> None:
    torch.save({"a": WEIGHT}, tmp_path / "model.pt")
    (tmp_path / "base").mkdir()
    with pytest.raises(NotACheckpoint, match=r"expected a model's config\.json in the base, found none"):
        ckptkit.consolidate(tmp_path / "model.pt", tmp_path / "out", base=str(tmp_path / "base"))


@pytest.mark.parametrize("place", ["hf", "tokenizer", "huggingface", ".."])
def test_a_lone_file_takes_only_the_config_beside_it(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "here"
    (folder / place).mkdir(parents=True, exist_ok=True)
    (folder / place / "config.json").write_text(json.dumps({"model_type": "other", "architectures": ["Other"]}))
    torch.save({"a": WEIGHT}, folder / "model.pt")
    done = ckptkit.consolidate(folder / "model.pt", tmp_path / "out")
    assert "config.json" not in done.files
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "architectures": ["Own"]}))
    done = ckptkit.consolidate(folder / "model.pt", tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "own"


# where config.json may lie for a checkpoint, and whether it counts there
PLACES = {
    "the checkpoint": ("dcp", "dcp", True),
    "a trainer's directory in it": ("dcp", "dcp/huggingface", True),
    "the directory around it": ("dcp", ".", False),
    "a model beside it": ("dcp", "hf", False),
    "the run": ("run/ckpt-5", "run", True),
    "a model in the run": ("run/ckpt-5", "run/hf", False),
    "the run of a component": ("run/ckpt-5/model", "run", True),
    "the step of a component": ("run/ckpt-5/model", "run/ckpt-5", True),
    "a trainer's directory in the step": ("run/ckpt-5/model", "run/ckpt-5/tokenizer", True),
    "a model in the run of a component": ("run/ckpt-5/model", "run/hf", False),
    "the run of a checkpoint without a step": ("run/last", "run", True),
    "the checkpoint of a component": ("best/model", "best", True),
    "a model beside a component": ("best/model", "best/hf", False),
}


@pytest.mark.parametrize(("source", "place", "counts"), PLACES.values(), ids=PLACES)
def test_a_directory_takes_no_config_of_another_model(tmp_path: Path, source: str, place: str, counts: bool) -> None:
    save_alone({"a": WEIGHT}, tmp_path / source)
    (tmp_path / "run" / "ckpt-4").mkdir(parents=True)
    (tmp_path / "best" / "optim").mkdir(parents=True)
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / place / "config.json").write_text(json.dumps({"model_type": "other", "architectures": ["Other"]}))
    done = ckptkit.consolidate(tmp_path / source, tmp_path / "out")
    assert ("config.json" in done.files) == counts
    assert (f"used config.json from {tmp_path / place}" in done.notes) == counts


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def test_metadata_of_safetensors_goes_along_or_is_said(tmp_path: Path) -> None:
    save_file({"a": WEIGHT, "b": WEIGHT + 1}, tmp_path / "m.safetensors", {"format": "pt", "license": "mit", "b": "x"})
    ckptkit.convert(tmp_path / "m.safetensors", tmp_path / "out", to="hf", names="keep", max_shard_size=40)
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert metadata_of(file) == {"format": "pt", "license": "mit"}
    done = ckptkit.convert(tmp_path / "m.safetensors", tmp_path / "m.pt", to="pt")
    assert any("`__metadata__` of the safetensors (license)" in note for note in done.notes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "dtype", ["model.layers.*=bf16", "lm_head.weight=bf16", "model.layers.*=fp16", "bf16", "*norm*=bf16"]
)
def test_loaders_do_not_round_what_stayed_float32(tmp_path: Path, dtype: str) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    model.save_pretrained(tmp_path / "model")
    ckptkit.convert(tmp_path / "model", tmp_path / "out", to="hf", dtype=[dtype])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    stored = ckptkit.open(tmp_path / "out")
    for name, tensor in loaded.state_dict().items():
        if name in stored:
            assert torch.equal(tensor.float(), stored[name].torch().float()), name
    assert loaded.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
