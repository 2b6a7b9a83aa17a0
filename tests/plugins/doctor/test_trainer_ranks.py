"""Random states of ranks: a Trainer's checkpoint loads at any number of ranks, and doctor says nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ckptkit

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}


def train(out: Path, steps: int, resume: Path | None = None) -> Trainer:
    rows = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 8
    args = TrainingArguments(
        out, max_steps=steps, save_steps=2, per_device_train_batch_size=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_resumes_a_checkpoint_with_other_random_states(tmp_path: Path) -> None:
    train(tmp_path / "run", 2)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    state = checkpoint / "rng_state.pth"
    for rank in range(2):
        (checkpoint / f"rng_state_{rank}.pth").write_bytes(state.read_bytes())
    state.unlink()
    found = ckptkit.doctor(checkpoint, world_size=1)
    assert [finding.line for finding in found.findings] == []
    assert train(tmp_path / "run", 4, checkpoint).state.global_step == 4


@pytest.mark.parametrize("name", ["rng_state_{}.pth", "random_states_{}.pkl"])
def test_random_states_that_a_trainer_does_without_are_no_finding(tmp_path: Path, name: str) -> None:
    place = tmp_path / "checkpoint-2"
    place.mkdir()
    save_file({"w": torch.ones(2, 2)}, place / "model.safetensors")
    (place / "trainer_state.json").write_text(json.dumps({"global_step": 2, "log_history": []}))
    for rank in range(2):
        torch.save({"cpu": torch.zeros(4)}, place / name.format(rank))
    assert not ckptkit.doctor(place, world_size=4).findings
