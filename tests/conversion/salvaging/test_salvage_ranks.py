"""What is saved where each rank has left a file of torch.save, of real ranks, and some of these are gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit import consolidate, convert, reshard
from ckptkit.errors import CkptError
from tests.conftest import Produce
from tests.conversion.salvaging.damage import assert_truth, bits, cut, flip, load_hf
from tests.producers import Producer, Truth
from tests.tiers import slow_but
from tests.trainers import produced_ranks


def own(truth: Truth, place: str) -> Truth:
    return {name.removeprefix(f"{place}/"): value for name, value in truth.items() if name.startswith(f"{place}/")}


def copied(produce: Produce, producer: Producer, place: str, tmp_path: Path) -> tuple[Path, Truth]:
    made = produce(producer)
    return Path(shutil.copytree(made.root / place, tmp_path / "damaged")), own(made.truth, place)


@pytest.mark.parametrize("rank", slow_but([1], [0, 1, 3]))
@pytest.mark.parametrize("how", ["missing", "cut", "flipped"])
def test_replicas_stand_in_for_a_rank(rank: int, how: str, produce: Produce, tmp_path: Path) -> None:
    """Of HSDP each shard is in the files of two ranks: one of them is enough, for the optimizer too."""
    root, truth = copied(produce, produced_ranks.four_ranks, "hsdp", tmp_path)
    for file in (root / f"model_world_size_4_rank_{rank}.pt", root / f"optim_world_size_4_rank_{rank}.pt"):
        if how == "missing":
            file.unlink()
        elif how == "cut":
            cut(file, file.stat().st_size // 2)
        else:
            shard = next(value for name, value in tensors_of(file) if value.numel() > 8)
            flip(file, file.read_bytes().index(bits(shard)) + 3)
    done = convert(root, tmp_path / "out", to="dcp", salvage=True)
    assert done.salvaged is not None
    assert not [one for one in done.salvaged.lost if one.shape is not None]
    assert not done.salvaged.filled
    found = {name: lazy.torch() for name, lazy in ckptkit.open(tmp_path / "out").items()}
    assert_all(found, truth)


def tensors_of(file: Path) -> list[tuple[str, Tensor]]:
    state = torch.load(file, weights_only=False)
    flat: list[tuple[str, Tensor]] = []

    def walk(value: object, name: str) -> None:
        if isinstance(value, Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            flat.append((name, local.detach()))
        elif isinstance(value, dict):
            for key, one in value.items():
                walk(one, f"{name}.{key}")

    walk(state, "")
    return flat


def assert_all(found: Truth, truth: Truth) -> None:
    """Weights, and moments by `NAME.exp_avg`, are the live ones."""
    renamed = {}
    for name, value in found.items():
        if name.startswith("model."):
            renamed[name.removeprefix("model.")] = value
        elif name.startswith("optimizer.state."):
            renamed[name.removeprefix("optimizer.state.")] = value
    assert renamed.keys() >= truth.keys()
    assert_truth({name: renamed[name] for name in truth}, truth)


def test_without_replicas_the_rows_of_a_rank_are_lost(produce: Produce, tmp_path: Path) -> None:
    root, truth = copied(produce, produced_ranks.three_ranks, "groups", tmp_path)
    (root / "model_world_size_3_rank_1.pt").unlink()
    done = consolidate(root, tmp_path / "out", salvage=True)
    assert done.salvaged is not None
    lost = {one.name: one for one in done.salvaged.lost}
    assert lost["embed.weight"].label == "embed.weight[5:10]"
    found = load_hf(tmp_path / "out")
    model = {name: value for name, value in truth.items() if not name.endswith((".exp_avg", ".exp_avg_sq", ".step"))}
    assert found.keys() == model.keys() - lost.keys()
    assert found
    assert_truth(found, model)


def test_another_checkpoint_has_the_rows(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced_ranks.three_ranks)
    root, truth = copied(produce, produced_ranks.three_ranks, "groups", tmp_path)
    (root / "model_world_size_3_rank_0.pt").unlink()
    done = consolidate(root, tmp_path / "out", salvage=True, fill_from=made.root / "groups")
    assert done.salvaged is not None
    assert not [one for one in done.salvaged.lost if one.name]
    assert_truth(load_hf(tmp_path / "out"), truth)


def test_what_is_left_is_written_for_other_ranks(produce: Produce, tmp_path: Path) -> None:
    root, truth = copied(produce, produced_ranks.four_ranks, "hsdp", tmp_path)
    for file in root.glob("*_rank_0.pt"):
        file.unlink()
    done = reshard(root, tmp_path / "out", to=2, salvage=True)
    assert done.format == "ranks"
    found = {name: lazy.torch() for name, lazy in ckptkit.open(tmp_path / "out").items()}
    assert_all(found, truth)


def test_flat_pieces_of_an_optimizer_need_every_rank(produce: Produce, tmp_path: Path) -> None:
    """FSDP1 leaves pieces of moments that say nothing of where they belong: without one of them all are lost."""
    root, truth = copied(produce, produced_ranks.three_ranks, "orig", tmp_path)
    (root / "optim_world_size_3_rank_1.pt").unlink()
    done = convert(root, tmp_path / "out", to="dcp", salvage=True)
    assert done.salvaged is not None
    assert any("flattened" in one.why for one in done.salvaged.lost)
    found = {name: lazy.torch() for name, lazy in ckptkit.open(tmp_path / "out").items()}
    assert not any(name.startswith("optimizer.state") for name in found)
    assert_truth({n.removeprefix("model."): t for n, t in found.items() if n.startswith("model.")}, truth)


def test_no_file_at_all(produce: Produce, tmp_path: Path) -> None:
    root, _ = copied(produce, produced_ranks.three_ranks, "groups", tmp_path)
    for file in root.glob("model_*.pt"):
        cut(file, 100)
    with pytest.raises(CkptError):
        consolidate(root, tmp_path / "out", salvage=True)
