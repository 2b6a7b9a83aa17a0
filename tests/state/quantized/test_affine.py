"""MLX's triples made plain, judged by mlx where it is installed, and by what its documentation says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptkit import consolidate, inspect
from ckptkit.errors import CkptError, Corrupt, Mismatch, Unsupported
from tests.state.quantized.few_bits import X, mlx
from tests.state.quantized.quantized_models import written
from tests.state.quantized.test_dequantize import DTYPES, assert_same, config, model, sizes, with_sums  # noqa: F401
from tests.state.quantized.test_floats4 import saved

W = f"{X}.weight"
BITS = (2, 3, 4, 5, 6, 8)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bits", BITS)
def test_triples_are_what_the_documentation_says(tmp_path: Path, bits: int, dtype: torch.dtype) -> None:
    stored = mlx(bits, 32 if bits % 2 else 64, dtype)
    root = with_sums(saved(tmp_path / "in", stored))
    for name, wanted in DTYPES.items():
        consolidate(root, tmp_path / name, dtype=name)
        assert_same(model(tmp_path / name), {W: stored.truth.to(wanted)})
    assert config(tmp_path / "bf16").keys() == {"model_type", "dtype"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bits", BITS)
def test_mlx_makes_the_same_of_what_it_saves(tmp_path: Path, bits: int, dtype: str) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is the judge; pip install mlx[cpu]")
    mx.set_default_device(mx.cpu)
    weight = mx.random.normal((44, 192)).astype(getattr(mx, dtype))
    parts = mx.quantize(weight, group_size=64, bits=bits)
    truth = mx.dequantize(*parts, group_size=64, bits=bits)
    (tmp_path / "in").mkdir()
    names = (W, f"{X}.scales", f"{X}.biases")
    mx.save_safetensors(str(tmp_path / "in/model.safetensors"), dict(zip(names, parts, strict=True)), {"format": "mlx"})
    said = {"group_size": 64, "bits": bits, "mode": "affine"}
    both = {"model_type": "unheard_of", "quantization": said, "quantization_config": said}
    (tmp_path / "in/config.json").write_text(json.dumps(both))
    found = inspect(tmp_path / "in").quantized
    assert found is not None
    assert (found.method, found.sizes, found.parameters) == (f"mlx {bits} bits", ((1, 64),), 44 * 192)
    consolidate(tmp_path / "in", tmp_path / "out", dtype=dtype)
    mx.save_safetensors(str(tmp_path / "truth.safetensors"), {W: truth})
    assert_same(model(tmp_path / "out"), model(tmp_path))
    assert config(tmp_path / "out").keys() == {"model_type", "dtype"}


def test_some_modules_may_have_other_bits(tmp_path: Path) -> None:
    four, eight = mlx(4), mlx(8, 32)
    head = {name.replace(X, "lm_head"): tensor for name, tensor in eight.tensors.items()}
    root = saved(tmp_path / "in", four, head)
    said = {**four.said, "lm_head": {"group_size": 32, "bits": 8}, "model.norm": False}
    (root / "config.json").write_text(json.dumps({"model_type": "unheard_of", "quantization": said}))
    consolidate(root, tmp_path / "out", dtype="bf16")
    assert_same(model(tmp_path / "out"), {W: four.truth, "lm_head.weight": eight.truth})


BAD: dict[str, tuple[dict[str, Tensor | None], dict[str, Any], type[CkptError], str]] = {
    "no scales": ({f"{X}.scales": None}, {}, Mismatch, "expected scales for these uint32"),
    "no numbers": ({W: None}, {}, Mismatch, "belong to no quantized weight"),
    "no biases": ({f"{X}.biases": None}, {}, Mismatch, "found none"),
    "scales of another shape": ({f"{X}.scales": torch.ones(44, 2)}, {}, Mismatch, r"\[44, 3\]"),
    "biases of integers": ({f"{X}.biases": torch.ones(44, 3).int()}, {}, Mismatch, "a float for each 64"),
    "other bits": ({}, {"bits": 8}, Mismatch, "8 bits"),
    "groups that do not divide": ({}, {"group_size": 128}, Mismatch, "each 128"),
    "7 bits": ({}, {"bits": 7}, Corrupt, "2 to 6 or 8 bits"),
    "groups of words": ({}, {"group_size": "64"}, Corrupt, "groups of 64"),
    "another mode": ({}, {"mode": "nvfp4"}, Unsupported, "mlx nvfp4"),
    "NaN": ({f"{X}.scales": torch.full((44, 3), torch.nan)}, {}, Corrupt, "expected finite values in .*, found nan"),
    "infinite": ({f"{X}.biases": torch.full((44, 3), torch.inf)}, {}, Corrupt, "finite values in .*, found inf"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_one_clear_error(tmp_path: Path, case: str) -> None:
    more, said, error, words = BAD[case]
    tensors = {name: tensor for name, tensor in {**mlx(4).tensors, **more}.items() if tensor is not None}
    root = written(tmp_path / "in", {**mlx(4).said, **said}, tensors)
    with pytest.raises(error, match=words):
        consolidate(root, tmp_path / "out", dtype="bf16")
    assert not (tmp_path / "out").exists()


def test_nothing_is_guessed_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="does not say how many bits"):
        consolidate(written(tmp_path / "in", None, mlx(4).tensors), tmp_path / "out", dtype="bf16")
