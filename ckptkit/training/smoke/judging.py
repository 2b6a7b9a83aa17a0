"""Compare what a smoke run made, as its checks need it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ckptkit.training.metrics import StepMetrics
from ckptkit.training.smoke.rank_tasks import RankAccount
from ckptkit.training.smoke.runs import Failed, read_tensors


class Skipped(Exception):
    """The reason why a check cannot be made on this machine."""


def compare_checkpoints(one: Path, other: Path, under: str = "") -> str:
    """Compare all tensors of two checkpoints, or of the first those `under` a key, read by torch."""
    expected = {name: tensor for name, tensor in read_tensors(one).items() if name.startswith(under)}
    count = compare_tensors(expected, read_tensors(other))
    return f"{count} tensors of {under or 'model and optimizer'} equal, bit for bit"


def compare_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> int:
    """Compare tensors by name, and return how many they are."""
    if found.keys() != expected.keys():
        raise Failed(f"names that only one side has: {sorted(found.keys() ^ expected.keys())}")
    wrong = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    if wrong:
        raise Failed(f"{len(wrong)} of {len(expected)} tensors differ, first `{wrong[0]}`")
    return len(expected)


def of_rank_0(accounts: list[RankAccount]) -> list[StepMetrics]:
    """Return the steps as rank 0 saw them."""
    return [step for account in accounts[:1] for step in account.steps]
