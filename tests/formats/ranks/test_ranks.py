"""Directories of per-rank files, as torch and Accelerate write them, held against the live state bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.formats import locate_all_chunks
from ckptkit.formats.ranks.optimizer import Parameter, match_fsdp_units
from ckptkit.layout import Layout
from ckptkit.layout.wrappers import without_prefixes_except_ddp
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
    (produced.named_ranks, "fsdp2", "fsdp2"),
    (produced.named_ranks, "orig", "orig"),
    (produced.named_ranks, "units", "units"),
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
    located = locate_all_chunks(layout)
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


@pytest.mark.parametrize(("place", "source"), [("fsdp1", "fsdp1/checkpoint-7"), ("fsdp2", "fsdp2/checkpoint-7")])
def test_files_that_are_called_by_the_rank_alone_are_joined_by_their_shards(
    produce: Produce, tmp_path: Path, place: str, source: str
) -> None:
    made = produce(produced.by_accelerate)
    for rank, file in enumerate(sorted((made.root / source).glob("pytorch_model_fsdp*_rank*.bin"))):
        shutil.copy(file, tmp_path / f"rank{rank}.pt")
    layout = locate_all_chunks(Checkpoint.open(tmp_path).layout)
    assert layout.format == "ranks"
    truth = {name.removeprefix("model."): t for name, t in of(place, made.truth).items() if name.startswith("model.")}
    assert layout.tensors.keys() == truth.keys()
    assert all(contents(layout, name) == raw_bytes(tensor) for name, tensor in truth.items())


def test_says_who_wrote_it_and_when(produce: Produce) -> None:
    run = produce(produced.two_ranks).root / "fsdp2"
    checkpoint = Checkpoint.open(run)
    assert (checkpoint.trainer, checkpoint.step, checkpoint.world_size) == ("verl", 2, 2)
    assert checkpoint.path == run / "global_step_2"
    assert checkpoint.companions.config == {"model_type": "tiny", "vocab_size": 13}


@pytest.mark.parametrize("place", ["fsdp2", "orig", "units"])
def test_recorded_names_follow_their_numbers(produce: Produce, tmp_path: Path, place: str) -> None:
    """In files for other ranks, where the optimizer has numbers again, and then in DCP."""
    made = produce(produced.named_ranks)
    ckptkit.reshard(made.root / place, tmp_path / "three", to=3)
    file = torch.load(tmp_path / "three" / "optim_world_size_3_rank_0.pt", weights_only=False)
    group = file["param_groups"][0]
    assert group["params"] == list(range(len(group["param_names"])))
    for number, name in enumerate(group["param_names"]):
        moment = file["state"][number]["exp_avg"]
        assert moment.shape == made.truth[f"{place}/{without_prefixes_except_ddp(name)}.exp_avg"].shape
    assert_is(Checkpoint.open(tmp_path / "three").layout, of(place, made.truth))


def test_units_that_are_the_same_by_two_ways_are_certain() -> None:
    """The only layer of a list is all there is: whether it was wrapped or the root, it is one flat parameter."""
    parameters = [Parameter("layers.0.weight", (2, 3)), Parameter("layers.0.bias", (2,))]
    units = match_fsdp_units([[0]], parameters, {0: 8}, 2, {})
    assert units == [[(parameters[0], 0), (parameters[1], 6)]]
