"""Directories of per-rank files, as torch and Accelerate write them, held against the live state bit for bit."""

from __future__ import annotations

import pytest

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.formats import locate
from ckptkit.layout import Layout
from tests.conftest import Produce
from tests.formats.contract import raw_bytes
from tests.producers import Producer, Truth
from tests.raw import contents
from tests.trainers import produced_ranks as produced

pytest.importorskip("accelerate", reason="accelerate is not installed")

KINDS = [
    (produced.two_ranks, "fsdp2", "fsdp2/global_step_2/actor"),
    (produced.two_ranks, "hsdp", "hsdp/global_step_2/actor"),
    (produced.two_ranks, "orig", "orig"),
    (produced.two_ranks, "mesh", "mesh"),
    (produced.two_ranks, "units", "units"),
    (produced.three_ranks, "groups", "groups"),
    (produced.three_ranks, "orig", "orig"),
    (produced.four_ranks, "hsdp", "hsdp"),
    (produced.four_ranks, "tp", "tp"),
    (produced.one_rank, "alone", "alone"),
    (produced.by_accelerate, "fsdp2", "fsdp2/checkpoint-7"),
    (produced.by_accelerate, "fsdp1", "fsdp1/checkpoint-7"),
]
each_kind = pytest.mark.parametrize(
    ("producer", "place", "path"), KINDS, ids=lambda kind: getattr(kind, "__name__", kind)
)


def of(place: str, truth: Truth) -> Truth:
    """What a checkpoint should hold, by the names that it has in the layout."""
    found: Truth = {}
    for name, tensor in truth.items():
        if not name.startswith(f"{place}/"):
            continue
        own = name.removeprefix(f"{place}/")
        parameter, _, what = own.rpartition(".")
        is_moment = what in ("step", "exp_avg", "exp_avg_sq")
        found[f"optimizer.state.{parameter}.{what}" if is_moment else f"model.{own}"] = tensor
    return found


def assert_is(layout: Layout, truth: Truth) -> None:
    """Model and optimizer are the truth, and nothing else is there."""
    located = locate(layout)
    assert {name for name in layout.tensors if name.startswith(("model.", "optimizer."))} == truth.keys()
    for name, tensor in truth.items():
        assert located.tensors[name].spec.shape == tuple(tensor.shape), name
        assert contents(located, name) == raw_bytes(tensor), name


@each_kind
def test_holds_the_live_state(produce: Produce, producer: Producer, place: str, path: str) -> None:
    made = produce(producer)
    checkpoint = Checkpoint.open(made.root / path)
    assert checkpoint.layout.format == "ranks"
    assert not checkpoint.problems()
    assert_is(checkpoint.layout, of(place, made.truth))


def test_says_who_wrote_it_and_when(produce: Produce) -> None:
    run = produce(produced.two_ranks).root / "fsdp2"
    checkpoint = Checkpoint.open(run)
    assert (checkpoint.trainer, checkpoint.step, checkpoint.world_size) == ("verl", 2, 2)
    assert checkpoint.path == run / "global_step_2"
    assert checkpoint.companions.config == {"model_type": "tiny", "vocab_size": 13}
