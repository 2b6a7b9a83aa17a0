"""What is saved of DeepSpeed's directories, by DeepSpeed itself, where files of ranks are gone."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit import consolidate, convert
from ckptkit.errors import CkptError
from tests.conftest import Produce
from tests.conversion.salvaging.damage import assert_truth, bits, cut, flip, load_hf
from tests.producers import Truth
from tests.tiers import nightly_but
from tests.trainers import produced_zero as zero

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

ROUNDED = ("zero1", "zero2", "bf16-optimizer", "zero2-fp32", "aligned")


def copied(produce: Produce, kind: str, tmp_path: Path, ranks: int = 2) -> tuple[Path, Truth]:
    made = produce(zero.on_two if ranks == 2 else zero.on_three)
    root = Path(shutil.copytree(made.root / kind, tmp_path / "damaged")) / "global_step2"
    return root, {n.removeprefix(f"{kind}/"): t for n, t in made.truth.items() if n.startswith(f"{kind}/")}


def states_of(root: Path, rank: int) -> Path:
    return next(root.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rank", "how"),
    nightly_but([("zero1", 0, "missing"), ("zero2", 1, "cut")], product(ROUNDED, (0, 1), ("missing", "cut", "empty"))),
)
def test_the_16_bit_copy_fills_the_part_of_a_rank(
    kind: str, rank: int, how: str, produce: Produce, tmp_path: Path
) -> None:
    """Weights of the lost rank come rounded from the module's copy, all others are the masters to the last bit."""
    root, truth = copied(produce, kind, tmp_path)
    file = states_of(root, rank)
    if how == "missing":
        file.unlink()
    else:
        cut(file, file.stat().st_size // 2 if how == "cut" else 0)
    done = consolidate(root, tmp_path / "out", salvage=True)
    assert done.salvaged is not None
    assert not [one for one in done.salvaged.lost if one.name]
    filled = {one.name: one.cast for one in done.salvaged.filled}
    assert filled
    weights = {n.removeprefix("model."): t for n, t in truth.items() if n.startswith("model.")}
    found = load_hf(tmp_path / "out")
    if "head.weight" not in weights:  # tied
        assert torch.equal(found.pop("head.weight"), found["embed.weight"])
    assert found.keys() == weights.keys()
    dtype = {"zero2": torch.float16, "zero2-fp32": torch.float32, "aligned": torch.float32}.get(kind, torch.bfloat16)
    for name, value in found.items():
        rounded = (
            weights[name].to(dtype).to(weights[name].dtype) if weights[name].is_floating_point() else weights[name]
        )
        if name not in filled:
            assert bits(value) == bits(weights[name]), name
        assert torch.equal(value, weights[name]) or bool(((value == weights[name]) | (value == rounded)).all()), name


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("kind", zero.ON_THREE)
def test_moments_of_a_rank_are_lost(kind: str, rank: int, produce: Produce, tmp_path: Path) -> None:
    """Just the moments of which the rank had a part: the judge is which of the others' bytes change."""
    root, truth = copied(produce, kind, tmp_path, ranks=3)
    states_of(root, rank).unlink()
    done = convert(root, tmp_path / "out", to="dcp", salvage=True)
    assert done.salvaged is not None
    lost = {one.name for one in done.salvaged.lost}
    assert any(name.endswith("exp_avg") for name in lost)
    assert lost & truth.keys() < truth.keys()
    filled = {one.name for one in done.salvaged.filled}
    found = {name: lazy.torch() for name, lazy in ckptkit.open(tmp_path / "out").items()}
    assert found.keys() >= truth.keys() - lost
    assert not (found.keys() & lost)
    assert_truth({name: value for name, value in found.items() if name in truth and name not in filled}, truth)
    if kind == "zero3":
        assert not filled


def test_a_flipped_bit_in_the_masters(produce: Produce, tmp_path: Path) -> None:
    root, truth = copied(produce, "zero1", tmp_path)
    state = torch.load(states_of(root, 0), weights_only=False)
    flat = state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    file = states_of(root, 0)
    flip(file, file.read_bytes().index(bits(flat)) + 5)
    done = consolidate(root, tmp_path / "out", salvage=True)
    assert done.salvaged is not None
    assert done.salvaged.filled
    assert not done.salvaged.lost
    found = load_hf(tmp_path / "out")
    filled = {one.name for one in done.salvaged.filled}
    assert_truth({f"model.{n}": t for n, t in found.items() if n not in filled}, truth)


def test_the_masters_fill_the_16_bit_copy(produce: Produce, tmp_path: Path) -> None:
    root, truth = copied(produce, "zero1", tmp_path)
    file = root / "mp_rank_00_model_states.pt"
    module = torch.load(file, weights_only=False)["module"]
    flip(file, file.read_bytes().index(bits(module["embed.weight"])) + 1)
    done = consolidate(root, tmp_path / "out", salvage=True, weights_from="module")
    assert done.salvaged is not None
    assert not done.salvaged.lost
    assert "embed.weight" in {one.name for one in done.salvaged.filled}
    found = load_hf(tmp_path / "out")
    assert torch.equal(found["embed.weight"], truth["model.embed.weight"].bfloat16())
    whole = consolidate(root, tmp_path / "masters", salvage=True)
    assert whole.salvaged is not None
    assert whole.salvaged.is_fully_from_source


def test_states_of_the_model_are_needed(produce: Produce, tmp_path: Path) -> None:
    root, _ = copied(produce, "zero1", tmp_path)
    (root / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CkptError):
        consolidate(root, tmp_path / "out", salvage=True)


def test_one_rank_of_several_says_what_all_have(produce: Produce, tmp_path: Path) -> None:
    """In ZeRO 3 each rank's states of the model have all names and shapes; frozen parameters are in parts in each."""
    root, truth = copied(produce, "zero3", tmp_path)
    for file in root.glob("*zero_pp_rank_1_*"):
        file.unlink()
    done = consolidate(root, tmp_path / "out", salvage=True)
    assert done.salvaged is not None
    lost = {one.name for one in done.salvaged.lost}
    found = load_hf(tmp_path / "out")
    weights = {n.removeprefix("model."): t for n, t in truth.items() if n.startswith("model.")}
    assert_truth(found, weights)
    assert found.keys().isdisjoint(lost)
    assert weights.keys() - found.keys() <= lost | {name.removeprefix("model.") for name in lost}
