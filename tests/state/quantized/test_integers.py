"""Integers of compressed-tensors made plain, judged by compressed-tensors."""

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
from tests.state.quantized.few_bits import Stored, X, integers
from tests.state.quantized.quantized_models import written
from tests.state.quantized.test_dequantize import DTYPES, assert_same, config, model, sizes, with_sums  # noqa: F401

W = f"{X}.weight"
CASES: Mapping[str, Any] = {
    "int4": partial(integers, 4),
    "int4 of 128": partial(integers, 4, size=128, shape=(40, 256)),
    "int4 rows": partial(integers, 4, "channel"),
    "int4 zero points": partial(integers, 4, symmetric=False),
    "int4 rows, zero points": partial(integers, 4, "channel", symmetric=False, dtype=torch.float32),
    "int4 in fp32": partial(integers, 4, dtype=torch.float32),
    "int4 in fp16": partial(integers, 4, dtype=torch.float16),
    "int8": partial(integers, 8),
    "int8 zero points": partial(integers, 8, symmetric=False),
    "int8 rows": partial(integers, 8, "channel"),
    "int8 whole": partial(integers, 8, "tensor"),
    "int8 not packed": partial(integers, 8, "channel", form="int-quantized"),
    "int8 not packed, zero points": partial(integers, 8, "channel", symmetric=False, form="int-quantized"),
    "int8 not packed, groups": partial(integers, 8, form="naive-quantized", symmetric=False),
}


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_integers_are_what_compressed_tensors_makes(tmp_path: Path, case: str, dtype: str) -> None:
    stored: Stored = CASES[case]()
    halves = list(stored.tensors.items())
    plain = {"model.norm.weight": torch.randn(7).bfloat16()}
    root = written(tmp_path / "in", stored.said, {**plain, **dict(halves[:1])}, dict(halves[1:]))
    done = consolidate(with_sums(root), tmp_path / "out", dtype=dtype)
    truth = {**plain, W: stored.truth}
    assert_same(model(tmp_path / "out"), {name: tensor.to(DTYPES[dtype]) for name, tensor in truth.items()})
    assert done.unchecked_bytes == 0
    assert "quantization_config" not in config(tmp_path / "out")


def shaped(*shape: int) -> Tensor:
    return torch.tensor(shape)


