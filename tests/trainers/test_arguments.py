"""Libraries with a Trainer of their own, recognized by the class of the arguments that their Trainer pickles."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from tests.producers import save_alone

WEIGHT = {"a.weight": torch.ones(2, 2)}
CLASSES = {
    "trl.trainer.sft_config": "TRL, by transformers' Trainer",
    "sentence_transformers.sentence_transformer.training_args": "sentence-transformers, by transformers' Trainer",
    "transformers.training_args": "transformers' Trainer",
    "trlx.config": "transformers' Trainer",
}


def save_arguments(place: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save an object whose class is in a module, which need not be installed."""
    made = type("Arguments", (), {"__module__": module})
    for dot in [at for at, letter in enumerate(f"{module}.") if letter == "."]:
        monkeypatch.setitem(sys.modules, module[:dot], ModuleType(module[:dot]))
    sys.modules[module].Arguments = made  # type: ignore[attr-defined]
    torch.save(made(), place / "training_args.bin")


@pytest.mark.parametrize("module", CLASSES)
def test_of_one_process(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(WEIGHT, tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text("{}")
    save_arguments(tmp_path, module, monkeypatch)
    assert ckptkit.inspect(tmp_path).trainer == CLASSES[module]


@pytest.mark.parametrize("has_state", [True, False])
def test_beside_states_of_fsdp(tmp_path: Path, has_state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    save_alone(WEIGHT, tmp_path / "pytorch_model_fsdp_0")
    if has_state:
        (tmp_path / "trainer_state.json").write_text("{}")
    save_arguments(tmp_path, "trl.trainer.dpo_config", monkeypatch)
    expected = "TRL, by transformers' Trainer" if has_state else "Accelerate"
    assert ckptkit.inspect(tmp_path / "pytorch_model_fsdp_0").trainer == expected


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02."])
def test_arguments_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    save_file(WEIGHT, tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "training_args.bin").write_bytes(content)
    assert ckptkit.inspect(tmp_path).trainer == "transformers' Trainer"
