"""`scripts/sweep` finds what is equal, and says what is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.producers import save_alone
from tests.trainers.produced_peft import tiny_llama

pytest.importorskip("transformers")

from scripts.sweep import describe, sweep
from scripts.sweeping.ranks import judge
from scripts.sweeping.result import DIFFERENT, EQUAL, NOT_BUILT, Result

pytestmark = pytest.mark.slow


def test_types_on_three_ranks() -> None:
    results = dict(sweep(["qwen2_moe", "no_such_type"], jobs=1, limit=100))
    assert results["qwen2_moe"] == Result(EQUAL)
    assert results["no_such_type"].outcome == NOT_BUILT
    page = describe(results)
    assert "Equal: `qwen2_moe`." in page
    assert "Not built (an error of transformers): `no_such_type` (KeyError: 'no_such_type')." in page


def test_what_differs_is_named(tmp_path: Path) -> None:
    model = tiny_llama()
    save_alone({"model": model.state_dict()}, tmp_path / "run" / "step-1")
    model.save_pretrained(tmp_path / "theirs")
    assert judge(tmp_path) == Result(EQUAL)
    path, name = tmp_path / "theirs" / "model.safetensors", "model.norm.weight"
    truth = load_file(path)
    for change, reason in (
        ({name: truth[name] + 1}, f"`{name}`: other bytes"),
        ({name: truth[name].bfloat16()}, f"`{name}`: expected torch.bfloat16 [24], found torch.float32 [24]"),
        (
            {"more": torch.ones(1)},
            "`more` is only in transformers' output; names in only one output: 1, names in transformers' output: 22",
        ),
    ):
        save_file(truth | change, path, {"format": "pt"})
        shutil.rmtree(tmp_path / "ours")
        assert judge(tmp_path) == Result(DIFFERENT, reason)
    assert f"- Different: `llama`: {reason}" in " ".join(describe({"llama": Result(DIFFERENT, reason)}).split())
