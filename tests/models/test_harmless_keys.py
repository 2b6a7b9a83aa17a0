"""Whether keys that ckptkit calls harmless are: transformers computes with both values, and its code is searched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.models.config_differences import find_config_differences, has_no_effect

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
OF_BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
    "eos_token_id": 49,
    "decoder_start_token_id": 2,
}
OF_DEBERTA = {"relative_attention": True, "position_buckets": 16, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
ESM = {**SIZES, "max_position_embeddings": 130, "pad_token_id": 1, "mask_token_id": 32, "token_dropout": True}
CLIP = {**SIZES, "max_position_embeddings": 128, "eos_token_id": 49, "bos_token_id": 0, "pad_token_id": 1}


@pytest.mark.parametrize(
    ("name", "sizes", "change"),
    [
        ("EsmForMaskedLM", ESM, {"token_dropout": False}),
        ("EsmForMaskedLM", ESM, {"mask_token_id": 3}),
        ("EsmForMaskedLM", ESM, {"hidden_dropout_prob": 0.5}),
        ("CLIPTextModel", CLIP, {"eos_token_id": 3}),
        ("CLIPTextModel", CLIP, {"bos_token_id": 3}),
        ("XLNetForSequenceClassification", {"vocab_size": 64, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48},
         {"summary_type": "mean"}),
        ("BartForSequenceClassification", OF_BART, {"eos_token_id": 20}),
        ("BartForSequenceClassification", OF_BART, {"decoder_start_token_id": 5}),
        ("DebertaV2ForMaskedLM", {**SIZES, **OF_DEBERTA, "max_position_embeddings": 128},
         {"max_position_embeddings": 4096}),
        ("RobertaForMaskedLM", {**SIZES, "max_position_embeddings": 140, "pad_token_id": 1}, {"pad_token_id": 3}),
        ("BertForMaskedLM", {**SIZES, "pad_token_id": 1}, {"pad_token_id": 3, "max_position_embeddings": 512}),
        ("LlamaForCausalLM", SIZES, {"eos_token_id": 3, "pad_token_id": 4, "bos_token_id": 5}),
        ("LlamaForSequenceClassification", {**SIZES, "pad_token_id": 49}, {"pad_token_id": 20}),
        ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}, {"eos_token_id": 3}),
        ("T5EncoderModel", {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
         {"eos_token_id": 20, "pad_token_id": 3}),
    ],
)  # fmt: skip
def test_a_key_is_harmless_if_transformers_computes_the_same(
    name: str, sizes: dict[str, Any], change: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 49, (1, 100), generator=source)
    ids[0, [3, 7, 20, 50]], ids[0, -2:] = torch.tensor([2, 1, 3, 32]), torch.tensor([20, 49])
    models = [kind(kind.config_class(**sizes)), kind(kind.config_class(**{**sizes, **change}))]
    weights = {key: 0.2 * torch.randn(value.shape, generator=source) for key, value in models[0].named_parameters()}
    outputs = []
    for model in models:
        rows = {key: value[: weights[key].shape[0]] for key, value in model.named_parameters()}
        with torch.no_grad():
            for key, value in rows.items():
                value.copy_(weights[key])
            found = model.eval()(input_ids=ids)
        pooled = found.get("pooler_output")
        outputs.append(found.logits if "logits" in found else found[0] if pooled is None else pooled)
    one, two = ({**model.config.to_dict(), "architectures": [name]} for model in models)
    assert (find_config_differences(one, two) == []) is torch.equal(*outputs)


# models whose code reads such a token only in `generate`, or to make inputs of the decoder from labels
_NOT_IN_FORWARD = {
    "blip",
    "blip_2",
    "dia",
    "instructblip",
    "instructblipvideo",
    "moshi",
    "musicgen",
    "musicgen_melody",
    "t5gemma2",
}
_TOKENS = ("bos_token_id", "eos_token_id", "sep_token_id", "mask_token_id")


def test_each_model_whose_code_reads_a_token_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    module_of = transformers.models.auto.configuration_auto.model_type_to_module_name
    types = {kind: module_of(kind) for kind in transformers.CONFIG_MAPPING}
    unknown = []
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        code = re.sub(r"(?m)^ *(#|>>>|\.\.\.).*$", "", file.read_text("utf-8"))
        read = set(re.findall(rf"(?<!generation_)config\.({'|'.join(_TOKENS)})\b", code))
        types_here = [kind for kind, module in types.items() if module == file.parent.name]
        readers = [*types_here, *re.findall(r"^class (\w+)", code, re.MULTILINE)] if read else []
        unknown += [(file.name, key) for key in read if has_no_effect(key, readers)]
    assert {name for name, _ in unknown} <= {f"modeling_{name}.py" for name in _NOT_IN_FORWARD}
