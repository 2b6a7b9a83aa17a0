"""What bitsandbytes and torchao really save is refused by name, and copied as it is without a dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptkit import consolidate, inspect
from ckptkit.errors import Unsupported

transformers = pytest.importorskip("transformers", reason="transformers saves the models")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
SIZES = {"vocab_size": 130, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}


def by_bitsandbytes(**asked: Any) -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes quantizes the model")
    return transformers.BitsAndBytesConfig(**asked)


def by_torchao(kind: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao quantizes the model")
    return transformers.TorchAoConfig(getattr(quantization, kind)())


CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "bitsandbytes in 4 bits": (by_bitsandbytes, (), {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "bitsandbytes in 4": (*(by_bitsandbytes, (), {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}),),
    "bitsandbytes in 8 bits": (by_bitsandbytes, (), {"load_in_8bit": True}),
    "torchao": (by_torchao, ("Int8WeightOnlyConfig",), {}),
    "by torchao": (by_torchao, ("Float8WeightOnlyConfig",), {}),
}


@pytest.mark.parametrize("method", CASES)
def test_what_libraries_save_is_refused_by_name(tmp_path: Path, method: str) -> None:
    make, arguments, asked = CASES[method]
    config = make(*arguments, **asked)
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16().save_pretrained(tmp_path / "plain")
    how = {"quantization_config": config, "device_map": "cpu", "dtype": torch.bfloat16}
    live = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **how)
    live.save_pretrained(tmp_path / "in")
    found = inspect(tmp_path / "in").quantized
    assert found is not None
    assert method in str(found.refusal)
    with pytest.raises(Unsupported, match=method):
        consolidate(tmp_path / "in", tmp_path / "out", dtype="bf16")
    consolidate(tmp_path / "in", tmp_path / "bytes", names="keep")
    ours, theirs = (load_file(tmp_path / one / "model.safetensors") for one in ("bytes", "in"))
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(ours[name].flatten().view(torch.uint8), theirs[name].flatten().view(torch.uint8)) for name in ours
    )
