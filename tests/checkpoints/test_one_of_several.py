"""A file that is one of several is joined with the others or refused, and is never exported as the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.errors import CkptError
from ckptkit.io.sets import find_set

WEIGHT = torch.arange(32.0).reshape(8, 4)
SETS = {
    "sdp": ("sdp_00.pt", "sdp_01.pt"),
    "fairseq2": ("model/pp_00/tp_00/sdp_00.pt", "model/pp_00/tp_00/sdp_01.pt"),
    "tensor-parallel": ("model/pp_00/tp_00/sdp_00.pt", "model/pp_00/tp_01/sdp_00.pt"),
    "xla": ("rank-00000000-of-00000002-model.pth", "rank-00000001-of-00000002-model.pth"),
    "xla-trainer": ("rank0-of-2-pytorch_model.bin", "rank1-of-2-pytorch_model.bin"),
    "neuron": ("dp_rank_00_tp_rank_00_pp_rank_00.pt", "dp_rank_00_tp_rank_01_pp_rank_00.pt"),
    "folders": ("tp_rank_00/checkpoint.pt", "tp_rank_01/checkpoint.pt"),
    "parts": ("checkpoint_part0.pth", "checkpoint_part1.pth"),
    "bare": ("rank0.pt", "rank1.pt"),
}


def save(path: Path, state: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
@pytest.mark.parametrize("which", [0, 1])
def test_files_of_ranks_are_refused_by_name_together_and_alone(
    tmp_path: Path, names: tuple[str, str], which: int
) -> None:
    root = tmp_path / "src"
    for name in names:
        save(root / name, {"model": {"w": WEIGHT + len(name)}})
    last = {part for name in names for part in Path(name).parts}
    for source in (root, root / names[which]):
        with pytest.raises(CkptError) as refused:
            ckptkit.consolidate(source, tmp_path / "out", names="keep")
        assert any(part in refused.value.message for part in last)
        assert "pass the file that you want" not in str(refused.value)
    assert not (tmp_path / "out").exists()
    assert ckptkit.inspect(root / names[which]).remarks


@pytest.mark.parametrize("name", ["sdp_01.pt", "rank1.pt", "model-00001-of-00003.safetensors", "mp_rank_01.pt"])
def test_a_lone_file_that_its_name_calls_one_of_several_is_refused(tmp_path: Path, name: str) -> None:
    state = {"w": WEIGHT}
    save_file(state, tmp_path / name) if name.endswith("s") else torch.save(state, tmp_path / name)
    for convert in (ckptkit.consolidate, lambda src, out: ckptkit.convert(src, out, to="pt")):
        with pytest.raises(CkptError, match="this is one of several: "):
            convert(tmp_path / name, tmp_path / "out")


@pytest.mark.parametrize(
    "more",
    [
        {"shard_metadata": {"world_size": 2, "rank": 0, "shard_info": {}}},
        {"shard_metadata": {"shard_info": {}, "rank": 0}},
        {"mp_world_size": 2, "dp_world_size": 1},
    ],
)
def test_a_file_whose_content_calls_it_one_of_several_is_refused(tmp_path: Path, more: dict[str, object]) -> None:
    torch.save({"model": {"w": WEIGHT}, **more}, tmp_path / "model.pt")
    with pytest.raises(CkptError, match=r"this is the file of one of (2|several) ranks; each has a part of the model"):
        ckptkit.consolidate(tmp_path / "model.pt", tmp_path / "out", names="keep")


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("ep0-ba5-rank0.pt", []),
        ("sdp_00.pt", []),
        ("rank0.pt", ["notes.txt"]),
        ("lora_rank8.pt", ["lora_rank16.pt"]),
        ("ep1.pt", ["ep0.pt"]),
        ("model_tp2.pt", ["model_tp4.pt"]),
        ("model-00001-of-00001.safetensors", []),
        ("epoch_0_step_100.pt", ["epoch_1_step_100.pt"]),
        ("shape.pt", ["shape0.pt"]),
    ],
)
def test_other_names_stand_alone(name: str, beside: list[str]) -> None:
    assert find_set(name, [name, *beside]) == []


def test_a_file_that_is_one_of_one_is_the_model(tmp_path: Path) -> None:
    torch.save({"model": {"w": WEIGHT}, "shard_metadata": {"world_size": 1}}, tmp_path / "rank0-of-1-model.pt")
    ckptkit.consolidate(tmp_path / "rank0-of-1-model.pt", tmp_path / "out", names="keep")
    assert torch.equal(ckptkit.open(tmp_path / "out")["w"].torch(), WEIGHT)
