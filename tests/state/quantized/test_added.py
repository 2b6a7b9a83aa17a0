"""A storage scheme of another package, with a `quant_method` that ckptkit does not know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit import consolidate
from ckptkit.errors import Unsupported
from ckptkit.state.quantized.config import QuantizationConfig
from ckptkit.state.quantized.packed import Packed, Specs
from ckptkit.state.quantized.stored import SCHEMES, KnownScheme, floats8


def find(specs: Specs, stated: QuantizationConfig) -> Iterator[tuple[str, Packed]]:
    """Yield weights in fp8 with a scale per block, under a method of our own."""
    if stated.method == "ours":
        yield from floats8.find(specs, replace(stated, method="fp8"))


def test_its_method_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.arange(128 * 128.0).reshape(128, 128).to(torch.float8_e4m3fn)
    state = {"a.weight": weight, "a.weight_scale_inv": torch.full((1, 1), 0.5)}
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in/model.safetensors", {"format": "pt"})
    config = {"model_type": "own", "quantization_config": {"quant_method": "ours", "weight_block_size": [128, 128]}}
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match="quantized by `ours`, which ckptkit does not know"):
        consolidate(tmp_path / "in", tmp_path / "out", dtype="bf16")
    monkeypatch.setitem(SCHEMES.own, "ours", KnownScheme(f"{__name__}:find", method="ours"))
    consolidate(tmp_path / "in", tmp_path / "out", dtype="bf16")
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["a.weight"], weight.bfloat16() * 0.5)
