"""Trees as axolotl 0.21.0 left them: of transformers' Trainer, with a count of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptkit
from tests.producers import save_alone

pytestmark = pytest.mark.filterwarnings("ignore:.*single process")


@pytest.mark.parametrize("tokens", ['{"total": 96, "trainable": 90}', None])
def test_the_count_of_tokens_names_axolotl(tmp_path: Path, tokens: str | None) -> None:
    place = tmp_path / "run" / "checkpoint-2"
    save_alone({"model": {"w": torch.ones(2)}}, place / "pytorch_model_fsdp_0")
    (place / "trainer_state.json").write_text("{}")
    if tokens:
        (place / "tokens_state.json").write_text(tokens)
    expected = "axolotl, by transformers' Trainer" if tokens else "Accelerate, by transformers' Trainer"
    assert ckptkit.inspect(place).trainer == ckptkit.inspect(place / "pytorch_model_fsdp_0").trainer == expected
    left = ckptkit.consolidate(place, tmp_path / "out", names="keep", strict=True).left_behind
    assert {entry.why for entry in left} == {"training state"}
