"""Checkpoints that are Hugging Face models: transformers open them, and training goes on from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ckptkit import inspect
from ckptkit.conversion.convert import consolidate
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.training.saving.run import Run
from tests.training.saving.networks import differing


def make_model(*, tied: bool = True) -> Any:
    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def files_of(model: Any) -> dict[str, bytes]:
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    return {"config.json": json.dumps(config).encode()}


def learn(model: Any, optimizer: AdamW) -> None:
    tokens = torch.arange(11)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_open_a_checkpoint_and_training_goes_on_from_it(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(0)
    model = make_model(tied=tied)
    optimizer = AdamW(model.parameters(), lr=0.01)
    learn(model, optimizer)
    run = Run(tmp_path / "run", state_dict="hf", files=files_of(model))
    path = run.save(1, model, optimizer, place={7: {}, "epoch": (1,)})
    expected: dict[str, Tensor] = {name: t.clone() for name, t in model.state_dict().items()}
    assert inspect(path).trainer == "ckptkit.Run"
    assert ("lm_head.weight" in load_file(path / "model.safetensors")) is not tied
    assert differing(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict(), expected) == []
    with pytest.raises(Mismatch) as raised:
        consolidate(tmp_path / "run", tmp_path / "some", include=["model.layers.0.*"])
    assert "--names keep" in str(raised.value.hint)
    consolidate(tmp_path / "run", tmp_path / "out")
    assert differing(load_file(tmp_path / "out/model.safetensors"), load_file(path / "model.safetensors")) == []
    other = make_model(tied=tied)
    resumed = AdamW(other.parameters(), lr=1.0)
    place: dict[Any, Any] = {}
    assert Run(tmp_path / "run").load(other, resumed, place=place) == 1
    assert place == {7: {}, "epoch": (1,)}
    for each, its in ((model, optimizer), (other, resumed)):
        learn(each, its)
    assert differing(other.state_dict(), model.state_dict()) == []


def test_a_head_that_is_not_tied_after_all_is_not_lost(tmp_path: Path) -> None:
    model = make_model(tied=False)
    config = json.loads(files_of(model)["config.json"]) | {"tie_word_embeddings": True}
    run = Run(tmp_path / "run", state_dict="hf", files={"config.json": json.dumps(config).encode()})
    with pytest.raises(Mismatch, match=r"ties it to `model\.embed_tokens\.weight`, but they differ") as caught:
        run.save(1, model)
    assert caught.value.tensor == "lm_head.weight"
    assert list((tmp_path / "run").iterdir()) == []


class WithMore(nn.Linear):
    """A module with a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"calls": 3}


def test_a_model_with_a_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="only tensors can be saved in this format") as caught:
        Run(tmp_path / "run", state_dict="hf").save(1, WithMore(2, 2))
    assert caught.value.tensor == "_extra_state.calls"
    assert list((tmp_path / "run").iterdir()) == []
