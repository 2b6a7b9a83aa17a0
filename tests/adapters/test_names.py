"""Names of tensors of adapters, as PEFT gives them, told from the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.adapters.find import Adapted, find_adapters
from ckptkit.adapters.names import WRAPPER, name_in_base_model, parse_tensor_name
from ckptkit.errors import Corrupt, Unsupported
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.box import Shape, full_box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.wrappers import may_be_adapter

LAYER = "model.layers.0"
TRAINED = {
    f"{LAYER}.q_proj.lora_A.default.weight": ("A", "default", f"{LAYER}.q_proj", f"{LAYER}.q_proj.lora_A.weight"),
    f"{LAYER}.q_proj.lora_B.other.weight": ("B", "other", f"{LAYER}.q_proj", f"{LAYER}.q_proj.lora_B.weight"),
    f"{LAYER}.q_proj.lora_B.default.bias": ("bias", "default", f"{LAYER}.q_proj", f"{LAYER}.q_proj.lora_B.bias"),
    "wte.lora_embedding_A.default": ("embedding_A", "default", "wte", "wte.lora_embedding_A"),
    "wte.lora_embedding_B.default": ("embedding_B", "default", "wte", "wte.lora_embedding_B"),
    "up.lora_magnitude_vector.default.weight": ("magnitude", "default", "up", "up.lora_magnitude_vector"),
    "up.lora_magnitude_vector.default": ("magnitude", "default", "up", "up.lora_magnitude_vector"),
    "lm_head.modules_to_save.default.weight": ("module", "default", "lm_head.weight", "lm_head.weight"),
    "wte.token_adapter.trainable_tokens_delta.default": (
        *("tokens", "default", "wte"),
        "wte.token_adapter.trainable_tokens_delta",
    ),
    "mlp.experts.base_layer.lora_A.default.weight": (
        *("A", "default", "mlp.experts"),
        "mlp.experts.base_layer.lora_A.weight",
    ),
}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("before", ["", WRAPPER, f"model.{WRAPPER}", f"module.{WRAPPER}"])
def test_what_is_in_training_and_what_is_saved(name: str, before: str) -> None:
    """Whatever a trainer puts before it; and what is saved is known again, but for whose it is."""
    kind, adapter, module, saved = TRAINED[name]
    found = parse_tensor_name(before + name)
    assert found is not None
    assert (found.kind, found.adapter, found.module, found.saved) == (kind, adapter, module, saved)
    again = parse_tensor_name(WRAPPER + saved)
    assert kind == "module" or again == found._replace(adapter=None)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("base_model.model.q_proj.base_layer.weight", "q_proj.weight"),
        ("base_model.model.lm_head.original_module.weight", "lm_head.weight"),
        ("base_model.model.wte.token_adapter.base_layer.weight", "wte.weight"),
        ("base_model.model.mlp.experts.base_layer.base_layer.gate_up_proj", "mlp.experts.gate_up_proj"),
        ("base_model.model.norm.weight", "norm.weight"),
    ],
)
def test_what_the_base_model_calls_its_own(name: str, own: str) -> None:
    assert parse_tensor_name(name) is None
    assert name_in_base_model(name) == own


@pytest.mark.parametrize("name", ["attn.w_lora.lora.0.weight", "q_a_proj.weight", "lora_head.weight", "encoder.lora_A"])
def test_other_names_are_none_of_an_adapter(name: str) -> None:
    assert find({name: (4, 4)}) is None


def find(shapes: dict[str, Shape]) -> Adapted | None:
    """What is found among tensors of these names and shapes."""
    tensors = {}
    for name, shape in shapes.items():
        spec = Spec(DTYPES["float32"], shape)
        tensors[name] = StoredTensor(spec, (Chunk(full_box(shape), "f", 0, spec.nbytes, spec.dtype),))
    assert may_be_adapter(shapes) or not any("lora_" in name for name in shapes)
    return find_adapters(Layout(Path("here"), "raw", tensors))


def pair(module: str, adapter: str, rank: int) -> dict[str, Shape]:
    """The matrices of a module."""
    name = f".{adapter}" if adapter else ""
    return {f"{module}.lora_A{name}.weight": (rank, 7), f"{module}.lora_B{name}.weight": (5, rank)}


def test_several_adapters_and_their_base() -> None:
    found = find(
        pair("up", "first", 2)
        | pair("up", "default", 3)
        | pair("down", "default", 4)
        | {"up.base_layer.weight": (5, 7)}
    )
    assert found is not None
    assert not found.is_saved
    assert [adapter.name for adapter in found.adapters] == ["default", "first"]
    assert found.base == {"up.weight": "up.base_layer.weight"}
    assert dict(found.adapters[0].matrix_count_by_rank) == {3: 1, 4: 1}
    assert found.adapters[0].target_suffixes == ("up", "down")


def test_all_that_is_saved_belongs_to_the_adapter() -> None:
    found = find(pair("up", "", 2) | {"base_model.model.lm_head.weight": (9, 5)})
    assert found is not None
    assert found.is_saved
    assert found.adapters[0].replaced_parameters == ("lm_head.weight",)
    assert {entry.saved for entry in found.adapters[0].entries.values()} == {
        *("base_model.model.up.lora_A.weight", "base_model.model.up.lora_B.weight", "base_model.model.lm_head.weight")
    }


def test_names_of_both_kinds_contradict_each_other() -> None:
    with pytest.raises(Corrupt):
        find(pair("up", "", 2) | pair("down", "default", 2))


def test_two_names_of_one_parameter_contradict_each_other() -> None:
    with pytest.raises(Corrupt) as raised:
        find(pair("up", "default", 2) | {"up.base_layer.weight": (5, 7), "up.weight": (5, 7)})
    assert raised.value.tensor == "up.weight"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("base_model.model.q.lora_E.default", "AdaLoRA"),
        ("base_model.model.q.ia3_l.default", "IA3"),
        ("base_model.model.q.hada_w1_a.default", "LoHa"),
        ("base_model.model.q.vera_lambda_b.default", "VeRA"),
        ("base_model.model.q.lora_new.default.weight", "lora_new"),
        ("prompt_embeddings", "prompt learning"),
    ],
)
def test_other_methods_are_named(name: str, method: str) -> None:
    with pytest.raises(Unsupported, match=method):
        find({name: (4, 4)})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("layers.0.q_proj.lora_a.weight", "layers.0.q_proj.lora_b.weight"),
        ("layers.0.q.lora_A", "layers.0.q.lora_B"),
        ("unet.q.lora_down.weight", "unet.q.lora_up.weight"),
        ("base_model.model.q.lora_A.my.own.weight", "base_model.model.q.lora_B.my.own.weight"),
    ],
)
def test_adapters_of_other_libraries_are_refused(first: str, second: str) -> None:
    with pytest.raises(Unsupported) as raised:
        find({first: (2, 7), second: (5, 2)})
    assert raised.value.tensor == first
    assert find({first: (2, 7)} if "base_model" not in first else {"q.weight": (2, 7)}) is None
