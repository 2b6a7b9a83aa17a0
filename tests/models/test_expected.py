"""What a config.json calls for by ckptkit's own table, judged by what transformers says of the same config."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from ckptkit.models.expected import Expected, ExpectedByTable, by_transformers, expected
from tests.names.tiny_models import CONFIGS, TEXT

DENSE = ["llama", "mistral", "granite", "smollm3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "phi3"]
LAYERS = {"num_hidden_layers": 5}
MIXTURES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {}),
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
    own = expected(config)
    assert isinstance(own, ExpectedByTable)
    assert_same(own, by_transformers(config, None))


@pytest.mark.parametrize(("model_type", "options"), MIXTURES, ids=str)
def test_mixtures_of_experts_are_what_transformers_says(model_type: str, options: dict[str, Any]) -> None:
    config = config_of(model_type, **options)
    own = expected(config)
    assert isinstance(own, ExpectedByTable)
    assert_same(own, by_transformers(config, None))
    for base in own.forms:
        names = frozenset(base.needed | {"more.weight_scale"})
        assert_same(expected(config, lambda names=names: names), by_transformers(config, names))  # type: ignore[misc]
