"""Adapters merged into quantized bases, judged by PEFT on what the base is when it is made plain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.errors import Unsupported
from tests.state.quantized.quantized_models import written

pytest.importorskip("peft", reason="PEFT is the judge of adapters")

from tests.trainers.produced_peft import fill

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # the library's own
SIZES = {"vocab_size": 130, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def base(root: Path, scheme: str) -> Path:
    """A quantized model of a known type."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**SIZES, **heads)).bfloat16().save_pretrained(root / "plain")
    ckptkit.consolidate(root / "plain", root / "base", quantize=scheme)
    return root / "base"


def adapter(model: Path, out: Path, **more: Any) -> Any:
    """An adapter of a model, saved, and the weights of the model with it merged."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, lora_alpha=7, target_modules=["q_proj", "down_proj"], **more)
    live = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    fill(live)
    live.save_pretrained(str(out))
    return live.merge_and_unload().state_dict()


@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"modules_to_save": ["v_proj"]}], ids=["", "DoRA", "whole"])
@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-channel"])
def test_the_base_is_made_plain_first(tmp_path: Path, scheme: str, more: dict[str, Any]) -> None:
    quantized = base(tmp_path, scheme)
    ckptkit.consolidate(quantized, tmp_path / "fp32", dtype="fp32")
    truth = adapter(tmp_path / "fp32", tmp_path / "adapter", **more)
    done = ckptkit.merge(quantized, tmp_path / "adapter", tmp_path / "merged")
    ckptkit.merge(quantized, tmp_path / "adapter", tmp_path / "wide", dtype="fp32")
    found, wide = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "wide"))
    assert found.keys() == wide.keys() == truth.keys()
    for name, tensor in truth.items():
        if "use_dora" in more:
            torch.testing.assert_close(wide[name], tensor, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(wide[name], tensor), name
        assert torch.equal(found[name], wide[name].bfloat16()), name
    said = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in said
    assert said["dtype"] == "bfloat16"
    assert any("dequantized 14 weights" in note for note in done.notes)
    assert any("bfloat16 unless you pass --dtype" in note for note in done.notes)
    assert not done.dropped  # the scales are in the plain weights
    assert done.unchecked_bytes == (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size - header(
        tmp_path
    )


def header(root: Path) -> int:
    """The bytes before the tensors of the adapter, which has no checksums."""
    return 8 + int.from_bytes((root / "adapter" / "adapter_model.safetensors").read_bytes()[:8], "little")


def test_a_base_of_another_method_is_refused_by_name(tmp_path: Path) -> None:
    adapter(base(tmp_path, "fp8-block").with_name("plain"), tmp_path / "adapter")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    tensors[f"{name}.qweight"] = tensors.pop(f"{name}.weight").int()
    root = written(tmp_path / "gptq", None, tensors)
    with pytest.raises(Unsupported, match="GPTQ or AWQ"):
        ckptkit.merge(root, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
