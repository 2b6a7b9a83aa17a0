"""Meta's and Mistral's releases against transformers: the formula of its conversion scripts, and equal logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import ckptkit
from ckptkit.errors import Mismatch
from tests.models.names.hub_models import (
    EXPERTS,
    HEAD,
    HEADS,
    HIDDEN,
    KEY_HEADS,
    LAYERS,
    VOCABULARY,
    config_of,
    model_of,
    saved,
)
from tests.models.names.shelf import check_both_ways, check_same, random_like
from tests.models.names.titan_model import Titan, Widths

PARAMS = {"dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KEY_HEADS, "vocab_size": VOCABULARY}
TOKENS = torch.arange(24).view(2, 12)
_NAMES = {
    "model.layers": "layers",
    "model.": "",
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "block_sparse_moe": "feed_forward",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def native(hub: dict[str, Tensor]) -> dict[str, Tensor]:
    """The Hub's tensors as they are released, by the inverse of `permute` in transformers' conversion scripts."""
    found = {}
    for name, tensor in hub.items():
        one = tensor
        heads = {"q_proj": HEADS, "k_proj": KEY_HEADS}.get(name.split(".")[-2])
        if heads:
            one = tensor.view(heads, 2, HEAD // 2, HIDDEN).transpose(1, 2).reshape(heads * HEAD, HIDDEN)
        own = name
        for hub_part, part in _NAMES.items():
            own = own.replace(hub_part, part)
        found[own] = one.contiguous()
    return found


@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral"])
def test_the_formula_of_the_scripts(model_type: str, tmp_path: Path) -> None:
    """Equal names and bits, of weights and of moments, in chunks that were cut anywhere."""
    config = config_of(model_type, **({"num_local_experts": EXPERTS} if model_type == "mixtral" else {}))
    hub = saved(config, tmp_path)
    for arrays in (hub, random_like(hub)):
        check_both_ways("meta", native(arrays), arrays, config.to_dict())


def release(model: Titan, place: Path) -> None:
    """A model that turns neighbors, as Meta releases it: cut over two ranks, with the frequencies on each."""
    place.mkdir()
    names = {name.replace("qkv_linear.", "").replace("lm_head", "output"): t for name, t in model.state_dict().items()}
    for rank in range(2):
        part = {}
        for name, tensor in names.items():
            axis = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
            part[name] = tensor.chunk(2, axis)[rank].clone() if tensor.ndim == 2 else tensor
        torch.save(part | {"rope.freqs": torch.ones(HEAD // 2)}, place / f"consolidated.{rank:02d}.pth")
    (place / "params.json").write_text(json.dumps(PARAMS))


def test_a_release_of_two_ranks_has_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = Titan(Widths())
    release(model, tmp_path / "release")
    config_of("llama", rope_theta=Widths().theta).save_pretrained(tmp_path / "base")
    done = ckptkit.consolidate(tmp_path / "release", tmp_path / "out", base=tmp_path / "base")
    assert any("from the names of meta" in note for note in done.notes)
    assert any("dropped 1" in note and "rope.freqs" in note for note in done.notes)
    with torch.no_grad():
        made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(TOKENS).logits
        assert torch.allclose(made, model(TOKENS), atol=1e-5)


def test_params_json_says_the_sizes_and_no_config_is_made(tmp_path: Path) -> None:
    """The names of the Hub without --base; loaders want a config.json besides, and that is said."""
    model = Titan(Widths())
    release(model, tmp_path / "release")
    done = ckptkit.consolidate(tmp_path / "release", tmp_path / "out")
    assert any("no config.json found" in text and "--base" in text for text in done.warnings)
    assert "model.layers.1.self_attn.q_proj.weight" in ckptkit.open(tmp_path / "out")
    ckptkit.convert(tmp_path / "release", tmp_path / "titan.pt", to="pt", names="torchtitan")
    found = torch.load(tmp_path / "titan.pt")
    check_same({name.replace("output", "lm_head"): tensor for name, tensor in found.items()}, model.state_dict())


def mistral(place: Path, **changes: Any) -> dict[str, Tensor]:
    """A repository with a file of each kind, of the same weights. Heads are not as wide as their share of `dim`."""
    config = config_of("mistral", **({"hidden_size": 48} | changes))
    model = model_of(config)
    model.save_pretrained(place)
    hub = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    own = {}
    for name, tensor in hub.items():
        heads = {"q_proj": HEADS, "k_proj": KEY_HEADS}.get(name.split(".")[-2])
        one = tensor.view(heads, 2, HEAD // 2, 48).transpose(1, 2).reshape(-1, 48) if heads else tensor
        own_name = name
        for hub_part, part in _NAMES.items():
            own_name = own_name.replace(hub_part, part)
        own[own_name] = one.contiguous()
    save_file(own, place / "consolidated.safetensors")
    params = PARAMS | {"dim": 48, "head_dim": HEAD, "hidden_dim": 24}
    (place / "params.json").write_text(json.dumps(params))
    return hub


def test_mistrals_two_files_are_never_one(tmp_path: Path) -> None:
    hub = mistral(tmp_path / "both")
    both = ckptkit.open(tmp_path / "both")
    check_same({name: both[name].torch() for name in both}, hub)
    ckptkit.consolidate(tmp_path / "both" / "consolidated.safetensors", tmp_path / "out")
    made = ckptkit.open(tmp_path / "out")
    check_same({name: made[name].torch() for name in made}, hub)


def test_mistrals_file_alone(tmp_path: Path) -> None:
    """Without config.json the width of a head is that of params.json."""
    hub = mistral(tmp_path / "alone")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "alone" / name).unlink()
    ckptkit.consolidate(tmp_path / "alone", tmp_path / "out")
    made = ckptkit.open(tmp_path / "out")
    check_same({name: made[name].torch() for name in made}, hub)


def test_params_of_another_model(tmp_path: Path) -> None:
    mistral(tmp_path / "alone")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "alone" / name).unlink()
    (tmp_path / "alone" / "params.json").write_text(json.dumps(PARAMS | {"dim": 48}))
    with pytest.raises(Mismatch, match=r"expected 2 heads of 12 .*, found 16 rows"):
        ckptkit.consolidate(tmp_path / "alone", tmp_path / "out")
    (tmp_path / "alone" / "params.json").unlink()
    with pytest.raises(Mismatch, match=r"needs config\.json; none was found"):
        ckptkit.consolidate(tmp_path / "alone", tmp_path / "out")
