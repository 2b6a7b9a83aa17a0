"""LitGPT's names against what its own converters make of them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit.errors import Mismatch
from tests.models.names.hub_models import HEAD, HEADS, HIDDEN, KEY_HEADS, config_of, model_of, saved
from tests.models.names.others_code import one_module
from tests.models.names.shelf import check_same, random_like, to_the_family, to_the_hub
from tests.tiers import nightly_but

_FUNCTIONS = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "gemma": "llama",
    "gemma2": "gemma_2",
    "gemma3_text": "gemma_3",
    "phi3": "phi",
    "qwen2": "qwen_2_5",
    "qwen3": "qwen_3",
    "qwen3_moe": "qwen_3",
    "olmo2": "olmo2",
    "gpt_neox": "gpt_neox",
}
_MIXTURES = ("mixtral", "qwen3_moe")


@pytest.fixture(scope="module")
def converters() -> ModuleType:
    pytest.importorskip("lightning")
    return one_module("litgpt.scripts.convert_lit_checkpoint", "litgpt", "litgpt.scripts")


def theirs(converters: ModuleType, model_type: str, own: dict[str, Tensor], key_heads: int) -> dict[str, Tensor]:
    """What LitGPT makes of its own tensors."""
    config = SimpleNamespace(
        name="phi-3" if model_type == "phi3" else model_type,
        mlp_class_name="LLaMAMoE" if model_type in _MIXTURES else "LLaMAMLP",
        n_head=HEADS,
        n_query_groups=key_heads,
        head_size=HEAD,
    )
    found: dict[str, Tensor] = {}
    untied = {"untie_weights": False} if model_type.startswith("gemma") else {}  # it leaves the head out otherwise
    getattr(converters, f"copy_weights_{_FUNCTIONS[model_type]}")(config, found, dict(own), **untied)
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.parametrize("model_type", nightly_but([*_FUNCTIONS][:2], _FUNCTIONS))
def test_litgpts_own_converters(model_type: str, converters: ModuleType, tmp_path: Path) -> None:
    """Equal names and bits, of weights and of moments, in chunks that were cut anywhere."""
    key_heads = HEADS if model_type == "gpt_neox" else KEY_HEADS
    experts = {"num_local_experts": 3, "num_experts": 3, "moe_intermediate_size": 24} if model_type in _MIXTURES else {}
    config = config_of(model_type, num_key_value_heads=key_heads, **experts)
    hub = saved(config, tmp_path)
    for arrays in (hub, random_like(hub)):
        own = to_the_family("litgpt", arrays, config.to_dict())
        assert all(name.startswith(("transformer.", "lm_head.")) for name in own)
        their_hub = theirs(converters, model_type, own, key_heads)
        if model_type == "gpt_neox" and "embed_out.weight" not in arrays:
            their_hub["lm_head.weight"] = their_hub.pop("embed_out.weight")
        check_same(their_hub, arrays)
        check_same(to_the_hub("litgpt", own, config.to_dict()), arrays)


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_names_and_order_of_before_0_5(model_type: str, converters: ModuleType) -> None:
    """`attn.attn` has queries, keys and values by groups; LitGPT reads it by the function that is asked here."""
    config = config_of(model_type)
    hub = {name: tensor.detach() for name, tensor in model_of(config).state_dict().items()}
    own = to_the_family("litgpt", hub, config.to_dict())
    sizes = SimpleNamespace(n_head=HEADS, n_query_groups=KEY_HEADS, head_size=HEAD)
    older = {
        name.replace("attn.qkv", "attn.attn"): converters.qkv_reassemble(tensor, sizes) if ".qkv." in name else tensor
        for name, tensor in own.items()
    }
    assert not torch.equal(older["transformer.h.0.attn.attn.weight"], own["transformer.h.0.attn.qkv.weight"])
    check_same(to_the_hub("litgpt", older, config.to_dict()), hub)


def test_a_padded_vocabulary_is_not_passed_on_in_silence(tmp_path: Path) -> None:
    """LitGPT trains with rows up to a multiple of 512: the Hub's model has as many as its config says."""
    config = config_of("llama")
    hub = saved(config, tmp_path / "hub")
    own = to_the_family("litgpt", hub, config.to_dict())
    padded = {
        name: torch.cat([own[name], torch.ones(8, HIDDEN)]) for name in ("transformer.wte.weight", "lm_head.weight")
    }
    torch.save({"model": own | padded}, tmp_path / "lit_model.pth")
    with pytest.raises(Mismatch, match=r"expected 40 rows \(vocab_size in config\.json\), found 48") as caught:
        ckptkit.consolidate(tmp_path / "lit_model.pth", tmp_path / "out", base=tmp_path / "hub")
    assert "--vocab-size 40" in str(caught.value.hint)
    ckptkit.consolidate(tmp_path / "lit_model.pth", tmp_path / "out", base=tmp_path / "hub", vocab_size=40)
    made = ckptkit.open(tmp_path / "out")
    check_same({name: made[name].torch() for name in made}, hub)
