"""What only a GPU can show: the whole road on CUDA, in bf16, with its options."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.training.config import TrainConfig
from ckptkit.training.launch import launch
from ckptkit.training.loop import train
from ckptkit.training.metrics import StepMetrics
from ckptkit.training.smoke.smoke import smoke

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


def losses(config: TrainConfig) -> list[float]:
    heard: list[Any] = []
    launch(partial(train, config), torch.cuda.device_count(), heard.append)
    steps = [step for step in heard if isinstance(step, StepMetrics)]
    assert all(step.memory_allocated and step.memory_reserved for step in steps)
    assert all(step.mfu is None or math.isfinite(step.mfu) for step in steps)
    return [step.loss for step in steps]
