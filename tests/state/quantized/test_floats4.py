"""Floats of 4 bits made plain, judged by compressed-tensors, transformers, ModelOpt, and the documented formulas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptkit import consolidate, inspect
from ckptkit.errors import CkptError, Corrupt, Mismatch, Unsupported
from tests.state.quantized.few_bits import FP4, Stored, X, deepseek_v4, modelopt, mxfp4, mxfp8, nvfp4, unpacked
from tests.state.quantized.quantized_models import in_blocks, spread, written
from tests.state.quantized.test_dequantize import DTYPES, assert_same, config, model, sizes, with_sums  # noqa: F401

W = f"{X}.weight"
CASES: Mapping[str, Any] = {
    "nvfp4": nvfp4,
    "nvfp4 of fp32": partial(nvfp4, torch.float32),
    "mxfp4": mxfp4,
    "mxfp8": mxfp8,
    "modelopt": modelopt,
    "modelopt, experts": partial(modelopt, (3, 20, 64), is_scalar=False),
    "deepseek": deepseek_v4,
    "deepseek, another dtype": partial(deepseek_v4, dtype=torch.float4_e2m1fn_x2),
}


def saved(root: Path, stored: Stored, *more: Mapping[str, Tensor]) -> Path:
    """A model of one weight, its tensors in two files, and its config."""
    halves = list(stored.tensors.items())
    root = written(root, None, dict(halves[:1]), dict(halves[1:]), *more)
    said = {"model_type": "unheard_of", stored.section: dict(stored.said), **stored.more}
    (root / "config.json").write_text(json.dumps(said))
    return root


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_what_the_libraries_make(tmp_path: Path, case: str, dtype: str) -> None:
    stored: Stored = CASES[case]()
    plain = {"model.norm.weight": torch.randn(7).bfloat16()}
    root = with_sums(saved(tmp_path / "in", stored, plain))
    done = consolidate(root, tmp_path / "out", dtype=dtype, names="keep")
    truth = {**plain, stored.name: stored.truth}
    if dtype == "bf16" or stored.truth.dtype == torch.float32:  # compressed-tensors makes nothing but bf16 of it
        assert_same(model(tmp_path / "out"), {name: tensor.to(DTYPES[dtype]) for name, tensor in truth.items()})
    assert done.unchecked_bytes == 0
    said = config(tmp_path / "out")
    assert said.keys() == {"model_type", "dtype"}


def test_the_experts_of_deepseek_lie_beside_eight_bits(tmp_path: Path) -> None:
    """Judged by transformers' own step, and by brute force; its fused experts too."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="transformers is the judge")
    stored, numbers = deepseek_v4(), in_blocks((256, 384))[0]
    exponents = torch.randint(110, 130, (2, 3), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    dense = {"layers.3.attn.wq_a.weight": numbers, "layers.3.attn.wq_a.scale": exponents}
    raw, scales = stored.tensors.values()
    fused = {"experts.gate_up_proj": raw.unsqueeze(0), "experts.gate_up_proj_scale_inv": scales.unsqueeze(0)}
    root = saved(tmp_path / "in", stored, dense, fused, {"hc.scale": torch.ones(3)})
    found = inspect(root).quantized
    assert found is not None
    assert (found.method, found.weights, found.sizes) == ("fp8 and mxfp4", 3, ((1, 32), (128, 128)))
    consolidate(root, tmp_path / "out", dtype="bf16")
    judge = finegrained.Fp8Dequantize(None)
    truth = {
        stored.name: judge._dequantize_one(raw, scales, torch.bfloat16),
        "layers.3.attn.wq_a.weight": judge._dequantize_one(numbers, exponents, torch.bfloat16),
        "experts.gate_up_proj": judge._dequantize_one(raw, scales, torch.bfloat16).unsqueeze(0),
        "hc.scale": torch.ones(3).bfloat16(),
    }
    assert_same(model(tmp_path / "out"), truth)
    by_hand = numbers.float() * spread(exponents.float(), (256, 384), (128, 128))
    assert torch.equal(truth["layers.3.attn.wq_a.weight"], by_hand.bfloat16())
    assert torch.equal(truth[stored.name], stored.truth.bfloat16())


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_modelopt_makes_the_same_of_its_numbers(tmp_path: Path) -> None:
    library = pytest.importorskip("modelopt.torch.quantization.qtensor", reason="nvidia-modelopt is the judge")
    weight = torch.randn(44, 192).bfloat16()
    packed, scales, second = library.NVFP4QTensor.quantize(weight, 16)
    raw = packed._quantized_data
    tensors = {W: raw, f"{W}_scale": scales, f"{W}_scale_2": second}
    consolidate(saved(tmp_path / "in", Stored(tensors, modelopt().said, raw)), tmp_path / "out", dtype="bf16")
    truth = packed.dequantize(torch.bfloat16, scale=scales, double_scale=second, block_sizes={-1: 16})
    assert_same(model(tmp_path / "out"), {W: truth})
    assert torch.equal(unpacked(raw).unflatten(-1, (-1, 16)).flatten(-2).abs().unique(), FP4[:8])


E4M3 = torch.float8_e4m3fn
NUMBERS = torch.full((4, 64), 0x22, dtype=torch.uint8)
GOOD = {W: NUMBERS, W + "_scale": torch.ones(4, 8).to(E4M3), W + "_scale_2": torch.tensor(0.5)}
BAD: dict[str, tuple[dict[str, Tensor | None], type[CkptError], str]] = {
    "no scale": ({W + "_scale": None}, Mismatch, "expected scales for these"),
    "no numbers": ({W: None}, Mismatch, "is missing"),
    "scales of another shape": ({W + "_scale": torch.ones(4, 7).to(E4M3)}, Mismatch, r"found \[4, 7\]"),
    "scales of another dtype": ({W + "_scale": torch.ones(4, 8)}, Mismatch, "expected scales in float8_e4m3fn"),
    "one level": ({W + "_scale_2": None}, Mismatch, "expected scales in exponents"),
    "columns without groups": ({W: NUMBERS[:, :60].contiguous()}, Mismatch, "columns in groups of 16, found 120"),
    "levels": ({W + "_scale_2": torch.ones(4)}, Mismatch, "one number for the whole weight"),
    "a level of 0": ({W + "_scale_2": torch.tensor(0.0)}, Corrupt, "found 0"),
    "a level that is NaN": ({W + "_scale_2": torch.tensor(torch.nan)}, Corrupt, "found nan"),
    "NaN": ({W + "_scale": torch.full((4, 8), torch.nan).to(E4M3)}, Corrupt, "found nan"),
    "negative": ({W + "_scale": (-torch.ones(4, 8)).to(E4M3)}, Corrupt, "found -"),
    "both levels": ({W + "_global_scale": torch.tensor([1.0])}, Mismatch, "belong to no quantized weight"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_one_clear_error(tmp_path: Path, case: str) -> None:
    more, error, words = BAD[case]
    tensors = {name: tensor for name, tensor in {**GOOD, **more}.items() if tensor is not None}
    root = written(tmp_path / "in", modelopt().said, tensors)
    with pytest.raises(error, match=words):
        consolidate(root, tmp_path / "out", dtype="bf16")
    assert not (tmp_path / "out").exists()


def test_a_scale_that_vanished_makes_zeros(tmp_path: Path) -> None:
    """Small scales of NVFP4 are rounded to 0 in 8 bits, beside numbers that are not: engines compute 0 too."""
    tensors = {**GOOD, W + "_scale": torch.zeros(4, 8).to(E4M3)}
    consolidate(written(tmp_path / "in", modelopt().said, tensors), tmp_path / "out", dtype="bf16")
    assert not model(tmp_path / "out")[W].any()


@pytest.mark.parametrize(
    "said", [{"quant_algo": "W4A8_AWQ"}, {"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"}]
)
def test_kinds_that_are_not_known_are_refused_by_name(tmp_path: Path, said: dict[str, str]) -> None:
    root = written(tmp_path / "in", {**modelopt().said, **said}, GOOD)
    with pytest.raises(Unsupported, match=list(said.values())[-1]):
        consolidate(root, tmp_path / "out", dtype="bf16")
    consolidate(root, tmp_path / "bytes", names="keep")
    assert model(tmp_path / "bytes").keys() == GOOD.keys()


def test_experts_of_deepseek_without_exponents_are_an_error(tmp_path: Path) -> None:
    stored = deepseek_v4()
    (name, raw), (scale, _) = stored.tensors.items()
    with pytest.raises(Mismatch, match="expected scales for these int8"):
        consolidate(saved(tmp_path / "alone", Stored({name: raw}, stored.said, raw)), tmp_path / "out", dtype="bf16")
    root = saved(tmp_path / "in", Stored({name: raw, scale: torch.ones(44, 6)}, stored.said, raw))
    with pytest.raises(Mismatch, match="expected scales in exponents") as caught:
        consolidate(root, tmp_path / "out", dtype="bf16")
    assert (caught.value.path, caught.value.tensor) == (root, scale)
