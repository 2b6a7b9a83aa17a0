"""The callback in transformers' Trainer: each checkpoint is handled beside the training, which never fails by it."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from ckptkit.checks.verify import verify
from ckptkit.runs.deletion import locked_for_deletion
from ckptkit.runs.prune import prune
from tests.producers import spawn
from tests.trainers.produced_lightning import be_torchrun

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

STEPS = 4


def train(home: Path, commands: Sequence[str] | None = None, **options: Any) -> Any:
    """Train a tiny Llama with transformers' Trainer, which saves after each second step."""
    trainer = make_trainer(home, commands, **options)
    trainer.train()
    return trainer


def make_trainer(
    home: str | Path,
    commands: Sequence[str] | None = None,
    steps: int = STEPS,
    trainer_class: type = transformers.Trainer,
    **options: Any,
) -> Any:
    from ckptkit.integrations.transformers import CkptkitCallback

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(home), max_steps=steps, per_device_train_batch_size=2, report_to=[],
        dataloader_pin_memory=False, disable_tqdm=True, **{"save_steps": 2, **options}
    )  # fmt: skip
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
    return trainer_class(
        model=transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[CkptkitCallback() if commands is None else CkptkitCallback(commands)],
    )


def test_each_checkpoint_is_verified_and_exported_and_training_goes_on_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    trainer = make_trainer(tmp_path / "more", steps=STEPS + 2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert trainer.state.global_step == STEPS + 2
    assert (tmp_path / "more" / "exported" / "checkpoint-6").is_dir()


@pytest.mark.nightly
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
    from ckptkit.plugins.watch.watch import watch

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


def shard(trainer: Any, state_dict_type: str = "SHARDED_STATE_DICT") -> None:
    """Make a Trainer use FSDP2 on CPUs: by itself it does so on accelerators only."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=state_dict_type, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
    )  # fmt: skip
    trainer.is_fsdp_enabled = True


def _train_sharded(home: Path) -> None:
    """Train as one of two ranks of FSDP2, while nothing can be handled; go on from what was saved; end the process."""
    be_torchrun()
    is_first = dist.get_rank() == 0
    for steps in (2, 4):
        commands = ["manifest {ckpt}", "consolidate {ckpt} {out}"]
        trainer = make_trainer(home, commands, steps, use_cpu=True, max_grad_norm=0.0)
        shard(trainer)
        with locked_for_deletion(home) if is_first else nullcontext():  # a watch waits for whoever deletes
            trainer.train(resume_from_checkpoint=str(home / "checkpoint-2") if steps > 2 else None)
            dist.barrier()
            assert not (home / "exported" / f"checkpoint-{steps}").exists()
    assert trainer.state.global_step == 4
    truth = {name: one.full_tensor() for name, one in trainer.model.state_dict().items() if isinstance(one, DTensor)}
    if is_first:
        torch.save(truth, home / "truth.pt")
    dist.barrier()
    atexit._run_exitfuncs()  # as at the end of a process, but for gloo's threads, which may abort it there (torch 2.13)
    os._exit(0)


def test_of_ranks_the_first_does_it_when_none_waits_for_it(tmp_path: Path) -> None:
    home = tmp_path / "run"
    home.mkdir()
    spawn(2, _train_sharded, home)
    log = (home / "ckptkit.log").read_text()
    truth = torch.load(home / "truth.pt")
    for step in (2, 4):
        assert log.count(f"checkpoint-{step}: handled") == 1
        assert all(part.is_ok and part.has_manifest for part in verify(home / f"checkpoint-{step}"))
    made = transformers.LlamaForCausalLM.from_pretrained(home / "exported" / "checkpoint-4").state_dict()
    assert all(torch.equal(made[name], tensor) for name, tensor in truth.items())
    assert len(truth) > 20
