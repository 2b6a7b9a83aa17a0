"""Adapters beside a model's linear layers, judged by PEFT's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.adapters.names import parse_tensor_name
from ckptkit.errors import CkptError, Unsupported, Usage
from ckptkit.training.initial import initialize_model
from ckptkit.training.metrics import flops_per_token
from ckptkit.training.models.config import ModelConfig
from ckptkit.training.models.llama import LlamaBlueprint
from ckptkit.training.models.lora import Lora, LoraBlueprint
from ckptkit.training.shard import matmul_and_frozen_numel

TOKENS = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def blueprint(*targets: str, dtype: torch.dtype = torch.float32, tied: bool = True, seed: int = 0) -> LoraBlueprint:
    base = LlamaBlueprint(ModelConfig.of_size("tiny", tied=tied))
    return LoraBlueprint(base, Lora(4, 6, targets, seed), dtype, "org/base")


def made(found: LoraBlueprint, seed: int | None = 1) -> nn.Module:
    model = found.build()
    initialize_model(found, model, seed)
    return model


def test_at_first_an_adapter_changes_nothing_and_is_all_that_is_trained() -> None:
    model, plain = made(blueprint()), LlamaBlueprint(ModelConfig.of_size("tiny")).build()
    missing, strange = plain.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert strange
    assert all(parse_tensor_name(name) is not None for name in strange)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == set(strange)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    a, b = (model.get_parameter(f"model.layers.0.mlp.up_proj.lora_{one}.default.weight") for one in "AB")
    assert (a.shape, b.shape) == ((4, 64), (176, 4))
    assert not b.any()
    assert 0 < float(a.detach().abs().max()) <= 64**-0.5


def test_the_weights_are_those_of_the_seed_whatever_is_beside_them() -> None:
    plain = LlamaBlueprint(ModelConfig.of_size("tiny"))
    whole = plain.build()
    initialize_model(plain, whole, 1)
    model = made(blueprint())
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())
    halves = made(blueprint(dtype=torch.bfloat16))
    name = "model.layers.0.mlp.up_proj"
    assert torch.equal(halves.get_parameter(f"{name}.weight"), whole.get_parameter(f"{name}.weight").bfloat16())
    assert halves.get_parameter(f"{name}.lora_A.default.weight").dtype == torch.float32
    assert halves.get_buffer("model.rotary_emb.inv_freq").dtype == torch.float32


def test_adapters_have_their_values_where_the_model_is_yet_to_be_loaded() -> None:
    name = "model.layers.1.self_attn.q_proj.lora_A.default.weight"
    first, again, other = (made(blueprint(seed=seed), None).get_parameter(name) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first, made(blueprint(seed=3)).get_parameter(name))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # the library's own
@pytest.mark.parametrize("targets", [(), ("q_proj", "layers.1.mlp.down_proj"), ("lm_head", "o_proj")])
def test_arithmetic_and_names_are_the_library_s(tmp_path: Path, targets: tuple[str, ...]) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    found = blueprint(*targets, tied=False)
    model = made(found)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    for name, content in found.model_files().items():
        (tmp_path / name).write_bytes(content)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_config(config), peft.LoraConfig.from_pretrained(tmp_path)
    )
    ours = {f"base_model.model.{name}": tensor for name, tensor in model.state_dict().items()}
    names = {name.replace(".base_layer", ""): name for name in theirs.state_dict()}
    assert names.keys() == ours.keys()
    theirs.load_state_dict({names[name]: tensor for name, tensor in ours.items()})
    trained = {name for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    assert {f"base_model.model.{name}" for name, one in model.named_parameters() if one.requires_grad} == trained
    with torch.no_grad():
        assert torch.equal(model(TOKENS), theirs(TOKENS).logits)


@pytest.mark.parametrize(
    ("targets", "kind", "said"),
    [
        (("q_prjo",), Usage, "expected the name of a module, found `q_prjo`"),
        (("proj",), Usage, "expected the name of a module, found `proj`"),
        (("embed_tokens",), Unsupported, "`model.embed_tokens` is a `Embedding`"),
        (("q_proj", "norm"), Unsupported, "`model.norm` is a `RMSNorm`"),
        (("mlp",), Unsupported, "`model.layers.0.mlp` is a `MLP`"),
    ],
)
def test_targets_that_are_none_are_refused(targets: tuple[str, ...], kind: type[CkptError], said: str) -> None:
    with torch.device("meta"), pytest.raises(kind, match=said):
        blueprint(*targets).build()


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from ckptkit.training.models.pretrained import Pretrained

    sizes: dict[str, Any] = {"vocab_size": 40, "n_positions": 16, "n_embd": 24, "n_layer": 1, "n_head": 4}
    transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="no linear layers to adapt"):
        LoraBlueprint(Pretrained(tmp_path), Lora(4, 8), torch.float32, None).build()


def test_the_config_is_that_of_the_adapter() -> None:
    files = blueprint().model_files()
    config = json.loads(files["adapter_config.json"])
    assert json.loads(files["config.json"])["model_type"] == "llama"
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 6, PROJECTIONS)
    assert config["base_model_name_or_path"] == "org/base"


def test_operations_of_frozen_parameters_have_no_gradient_of_their_own() -> None:
    model = blueprint().build()
    multiplied, frozen = matmul_and_frozen_numel(model)
    adapters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert multiplied - frozen == adapters
    assert flops_per_token(multiplied, 2, 64, 10, frozen=frozen) == 4 * frozen + 6 * adapters + 12 * 2 * 64 * 10
