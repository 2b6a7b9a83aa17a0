"""What only a GPU can show: the whole road on CUDA, in bf16, with its options."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from ckptkit.training.config import TrainConfig
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from ckptkit.training.loop import train_rank
from ckptkit.training.metrics import StepMetrics
from ckptkit.training.saving.save import ADAPTER, FORMATS, copy_to_cpu
from ckptkit.training.smoke.smoke import smoke
from ckptkit.training.start import build_trainer_and_run
from ckptkit.training.trainer import Trainer
from tests.training.saving.networks import Tensors, differing, whole
from tests.training.saving.test_background import hold_back

pytestmark = pytest.mark.gpu

WAYS: list[dict[str, Any]] = [
    {},
    {"cpu_offload": True},
    {"compile": True},
    {"recompute_every": 1, "micro_batch_size": 2},
    {"strategy": "shard_grad_op", "reduce_dtype": "bf16"},
    {"fsdp": "1"},
    {"fsdp": "1", "cpu_offload": True},
    {"background": True, "state_dict": "full"},
]


def test_smoke_passes_on_all_gpus(tmp_path: Path) -> None:
    checks = smoke(tmp_path / "run", tmp_path / "out", nproc=torch.cuda.device_count(), device="cuda")
    assert [check for check in checks if check.ok is False] == []


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_every_option_trains_in_bf16_to_about_the_same_losses(tmp_path: Path, ways: dict[str, Any]) -> None:
    config = TrainConfig(run=tmp_path / "run", steps=4, device="cuda", sequence_length=64)
    expected = losses(replace(config, run=tmp_path / "fp32", param_dtype="fp32"))
    assert losses(replace(config, **ways)) == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("fsdp", ["1", "2"])
def test_a_background_save_of_each_kind_has_the_state_of_its_moment(tmp_path: Path, fsdp: str) -> None:
    ranks = torch.cuda.device_count()
    # FSDP1 refuses adapters on one rank.
    kinds = [kind for kind in FORMATS if kind != ADAPTER or fsdp == "2" or ranks > 1]
    heard: list[tuple[str, list[str]]] = []
    launch(partial(save_behind, tmp_path, fsdp, kinds, "cuda"), ranks, heard.append)
    assert sorted(heard) == sorted([(kind, []) for kind in kinds] * 2 * ranks)


def save_behind(root: Path, fsdp: Any, kinds: list[Any], device: Any, place: RankPlace, report: Report) -> None:
    """Save in the background, change everything before a byte is written, load, and report the tensors that differ."""
    with process_group(place, device) as mesh:
        base = TrainConfig(run=root / "base", steps=9, device=device, sequence_length=64, fsdp=fsdp)
        trainer, run = build_trainer_and_run(base, mesh)
        trainer.step()
        weights = trainer.save(run)
        for kind in kinds:
            lora: dict[str, Any] = {"lora_rank": 2, "weights": weights} if kind == ADAPTER else {}
            config = replace(base, run=root / kind, state_dict=kind, background=True, **lora)
            trainer, run = build_trainer_and_run(config, mesh)
            with run:
                for _ in range(2):  # the second copy finds the pinned memory of the first
                    trainer.step()
                    expected = whole_tensors(trainer)
                    gate = hold_back(run)
                    saved = trainer.save(run)
                    trainer.step()
                    changed = differing(whole_tensors(trainer), expected)
                    gate.set()
                    run.wait()
                    trainer.load(run, saved)
                    wrong = differing(whole_tensors(trainer), expected)
                    report((kind, wrong if changed else ["nothing changed"]))


def whole_tensors(trainer: Trainer) -> Tensors:
    """Every tensor of model and optimizer, whole and on the CPU."""
    found: Any = get_model_state_dict(trainer.model)
    state: Any = get_optimizer_state_dict(trainer.model, trainer.optimizer)["state"]
    found |= {f"{key} of {name}": value for name, entry in state.items() for key, value in entry.items()}
    return {name: whole(tensor).cpu() for name, tensor in found.items()}


def test_a_copy_is_pinned_and_the_next_one_pins_no_more() -> None:
    state = {"model": {"weight": torch.rand(1000, 1000, device="cuda"), "step": torch.tensor(3.0, device="cuda")}}
    copies = copy_to_cpu(state)
    for name, tensor in state["model"].items():
        assert torch.equal(copies["model"][name], tensor.cpu())
        assert copies["model"][name].is_pinned()
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    del copies
    torch.cuda.synchronize()  # torch uses memory again when the copies into it have ended
    copy_to_cpu(state)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned


def losses(config: TrainConfig) -> list[float]:
    heard: list[Any] = []
    launch(partial(train_rank, config), torch.cuda.device_count(), heard.append)
    steps = [step for step in heard if isinstance(step, StepMetrics)]
    assert all(step.memory_allocated and step.memory_reserved for step in steps)
    assert all(step.mfu is None or math.isfinite(step.mfu) for step in steps)
    return [step.loss for step in steps]
