"""The built-in Llama, judged by transformers' own and by one document at a time."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ckptkit.training.initial import initialize_model
from ckptkit.training.models.config import ModelConfig, RopeScaling
from ckptkit.training.models.llama import Llama, LlamaBlueprint
from tests.training.models.test_config import LINEAR, LLAMA3

TINY = ModelConfig()


def plain_model(config: ModelConfig, seed: int = 0) -> Llama:
    model = Llama(config)
    initialize_model(LlamaBlueprint(config), model, seed)
    return model


def open_in_transformers(model: Llama, root: Path) -> Any:
    """The model as transformers opens its weights and its config.json."""
    transformers = pytest.importorskip("transformers")
    tied = model.config.tie_word_embeddings
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    for name, content in LlamaBlueprint(model.config).model_files().items():
        (root / name).write_bytes(content)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(root, output_loading_info=True)
    assert not any(report.values())
    return theirs


def draw_tokens(*shape: int) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(shape[-1]))


def pack(*rows: tuple[int, ...]) -> Tensor:
    """Positions of rows of documents of these lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_logits_are_those_of_transformers_bit_for_bit(tmp_path: Path, tied: bool, key_value_heads: int) -> None:
    config = replace(TINY, num_key_value_heads=key_value_heads, tie_word_embeddings=tied, rope_theta=5e5)
    model = plain_model(config)
    theirs = open_in_transformers(model, tmp_path)
    for length in (1, 7, 200):
        tokens = draw_tokens(3, length)
        with torch.no_grad():
            assert torch.equal(model(tokens), theirs(tokens).logits)


@pytest.mark.parametrize("scaling", [LINEAR, LLAMA3])
def test_scaled_rope_is_that_of_transformers_bit_for_bit(tmp_path: Path, scaling: RopeScaling) -> None:
    model = plain_model(replace(TINY, rope_scaling=scaling, head_dim=64, rope_theta=5e5))
    theirs = open_in_transformers(model, tmp_path)
    inv_freq = model.model.rotary_emb.inv_freq
    assert torch.equal(inv_freq, theirs.model.rotary_emb.inv_freq)
    assert not torch.equal(inv_freq, plain_model(replace(TINY, head_dim=64, rope_theta=5e5)).model.rotary_emb.inv_freq)
    tokens = draw_tokens(2, 200)
    with torch.no_grad():
        assert torch.equal(model(tokens), theirs(tokens).logits)


@pytest.mark.parametrize("key_value_heads", [2, 4])
def test_packed_documents_do_not_see_each_other(tmp_path: Path, key_value_heads: int) -> None:
    model = plain_model(replace(TINY, num_key_value_heads=key_value_heads))
    rows = (40, 1, 23), (64,), (5, 59)
    tokens, positions = draw_tokens(3, 64), pack(*rows)
    with torch.no_grad():
        packed = model(tokens, positions)
        for row, lengths in enumerate(rows):
            parts = zip(tokens[row].split(lengths), packed[row].split(lengths), strict=True)
            for document, logits in parts:
                torch.testing.assert_close(logits, model(document[None])[0], rtol=0, atol=2e-6)
        theirs = open_in_transformers(model, tmp_path)(tokens, position_ids=positions, use_cache=False).logits
    assert torch.equal(packed, theirs)


def test_positions_of_whole_documents_change_nothing() -> None:
    model, tokens = plain_model(TINY), draw_tokens(2, 48)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, pack((48,), (48,))), model(tokens), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
@pytest.mark.parametrize("positions", [None, pack((10, 6), (16,))])
def test_blocks_can_be_compiled_whole_and_recomputed(positions: Tensor | None) -> None:
    tokens = draw_tokens(2, 16)
    blueprint, gradients = LlamaBlueprint(TINY), []
    for wrapped in (False, True):
        model = plain_model(TINY)
        for block in blueprint.transformer_blocks(model) if wrapped else ():
            once = partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = torch.compile(once, backend="aot_eager", fullgraph=True)
        blueprint.compute_logits(model, tokens, positions).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_state_dict_has_the_names_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=2, hidden_size=64, vocab_size=256)
    )
    assert Llama(TINY).state_dict().keys() == theirs.state_dict().keys()


def test_initial_weights_follow_seed_and_name_alone() -> None:
    one, same, other = (plain_model(TINY, seed).state_dict() for seed in (1, 1, 2))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])
    assert not torch.equal(one[name], one["model.layers.1.mlp.up_proj.weight"])


def test_projections_that_end_a_block_start_smaller_by_the_depth() -> None:
    weights = plain_model(replace(TINY, num_hidden_layers=8)).state_dict()
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            std = 0.02 / 4 if "o_proj" in name or "down_proj" in name else 0.02
            assert 0.9 * std < float(weight.std()) < 1.1 * std, name


def test_nothing_is_left_of_the_garbage_after_to_empty() -> None:
    blueprint = LlamaBlueprint(replace(TINY, rope_scaling=LLAMA3))
    with torch.device("meta"):
        model = blueprint.build()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.constant_(tensor, torch.nan)
    blueprint.tie_weights(model)
    initialize_model(blueprint, model, 0)
    assert isinstance(model, Llama)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    inv_freq = model.model.rotary_emb.inv_freq
    assert torch.equal(inv_freq, Llama(blueprint.config).model.rotary_emb.inv_freq)
    assert inv_freq.dtype == torch.float32


def test_a_blueprint_tells_the_shape() -> None:
    blueprint = LlamaBlueprint(replace(TINY, head_dim=32, vocab_size=300, max_position_embeddings=128))
    assert (blueprint.vocab_size, blueprint.max_length, blueprint.layers) == (300, 128, 2)
    assert blueprint.attention_width == 128
    assert blueprint.weights is None
    assert [type(block).__name__ for block in blueprint.transformer_blocks(blueprint.build())] == ["LlamaBlock"] * 2
