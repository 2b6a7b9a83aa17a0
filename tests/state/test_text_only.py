"""The text model of a vision-language model, judged by transformers: it loads, and has the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MllamaForConditionalGeneration

from ckptkit import consolidate, convert
from ckptkit.errors import Unsupported, Usage
from tests.models.names.tiny_models import make_config, make_model
from tests.producers import save_alone

KINDS = {
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen3_vl": "Qwen3ForCausalLM",
    "qwen3_vl_moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "llava": "LlamaForCausalLM",
    "mistral3": "MistralForCausalLM",
    "paligemma": "GemmaForCausalLM",
}


@pytest.mark.parametrize("model_type", KINDS)
def test_the_text_model_has_the_same_logits(model_type: str, tmp_path: Path) -> None:
    model = make_model(model_type)
    save_alone({"model": model.state_dict()}, tmp_path / "run" / "ckpt-1")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "run")
    done = consolidate(tmp_path / "run", tmp_path / "out", text_only=True, strict=True)
    assert any("vis" in left.name for left in done.dropped)
    text, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert type(text).__name__ == KINDS[model_type]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    words = torch.arange(3, 11).reshape(1, -1)
    with torch.no_grad():
        assert torch.allclose(text.eval()(words).logits, model(input_ids=words).logits, rtol=0, atol=1e-6)


def test_a_saved_model_and_what_is_refused(tmp_path: Path) -> None:
    make_model("mistral3").save_pretrained(tmp_path / "eyes")
    (tmp_path / "eyes" / "preprocessor_config.json").write_text("{}")
    done = consolidate(tmp_path / "eyes", tmp_path / "text", text_only=True)
    assert done.files.keys() == {"config.json", "generation_config.json", "model.safetensors"}
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"]) == ("mistral", True)
    assert all(name.startswith("model.") for name in load_file(tmp_path / "text" / "model.safetensors"))
    with pytest.raises(Usage, match="expected a vision-language model"):
        consolidate(tmp_path / "text", tmp_path / "no", text_only=True)
    with pytest.raises(Usage, match="writes a Hugging Face model"):
        convert(tmp_path / "eyes", tmp_path / "no", to="dcp", text_only=True)
    MllamaForConditionalGeneration(make_config("mllama")).save_pretrained(tmp_path / "mllama")
    with pytest.raises(Unsupported, match="does not have a causal language model"):
        consolidate(tmp_path / "mllama", tmp_path / "no", text_only=True)
