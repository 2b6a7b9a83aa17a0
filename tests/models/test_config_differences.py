"""Whether two config.json describe models that compute the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ckptkit.models.config_differences import find_config_differences, find_contradictions

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
ODD = {"model_type": "odd", "architectures": ["OddForCausalLM"], **SIZES}  # which transformers does not know
LLAMA = {"model_type": "llama", **SIZES}


@pytest.mark.parametrize(
    ("key", "one", "two"),
    [
        ("rope_theta", 1e4, 5e5),
        ("rms_norm_eps", 1e-6, 1e-5),
        ("hidden_act", "silu", "gelu"),
        ("sliding_window", 16, 4096),
        ("num_experts_per_tok", 1, 2),
        ("final_logit_softcapping", 30.0, 50.0),
        ("attention_multiplier", 1.0, 0.01),
        ("logits_scaling", 1.0, 8.0),
        ("query_pre_attn_scalar", 8, 256),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 8.0}),
        ("rope_parameters", {"long_factor": [1.0, 2.0]}, {"long_factor": [1.0, 4.0]}),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e6}}, {"full_attention": {"rope_theta": 1e4}}),
        ("text_config", {"rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-5}),
        ("a_key_that_nobody_knows", 1, 2),
        ("image_token_id", 7, 9),
        ("layer_types", ["full_attention"], ["sliding_attention"]),
        ("auto_map", {"AutoModel": "modeling_a.A"}, {"AutoModel": "modeling_a.B"}),
        ("quantization_config", {"group_size": 64}, {"group_size": 128}),
    ],
)
def test_what_changes_the_computation_differs(key: str, one: object, two: object) -> None:
    first, *_ = find_config_differences({**ODD, key: one}, {**ODD, key: two})
    assert first.is_certain
    assert first.key.split(".")[-1] in (
        key,
        "factor",
        "long_factor",
        "rope_theta",
        "rms_norm_eps",
        "AutoModel",
        "group_size",
    )


@pytest.mark.parametrize(
    "change",
    [
        {"torch_dtype": "float16", "transformers_version": "4.1", "_name_or_path": "x", "use_cache": False},
        {"attention_dropout": 0.5, "hidden_dropout_prob": 0.1, "resid_pdrop": 0.1, "initializer_range": 0.5},
        {"bos_token_id": 5, "eos_token_id": [5, 6], "pad_token_id": 7, "vocab_size": 99},
        {"max_position_embeddings": 99, "router_aux_loss_coef": 0.5, "output_router_logits": True},
        {"architectures": ["FSDPOddForCausalLM"], "auto_map": {"AutoTokenizer": "m.T"}, "id2label": {"0": "a"}},
        {"rope_scaling": None, "sliding_window": None, "mlp_bias": False, "rope_parameters": {"rope_type": "default"}},
        {"head_dim": 8},
        {"text_config": {"dtype": "float16"}},
        {"quantization_config": {"group_size": 64}},
    ],
)
def test_harmless_keys_do_not_differ(change: dict[str, Any]) -> None:
    assert find_config_differences(ODD, {**ODD, **change}) == []


def test_custom_code_of_a_known_type_counts() -> None:
    one = {**LLAMA, "auto_map": {"AutoModelForCausalLM": "org/model--modeling_a.A"}}
    assert find_config_differences(one, {**one, "auto_map": {"AutoModelForCausalLM": "modeling_a.A"}}) == []
    (found,) = find_config_differences(one, {**one, "auto_map": {"AutoModelForCausalLM": "modeling_a.B"}})
    assert found == ("auto_map.AutoModelForCausalLM", "modeling_a.A", "modeling_a.B", True)
    (found,) = find_config_differences(one, LLAMA)
    assert not found.is_certain


def test_a_key_of_one_config_is_open() -> None:
    (found,) = find_config_differences(ODD, {**ODD, "my_scale": 4})
    assert not found.is_certain
    assert (found.key, found.here, found.there) == ("my_scale", None, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_parallel_residual", False),
        ("norm_topk_prob", False),
        ("logit_cap", 0.0),
        ("text_config", {"alibi": False}),
    ],
)
def test_a_key_that_is_false_or_absent_is_open(key: str, value: object) -> None:
    (found,) = find_config_differences(ODD, {**ODD, key: value})
    assert not found.is_certain
    assert found.key.split(".")[0] == key
    assert find_config_differences({**ODD, key: value}, {**ODD, key: value}) == []


@pytest.mark.parametrize(
    ("model_type", "key", "value", "default"),
    [
        ("gpt2", "scale_attn_weights", False, True),
        ("gpt_neox", "use_parallel_residual", False, True),
        ("opt", "do_layer_norm_before", False, True),
        ("qwen2_moe", "decoder_sparse_step", 0, 1),
        ("mistral", "sliding_window", None, 4096),
    ],
)
def test_a_default_that_is_not_false_counts(model_type: str, key: str, value: object, default: object) -> None:
    pytest.importorskip("transformers")
    one = {"model_type": model_type, "hidden_size": 32, "num_attention_heads": 4}
    for config, other in ((one, {**one, key: value}), ({**one, key: value}, one)):
        (found,) = find_config_differences(config, other)
        assert (found.key, found.is_certain) == (key, True)
        assert default in (found.here, found.there)
    assert find_config_differences(one, {**one, key: default}) == []


def test_lengths_count_where_the_rope_depends_on_them() -> None:
    for kind, differs in (("linear", False), ("dynamic", True), ("yarn", True), ("longrope", True)):
        one = {**ODD, "rope_scaling": {"rope_type": kind, "factor": 2.0}}
        found = find_config_differences({**one, "max_position_embeddings": 64}, {**one, "max_position_embeddings": 128})
        assert bool(found) is differs


_LENGTH, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SMALL = {"vocab_size": 16, "intermediate_size": 48, "num_hidden_layers": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
BOTH = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
# two ways to write the rope of a llama, with the keys beside it
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "beside": ({"rope_scaling": YARN}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, _ORIGINAL: 16}),
    "beside comes first": ({"rope_scaling": YARN}, {"rope_scaling": {**YARN, _ORIGINAL: 4096}, _ORIGINAL: 16}),
    "beside another": ({"rope_scaling": YARN}, {"rope_scaling": YARN, _ORIGINAL: 4096}),
    "the longest": (
        {"rope_scaling": YARN, _LENGTH: 16},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, _LENGTH: 16},
    ),
    "another longest": (
        {"rope_scaling": YARN, _LENGTH: 64},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, _LENGTH: 64},
    ),
    "the ratio": ({"rope_scaling": YARN, _LENGTH: 64}, {"rope_scaling": {**YARN, "factor": None}, _LENGTH: 64}),
    "another ratio": ({"rope_scaling": YARN, _LENGTH: 32}, {"rope_scaling": {**YARN, "factor": None}, _LENGTH: 32}),
    "a longer cache": ({"rope_scaling": YARN, _LENGTH: 64}, {"rope_scaling": YARN, _LENGTH: 128}),
    "llama3": (
        {"rope_scaling": {**LLAMA3, _ORIGINAL: 16}, _LENGTH: 64},
        {"rope_scaling": LLAMA3, _LENGTH: 64, _ORIGINAL: 16},
    ),
    "llama3, the longest": (
        {"rope_scaling": {**LLAMA3, _ORIGINAL: 16}, _LENGTH: 64},
        {"rope_scaling": LLAMA3, _LENGTH: 64},
    ),
    "longrope": ({"rope_scaling": {**LONG, _ORIGINAL: 16}, _LENGTH: 64}, {"rope_scaling": LONG, **BOTH}),
    "no rope": ({}, {_ORIGINAL: 16}),
}


@pytest.mark.parametrize(("one", "two"), ROPES.values(), ids=ROPES)
def test_the_length_before_scaling_is_where_transformers_finds_it(one: dict[str, Any], two: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    logits = []
    for said in (one, two):
        config = transformers.LlamaConfig(**SIZES, **SMALL, **copy.deepcopy(said))
        transformers.set_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
        logits.append(model(torch.arange(24)[None] % 16).logits)
    are_equal = torch.equal(*logits)
    assert (find_config_differences({**LLAMA, **one}, {**LLAMA, **two}) == []) is are_equal


def test_the_padding_token_of_a_classifier_counts() -> None:
    classifier = {**ODD, "architectures": ["OddForSequenceClassification"]}
    assert find_config_differences({**classifier, "pad_token_id": 1}, {**classifier, "pad_token_id": 2})


def test_what_a_trainers_files_say() -> None:
    said = {"rope_theta": 5e5, "layer_norm_epsilon": 1e-6, "rope_type": "llama3", "position_embedding_type": "rope"}
    config = {**ODD, "rope_theta": 1e4, "rms_norm_eps": 1e-5}
    assert [one.key for one in find_contradictions(said, config)] == ["rms_norm_eps", "rope_theta", "rope_type"]
    fitting = {**ODD, "rope_theta": 5e5, "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "llama3"}}
    assert find_contradictions(said, fitting) == []
    assert find_contradictions({"sliding_window": 4096}, {**ODD, "sliding_window": 4095}) == []
    assert find_contradictions({"partial_rotary_factor": 1.0, "n_group": 2}, ODD) == []


def test_defaults_of_transformers() -> None:
    pytest.importorskip("transformers")
    assert (
        find_config_differences(LLAMA, {**LLAMA, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "hidden_act": "silu"}) == []
    )
    (found,) = find_config_differences(LLAMA, {**LLAMA, "rope_theta": 5e5})
    assert found == ("rope_theta", 10000.0, 5e5, True)
    windows = {"model_type": "qwen2", **SIZES}
    assert find_config_differences(windows, {**windows, "sliding_window": 4096, "use_sliding_window": False}) == []
    gemma = {"model_type": "gemma3_text", **SIZES}
    assert find_config_differences(gemma, {**gemma, "rope_local_base_freq": 1e4}) == []
    assert find_config_differences(gemma, {**gemma, "rope_local_base_freq": 1e5})
    assert find_config_differences({"model_type": "gemma3", "text_config": gemma, "vision_config": {}}, gemma) == []