GOOD = {W + "_packed": torch.zeros(4, 16, dtype=torch.int32), W + "_scale": torch.ones(4, 4).bfloat16()}
ZEROS, TWO_ZEROS = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
WAY = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
BAD: dict[str, tuple[dict[str, Tensor | None], dict[str, Any], type[CkptError], str]] = {
    "no scale": ({W + "_scale": None}, {}, Mismatch, "found none"),
    "no numbers": ({W + "_packed": None}, {}, Mismatch, "belong to no quantized weight"),
    "scales of another shape": ({W + "_scale": torch.ones(4, 5)}, {}, Mismatch, r"found \[4, 5\]"),
    "rows of scales": ({W + "_scale": torch.ones(3, 4)}, {}, Mismatch, r"found \[3, 4\]"),
    "a group that does not divide": ({}, {"group_size": 48}, Mismatch, "a scale for 48"),
    "groups of 0": ({}, {"group_size": 0}, Corrupt, r"\[1, 0\]"),
    "groups of words": ({}, {"group_size": "32"}, Corrupt, "two sizes"),
    "symmetric by words": ({}, {"symmetric": "yes"}, Corrupt, "expected true or false, found yes"),
    "bits by words": ({}, {"num_bits": "4"}, Corrupt, "found '4'"),
    "5 bits": ({W + "_packed": torch.zeros(4, 20, dtype=torch.int32)}, {"num_bits": 5}, Unsupported, "5 bits"),
    "no zero points": ({}, {"symmetric": False}, Mismatch, "expected zero points"),
    "zero points of a symmetric model": ({W + "_zero_point": ZEROS}, {}, Mismatch, "calls symmetric"),
    "zero points of another shape": ({W + "_zero_point": TWO_ZEROS}, {"symmetric": False}, Mismatch, r"\[1, 4\]"),
    "zero points of floats": ({W + "_zero_point": ZEROS.float()}, {"symmetric": False}, Mismatch, "found float32"),
    "NaN": ({W + "_scale": torch.full((4, 4), torch.nan)}, {}, Corrupt, "found nan"),
    "negative": ({W + "_scale": -torch.ones(4, 4)}, {}, Corrupt, "found -1"),
    "zero": ({W + "_scale": torch.zeros(4, 4)}, {}, Corrupt, "is 0, but the values"),
    "another shape in the file": (
        {W + "_shape": shaped(4, 120)},
        {},
        Corrupt,
        r"expected \[4, 128\], found \[4, 120\]",
    ),
    "a shape of three": ({W + "_shape": shaped(4, 128, 1)}, {}, Mismatch, r"shape \[2\]"),
    "g_idx": ({W + "_g_idx": torch.zeros(128, dtype=torch.int32)}, {}, Unsupported, "g_idx"),
    "an order": ({}, {"actorder": "group"}, Unsupported, "order of their activations"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_one_clear_error(tmp_path: Path, case: str) -> None:
    more, said, error, words = BAD[case]
    tensors = {name: tensor for name, tensor in {**GOOD, **more}.items() if tensor is not None}
    groups = {"group_0": {"weights": {**WAY, **said}}}
    root = written(tmp_path / "in", {"quant_method": "compressed-tensors", "config_groups": groups}, tensors)
    with pytest.raises(error, match=words):
        consolidate(root, tmp_path / "out", dtype="bf16")
    assert not (tmp_path / "out").exists()
    if error is not Corrupt:
        found = inspect(root).quantized
        assert found is not None
        assert found.refusal is not None


def test_what_config_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    root = written(tmp_path / "in", None, GOOD)
    with pytest.raises(Unsupported, match="does not say how many bits"):
        consolidate(root, tmp_path / "out", dtype="bf16")
    groups = {
        str(bits): {"weights": {**WAY, "strategy": "channel", "group_size": None, "num_bits": bits}} for bits in (4, 8)
    }
    said = {"quant_method": "compressed-tensors", "config_groups": groups}
    rows = {W + "_packed": GOOD[W + "_packed"], W + "_scale": torch.ones(4, 1)}
    with pytest.raises(Unsupported, match="may be numbers of 4 bits or 8 bits"):
        consolidate(written(tmp_path / "several", said, rows), tmp_path / "out", dtype="bf16")


def test_a_text_model_may_say_it(tmp_path: Path) -> None:
    """The config of Kimi K2.5 says it in the section of its text model."""
    stored = integers(4)
    root = written(tmp_path / "in", None, stored.tensors)
    (root / "config.json").write_text(
        json.dumps({"model_type": "x", "text_config": {"quantization_config": stored.said}})
    )
    consolidate(root, tmp_path / "out", dtype="bf16")
    assert torch.equal(model(tmp_path / "out")[W], stored.truth)
    assert config(tmp_path / "out")["text_config"] == {"dtype": "bfloat16"} or "quantization_config" not in str(
        config(tmp_path / "out")
    )


@pytest.mark.usefixtures("sizes")
def test_a_note_says_whether_the_integers_would_come_back(tmp_path: Path) -> None:
    """As after training that is aware of quantization: each group has an integer of the largest magnitude."""
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized", reason="the library is the judge")
    codes = torch.randint(-7, 8, (44, 192), dtype=torch.int8)
    codes[:, ::32] = 7
    codes[3, 32:64] = 0
    scales = (torch.rand(44, 6) * 0.1 + 0.01).bfloat16()
    others = codes.clone()
    others[5, 64:96] = 3
    lowest = codes.clone()
    lowest[9, 7] = -8

    def noted(root: Path, **weights: Tensor) -> str:
        tensors = {f"{name}.weight_packed": library.pack_to_int32(one, 4) for name, one in weights.items()}
        tensors |= {f"{name}.weight_scale": scales for name in weights}
        done = consolidate(written(root / "in", integers(4).said, tensors), root / "out", dtype="bf16")
        (note,) = (note for note in done.notes if "quantizing to" in note)
        return note

    assert noted(tmp_path / "all", a=codes).endswith("of maximum / 7, restores the same integers in 1 weight")
    note = noted(tmp_path / "some", a=codes, b=others, c=lowest)
    assert note.endswith("restores the same integers in only 1 of 3 weights, not in b.weight, c.weight")
    plain = model(tmp_path / "some" / "out")
    for name, same in {"a": codes, "b": others, "c": lowest}.items():
        groups = plain[f"{name}.weight"].float().unflatten(-1, (-1, 32))
        peaks = groups.abs().amax(-1, keepdim=True)
        again = torch.where(peaks > 0, groups / (peaks / 7), 0).round().flatten(-2)
        assert torch.equal(again, same.float()) == (name == "a")


def test_the_config_of_a_base_says_it_where_there_is_no_other(tmp_path: Path) -> None:
    stored = integers(4)
    root, base = written(tmp_path / "in", None, stored.tensors), written(tmp_path / "base", stored.said, {})
    (root / "config.json").unlink()
    consolidate(root, tmp_path / "out", dtype="bf16", base=str(base))
    assert_same(model(tmp_path / "out"), {W: stored.truth})
