"""What a config.json calls for by ckptkit's own table, judged by what transformers says of the same config."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from ckptkit.models.architectures import find_table, sizes_by_letter
from ckptkit.models.expected import Expected, ExpectedByTable, expected_by_transformers, expected_model
from tests.models.names.tiny_models import CONFIGS, TEXT, make_model

WEIGHTS = "model.safetensors"
DENSE = ["llama", "mistral", "granite", "smollm3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "phi3"]
LAYERS = {"num_hidden_layers": 5}
MIXTURES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {}),
    ("mixtral", {"mlp_only_layers": [0], "decoder_sparse_step": 2}),  # which its class does not know
    ("mixtral", {"head_dim": None, "tie_word_embeddings": True}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {**LAYERS, "mlp_only_layers": [0, 3]}),
    ("qwen3_moe", {**LAYERS, "decoder_sparse_step": 2, "attention_bias": True}),
    ("qwen3_moe", {**LAYERS, "decoder_sparse_step": 2, "mlp_only_layers": [1], "tie_word_embeddings": True}),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
]


def config_of(model_type: str, **options: Any) -> dict[str, Any]:
    """The config.json of a tiny model, as transformers writes it."""
    made = CONFIG_MAPPING[model_type](**(CONFIGS.get(model_type, TEXT) | options))
    return dict(json.loads(made.to_json_string()))


def assert_same(own: Expected, theirs: Expected) -> None:
    assert list(own.shapes.items()) == list(theirs.shapes.items())
    assert list(own.parameters.items()) == list(theirs.parameters.items())
    assert own.tied == theirs.tied
    assert sizes_by_letter(own.sizes) == sizes_by_letter(theirs.sizes)
    for form, wanted in ((own.forms[0], theirs.forms[0]), (own.forms[-1], theirs.forms[-1])):
        assert form.shapes == wanted.shapes
        assert form.tied == wanted.tied
        assert form.unsaved == wanted.unsaved
        assert form.came_from == wanted.came_from
        assert not any(wanted.in_fp32.values())
        assert not form.in_fp32
        ours, found = own.linear_layers(form), theirs.linear_layers(wanted)
        assert set(ours.names) == set(found.names)
        assert ours.kept == found.kept


@pytest.mark.parametrize("model_type", DENSE)
def test_dense_models_are_what_transformers_says(model_type: str) -> None:
    config = config_of(model_type)
    own = expected_model(config)
    assert isinstance(own, ExpectedByTable)
    assert_same(own, expected_by_transformers(config, None))


@pytest.mark.parametrize(("model_type", "options"), MIXTURES, ids=str)
def test_mixtures_of_experts_are_what_transformers_says(model_type: str, options: dict[str, Any]) -> None:
    config = config_of(model_type, **options)
    own = expected_model(config)
    assert isinstance(own, ExpectedByTable)
    assert_same(own, expected_by_transformers(config, None))
    for base in own.forms:
        names = frozenset(base.needed_names | {"more.weight_scale"})
        assert_same(expected_model(config, lambda names=names: names), expected_by_transformers(config, names))  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["MixtralForSequenceClassification"]},
        {"num_key_value_heads": None},
        {"num_local_experts": 0},
        {"num_local_experts": [4]},
        {"num_experts": 4},
        {"hidden_size": 32.0},
        {"num_hidden_layers": 10**9},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
    ids=str,
)
def test_the_table_says_nothing_of_what_it_does_not_know(change: dict[str, Any]) -> None:
    config = config_of("mixtral")
    assert find_table(config) is not None
    assert find_table(config | change) is None
    left_out = {name: value for name, value in config.items() if name != "intermediate_size"}
    assert find_table(left_out) is None


def test_a_base_of_another_form_is_asked_of_transformers() -> None:
    """A Mixtral whose modules have the names of other types' on disk, which transformers' table can read and write."""
    config = config_of("mixtral")
    names = frozenset(name.replace("block_sparse_moe", "mlp") for name in expected_model(config).forms[0].needed_names)
    found = expected_model(config, lambda: names)
    assert not isinstance(found, ExpectedByTable)
    assert found.forms[0].needed_names == names


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_transformers_is_not_imported(model_type: str, tmp_path: Path) -> None:
    model = make_model(model_type)
    model.save_pretrained(tmp_path / "hub")
    save_file(model.state_dict(), tmp_path / "memory.safetensors")
    code = (
        "import sys, ckptkit; ckptkit.consolidate(sys.argv[1], sys.argv[2], base=sys.argv[3], strict=True); "
        "print(sorted({'transformers', 'torch'} & sys.modules.keys()))"
    )
    for number, source in enumerate((tmp_path / "hub", tmp_path / "memory.safetensors")):
        out = tmp_path / str(number)
        command = [sys.executable, "-c", code, str(source), str(out), str(tmp_path / "hub")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"
        assert (out / WEIGHTS).read_bytes() == (tmp_path / "hub" / WEIGHTS).read_bytes()
