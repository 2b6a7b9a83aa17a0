"""Modules that an adapter lacks are said; PEFT says which modules it would adapt by the same config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptkit

pytest.importorskip("peft", reason="PEFT is the judge of adapters")

from tests.trainers.produced_peft import adapted, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

LAYERS = 4
WEIGHTS = "adapter_model.safetensors"
CONFIGS: dict[str, dict[str, Any]] = {
    "names": {"target_modules": ["q_proj", "down_proj"]},
    "full names": {"target_modules": ["model.layers.0.self_attn.q_proj", "layers.2.self_attn.q_proj", "down_proj"]},
    "pattern": {"target_modules": r".*\.(0|3)\..*\.(q|v)_proj"},
    "all linear": {"target_modules": "all-linear"},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": 2},
    "some layers": {"target_modules": ["q_proj"], "layers_to_transform": [0, 3]},
    "layers by their list": {
        "target_modules": ["q_proj", "up_proj"],
        "layers_to_transform": [1, 2],
        "layers_pattern": "layers",
    },
    "excluded": {"target_modules": ["q_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
    "excluded by a pattern": {"target_modules": ["q_proj"], "exclude_modules": r".*\.1\.self_attn\.q_proj"},
    "parameters": {"target_modules": ["q_proj"], "target_parameters": ["mlp.down_proj.weight"]},
}
LOSSES: dict[str, Callable[[str], bool]] = {
    "nothing": lambda _: False,
    "a layer": lambda name: ".layers.2." in name,
    "the first layer": lambda name: ".layers.0." in name,
    "the last layers": lambda name: ".layers.2." in name or ".layers.3." in name,
    "one kind of module": lambda name: ".layers.1." in name and "q_proj" in name,
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_modules_that_peft_would_adapt_and_that_are_missing_are_named(tmp_path: Path, config: dict[str, Any]) -> None:
    base = tiny_llama(num_hidden_layers=LAYERS)
    base.save_pretrained(tmp_path / "base")
    model = adapted(base, r=4, lora_alpha=7, **config)
    model.save_pretrained(tmp_path / "adapter")
    every = load_file(tmp_path / "adapter" / WEIGHTS)
    for lost in LOSSES.values():
        kept = {name: tensor for name, tensor in every.items() if not lost(name)}
        kinds = {kind_of(name) for name in kept}
        gone = {module_of(name) for name in every.keys() - kept.keys() if kind_of(name) in kinds}
        if not kept:
            continue
        save_file(kept, tmp_path / "adapter" / WEIGHTS)
        done = ckptkit.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", overwrite=True)
        said = [warning for warning in done.warnings if "no matrices for" in warning]
        assert len(said) == bool(gone), (gone, said)
        if gone:
            assert f"for {len(gone)} module" in said[0]
            assert min(gone) in said[0]


@pytest.mark.parametrize(
    "lost",
    [("self_attn.base_layer.out_proj",), ("self_attn.",), ("self_attn.lora_",)],
    ids=["out_proj", "all", "in_proj"],
)
def test_attention_of_torch_that_is_missing(tmp_path: Path, lost: tuple[str]) -> None:
    """PEFT adapts `out_proj` with its attention, which alone is a target."""
    base = nn.Module()
    base.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24) for _ in range(2))
    (tmp_path / "base").mkdir()
    save_file(base.state_dict(), tmp_path / "base" / "model.safetensors")
    adapted(base, r=4, lora_alpha=7, target_modules=["self_attn"]).save_pretrained(tmp_path / "adapter")
    every = load_file(tmp_path / "adapter" / WEIGHTS)
    kept = {name: tensor for name, tensor in every.items() if not ("layers.1." in name and lost[0] in name)}
    save_file(kept, tmp_path / "adapter" / WEIGHTS)
    done = ckptkit.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    (said,) = (warning for warning in done.warnings if "no matrices for" in warning)
    assert f"for {(len(every) - len(kept)) // 2} module" in said


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lost", ["", "lm_head", "embed_tokens", "input_layernorm"])
def test_parameters_trained_in_full_that_are_missing(tmp_path: Path, lost: str, tied: bool) -> None:
    """PEFT looks for modules whose name ends with `norm`: the two of each layer, too."""
    base = tiny_llama(tie_word_embeddings=tied)
    base.save_pretrained(tmp_path / "base")
    saved = ["lm_head", "embed_tokens", "norm"]
    adapted(base, r=4, target_modules=["q_proj"], modules_to_save=saved).save_pretrained(tmp_path / "adapter")
    every = load_file(tmp_path / "adapter" / WEIGHTS)
    kept = {name: tensor for name, tensor in every.items() if not (lost and lost in name)}
    save_file(kept, tmp_path / "adapter" / WEIGHTS)
    done = ckptkit.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    said = [warning for warning in done.warnings if "`modules_to_save` lists" in warning]
    assert len(said) == bool(lost)
    assert all(f"no tensors for {len(every) - len(kept)} parameter" in warning and lost in warning for warning in said)


def test_a_module_to_save_that_the_base_lacks_is_ignored_as_by_peft(tmp_path: Path) -> None:
    base = tiny_llama()
    base.save_pretrained(tmp_path / "base")
    model = adapted(base, r=4, target_modules=["q_proj"], modules_to_save=["classifier"])
    model.save_pretrained(tmp_path / "adapter")
    ckptkit.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    expected = model.merge_and_unload().state_dict()["model.layers.0.self_attn.q_proj.weight"]
    found = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(found, expected)


def module_of(name: str) -> str:
    return name.removeprefix("base_model.model.").partition(".lora_")[0].removesuffix(".base_layer")


def kind_of(name: str) -> str:
    return ".".join("*" if word.isdecimal() else word for word in module_of(name).split("."))
