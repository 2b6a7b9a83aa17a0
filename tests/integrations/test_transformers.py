"""The callback in transformers' Trainer: each checkpoint is handled beside the training, which never fails by it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptkit.ops.prune import prune
from ckptkit.ops.verify import verify

transformers = pytest.importorskip("transformers")

STEPS = 4


def train(home: Path, commands: Sequence[str] | None = None, **options: Any) -> Any:
    """Train a tiny Llama with transformers' Trainer, which saves after each second step."""
    from ckptkit.integrations.transformers import CkptkitCallback

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(home), max_steps=STEPS, save_steps=2, per_device_train_batch_size=2, report_to=[],
        dataloader_pin_memory=False, disable_tqdm=True, **options
    )  # fmt: skip
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
    trainer = transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=data,
        callbacks=[CkptkitCallback() if commands is None else CkptkitCallback(commands)],
    )
    trainer.train()
    return trainer


def test_each_checkpoint_is_verified_and_exported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = train(tmp_path)
    assert not [record for record in caplog.records if record.name.startswith("ckptkit")]
    for step in (2, 4):
        checkpoint = tmp_path / f"checkpoint-{step}"
        assert (checkpoint / "ckptkit.json").is_file()
        assert all(part.is_ok for part in verify(checkpoint))
        assert (tmp_path / "exported" / checkpoint.name / "config.json").is_file()
    made = load_file(tmp_path / "exported" / "checkpoint-4" / "model.safetensors")
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(made[name], tensor), name
    assert "handled" in (tmp_path / "ckptkit.log").read_text()


def test_training_goes_on_from_a_checkpoint_that_was_handled(tmp_path: Path) -> None:
    train(tmp_path)
    trainer = train(tmp_path / "more")
    trainer.args.max_steps = STEPS + 2
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert trainer.state.global_step == STEPS + 2
    assert (tmp_path / "more" / "exported" / "checkpoint-6").is_dir()


def test_what_fails_is_a_warning_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ckptkit"):
        trainer = train(tmp_path, ["inspect {ckpt}/none"])
    assert trainer.state.global_step == STEPS
    said = [record.getMessage() for record in caplog.records if record.name == "ckptkit.integrations.transformers"]
    assert f"ckptkit could not handle a checkpoint: {tmp_path / 'ckptkit.log'} says why" in said
    assert "given up after 3 tries" in (tmp_path / "ckptkit.log").read_text()


def test_a_directory_that_cannot_be_written_is_a_warning_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ckptkit.log").mkdir()
    with caplog.at_level(logging.WARNING, "ckptkit"):
        trainer = train(tmp_path)
    assert trainer.state.global_step == STEPS
    assert any("ckptkit did not start" in record.getMessage() for record in caplog.records)


def test_under_torchrun_the_commands_are_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptkit.ops.watching.watch import watch

    train(tmp_path / "run", ["inspect {ckpt}"])
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setitem(os.environ, name, value)
    assert watch(tmp_path / "run", do="consolidate {ckpt} {out} -q", every=0.05, once=True).is_ok
    assert len(prune(tmp_path / "run", keep_last=1).keep) == 1
