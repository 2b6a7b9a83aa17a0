"""dcp.load through us of what trainers and other libraries wrote, against what `ckptkit.open` finds there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import ckptkit
from ckptkit.storage import Reader
from tests.conftest import Produce
from tests.producers import Producer
from tests.storage.states import assert_same_bits, blank
from tests.tiers import nightly_but
from tests.trainers import produced_experts as experts
from tests.trainers import produced_megatron as megatron
from tests.trainers import produced_meta as meta
from tests.trainers import produced_packages as packages
from tests.trainers import produced_ranks as ranks
from tests.trainers import produced_zero as zero

# by format: the library that makes it, the producer, and where in what that makes
CASES: list[tuple[str, str, Producer, str]] = [
    ("megatron", "megatron.core", megatron.megatron, f"{next(iter(megatron.VARIANTS))}/legacy"),
    ("consolidated", "fairscale", meta.llama, "llama3"),
    ("deepspeed", "deepspeed", zero.on_two, "zero1"),
    ("deepspeed", "deepspeed", zero.on_two, "zero3"),
    ("deepspeed", "deepspeed", zero.on_two, "zero0"),
    ("deepspeed", "deepspeed", zero.pipelines, "tied"),
    ("deepspeed", "deepspeed", experts.experts, "zero1"),
    ("deepspeed", "deepspeed", experts.experts, "zero0"),
    ("universal", "deepspeed", zero.universal, "zero3/global_step2_universal"),
    ("ranks", "torch", ranks.two_ranks, "fsdp2/global_step_2/actor"),
    ("ranks", "torch", ranks.four_ranks, "tp"),
    ("ranks", "torch", ranks.three_ranks, "orig"),
    ("ranks", "accelerate", ranks.by_accelerate, "fsdp1/checkpoint-7"),
    ("ranks", "torch", ranks.flat_parameters, "units"),
    ("torch_checkpointing", "torch_checkpointing", packages.by_torch_checkpointing, "torch"),
    ("torch_checkpointing", "torch_checkpointing", packages.by_torch_checkpointing, "safetensors"),
]
OF_EACH = {case[0]: case for case in reversed(CASES)}.values()  # the first of each format

pytestmark = pytest.mark.usefixtures("alone")


def check(path: Path) -> None:
    """Load all tensors by their flat names, and then all entries at all, as torch nests them."""
    opened = {name: lazy.torch() for name, lazy in ckptkit.open(path).items()}
    found = blank(opened)
    dcp.load(found, storage_reader=Reader(path))
    assert opened
    assert_same_bits(found, opened)
    made = _load_state_dict_from_keys(storage_reader=Reader(path))
    assert_same_bits(dict(leaves(made, "")), opened)


def leaves(tree: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested state by their names."""
    if isinstance(tree, Tensor):
        yield name, tree
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, branch in pairs:
        yield from leaves(branch, f"{name}.{key}" if name else str(key))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "library", "producer", "place"),
    nightly_but(OF_EACH, CASES),
    ids=[f"{name}-{place}" for name, *_, place in CASES],
)
def test_dcp_load(name: str, library: str, producer: Producer, place: str, produce: Produce) -> None:
    pytest.importorskip(library)
    path = produce(producer).root / place
    assert ckptkit.open(path).format == name
    check(path)
