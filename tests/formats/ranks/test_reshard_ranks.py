"""Files of ranks written for other numbers of ranks: loaded by those, by torch alone, and trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed import _mesh_layout

import ckptkit
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError, Unsupported
from tests.conftest import Produce
from tests.formats.ranks.test_ranks import assert_is, of
from tests.producers import Producer, save_alone
from tests.trainers import produced_ranks as produced

JOURNEYS = [
    (produced.two_ranks, "fsdp2", "fsdp2/global_step_2/actor", 3, "fsdp"),
    (produced.two_ranks, "units", "units", 3, "fsdp"),
    (produced.four_ranks, "hsdp", "hsdp", 2, "hsdp"),
    (produced.by_accelerate, "fsdp2", "fsdp2/checkpoint-7", 3, "fsdp"),
]


@pytest.mark.parametrize(("producer", "place", "path", "ranks", "like"), JOURNEYS)
def test_ranks_resume_from_what_was_resharded(
    produce: Produce, tmp_path: Path, producer: Producer, place: str, path: str, ranks: int, like: str
) -> None:
    if place == "units" and not hasattr(_mesh_layout, "_FlatLayout"):
        pytest.skip("what was ShardedTensors is written as torch 2.13 does, and this torch is older")
    made = produce(producer)
    out = tmp_path / "out"
    ckptkit.reshard(made.root / path, out, to=ranks)
    found = produced.resumed(ranks, out, like)
    losses = found.pop("losses")
    live = {
        name.removeprefix(f"{place}/"): tensor for name, tensor in made.truth.items() if name.startswith(f"{place}/")
    }
    assert {name.removeprefix("resumed/") for name in found} == live.keys()
    for name, tensor in live.items():
        assert torch.equal(found[f"resumed/{name}"], tensor), name
    torch.testing.assert_close(losses, produce(produced.uninterrupted).truth["losses"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("producer", "place", "path", "ranks"),
    [
        (produced.two_ranks, "fsdp2", "fsdp2/global_step_2/actor", 1),
        (produced.two_ranks, "hsdp", "hsdp/global_step_2/actor", 5),
        (produced.two_ranks, "orig", "orig", 3),
        (produced.three_ranks, "groups", "groups", 16),
        (produced.four_ranks, "tp", "tp", 6),
        (produced.one_rank, "alone", "alone", 3),
    ],
)
def test_what_was_resharded_is_the_same_checkpoint(
    produce: Produce, tmp_path: Path, producer: Producer, place: str, path: str, ranks: int
) -> None:
    made = produce(producer)
    out = tmp_path / "out"
    ckptkit.reshard(made.root / path, out, to=ranks)
    layout = open_layout(out)
    assert layout.world_size == ranks
    assert_is(layout, of(place, made.truth))
    assert json.loads((out / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": ranks}
    assert (out / "huggingface" / "config.json").exists()
    assert not [found.problems for found in ckptkit.verify(out) if found.problems]
    back = tmp_path / "back"
    ckptkit.reshard(out, back, to=open_layout(made.root / path).world_size or 1)
    assert_is(open_layout(back), of(place, made.truth))


def test_the_state_of_each_rank_goes_along_to_as_many(produce: Produce, tmp_path: Path) -> None:
    source = produce(produced.two_ranks).root / "fsdp2" / "global_step_2" / "actor"
    ckptkit.reshard(source, tmp_path / "same", to=2)
    for rank in range(2):
        name = f"extra_state_world_size_2_rank_{rank}.pt"
        ours, theirs = (torch.load(root / name, weights_only=False) for root in (tmp_path / "same", source))
        assert ours["lr_scheduler"] == theirs["lr_scheduler"]
        assert ours["rng"]["random"] == theirs["rng"]["random"] == rank
        assert torch.equal(ours["rng"]["cpu"], theirs["rng"]["cpu"])


def test_an_axis_of_tensor_parallelism_stays(produce: Produce, tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="expected a multiple"):
        ckptkit.reshard(produce(produced.four_ranks).root / "tp", tmp_path / "out", to=3)
    assert not (tmp_path / "out").exists()


def test_both_models_of_a_step_are_resharded(produce: Produce, tmp_path: Path) -> None:
    run = produce(produced.two_ranks).root / "fsdp2"
    ckptkit.reshard(run, tmp_path / "out", to=3)
    assert (tmp_path / "out" / "actor" / "model_world_size_3_rank_2.pt").exists()


def test_goes_through_dcp_and_back(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced.two_ranks)
    source = made.root / "fsdp2" / "global_step_2" / "actor"
    ckptkit.convert(source, tmp_path / "dcp", to="dcp", world_size=2)
    ckptkit.convert(tmp_path / "dcp", tmp_path / "ranks", to="ranks", world_size=3)
    assert_is(open_layout(tmp_path / "ranks"), of("fsdp2", made.truth))


def test_says_that_fsdp1_becomes_fsdp2(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced.three_ranks).root
    done = ckptkit.reshard(made / "orig", tmp_path / "one", to=2)
    assert any("loads these files" in note for note in done.notes)
    done = ckptkit.reshard(produce(produced.two_ranks).root / "fsdp2", tmp_path / "two", to=3)
    assert not any("loads these files" in note for note in done.notes)


def test_flat_names_become_those_of_the_numbers(produce: Produce, tmp_path: Path) -> None:
    """DCP has FSDP1's parameters by name, and what the optimizer recorded are its flat ones: fewer, of other names."""
    made = produce(produced.named_ranks)
    ckptkit.convert(made.root / "dcp", tmp_path / "ranks", to="ranks")
    file = torch.load(tmp_path / "ranks" / "optim_world_size_2_rank_0.pt", weights_only=False)
    (group,) = file["param_groups"]
    assert len(group["param_names"]) == len(group["params"]) == len(file["state"])
    assert_is(open_layout(tmp_path / "ranks"), of("units", made.truth))


@pytest.mark.parametrize("dry_run", [True, False])
def test_an_optimizer_that_indices_cannot_name_is_refused(tmp_path: Path, dry_run: bool) -> None:
    """With a frozen parameter, as in a checkpoint of ZeRO 3."""
    weights = {name: torch.ones(4, 2) for name in ("a", "b", "frozen")}
    states = {name: {"exp_avg": torch.ones(4, 2)} for name in ("a", "b")}
    optimizer = {"state": states, "param_groups": [{"params": ["a", "b"], "lr": 0.1}]}
    save_alone({"model": weights, "optimizer": optimizer}, tmp_path / "alone")
    ckptkit.convert(tmp_path / "alone", tmp_path / "dcp", to="dcp", world_size=2)
    with pytest.raises(
        Unsupported, match="expected 3 parameters in the optimizer, one for each sharded tensor of the model, found 2"
    ) as refused:
        ckptkit.convert(tmp_path / "dcp", tmp_path / "ranks", to="ranks", dry_run=dry_run)
    assert "--to dcp" in (refused.value.hint or "")
