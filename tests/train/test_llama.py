from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptkit.train.llama import Llama, initial_weight
from ckptkit.train.model_config import ModelConfig


def plain_model(config: ModelConfig, seed: int = 0) -> Llama:
    model = Llama(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(name, parameter.shape, config, seed))
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_logits_are_those_of_transformers_bit_for_bit(tmp_path: Path, tied: bool, key_value_heads: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = replace(ModelConfig(), num_key_value_heads=key_value_heads, tie_word_embeddings=tied, rope_theta=5e5)
    model = plain_model(config)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(config.to_json())
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    for length in (1, 7, 200):
        tokens = torch.randint(256, (3, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            assert torch.equal(model(tokens), theirs(tokens).logits)


def test_state_dict_has_the_names_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=2, hidden_size=64, vocab_size=256)
    )
    assert Llama(ModelConfig()).state_dict().keys() == theirs.state_dict().keys()


def test_initial_weights_follow_seed_and_name_alone() -> None:
    config, shape = ModelConfig(), torch.Size((8, 8))
    weight = initial_weight("model.layers.0.mlp.up_proj.weight", shape, config, seed=1)
    assert torch.equal(weight, initial_weight("model.layers.0.mlp.up_proj.weight", shape, config, seed=1))
    assert not torch.equal(weight, initial_weight("model.layers.1.mlp.up_proj.weight", shape, config, seed=1))
    assert not torch.equal(weight, initial_weight("model.layers.0.mlp.up_proj.weight", shape, config, seed=2))


def test_restore_brings_back_ties_and_rope_after_to_empty() -> None:
    with torch.device("meta"):
        model = Llama(ModelConfig())
    model.to_empty(device="cpu")
    model.restore()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.rotary_emb.inv_freq, Llama(ModelConfig()).model.rotary_emb.inv_freq)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
