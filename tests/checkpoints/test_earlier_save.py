"""A manifest of an earlier save is ignored with a warning; a damaged or a foreign file is still a problem."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckptkit
from ckptkit.checkpoints.manifest import StaleManifest

State = dict[str, Tensor]
Save = Callable[[State, Path], object]


def state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    found = {f"layers.{i}.weight": torch.randn(8, 16, generator=generator) for i in range(6)}
    return {**found, "norm.weight": torch.ones(16)}


def as_trainer(tensors: State, root: Path) -> None:
    """As the Hugging Face Trainer saves: weights and optimizer in files of their own."""
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    torch.save({"state": {0: {"exp_avg": tensors["layers.0.weight"] * 2}}, "param_groups": []}, root / "optimizer.pt")


SAVES: dict[str, Save] = {
    "safetensors": lambda tensors, root: save_file(tensors, root / "model.safetensors"),
    "shards": lambda tensors, root: save_torch_state_dict(tensors, root, max_shard_size=1200),
    "torch.save": lambda tensors, root: torch.save({"model": tensors}, root / "model.pt"),
    "pytorch_model.bin": lambda tensors, root: torch.save(tensors, root / "pytorch_model.bin"),
    "trainer": as_trainer,
}


def saved(save: Save, root: Path, *, converted: bool = False) -> Path:
    """A checkpoint with a manifest: ckptkit's own, or one that `ckptkit manifest` made."""
    if converted:
        save(state(0), root.with_name("first"))
        ckptkit.consolidate(root.with_name("first"), root, names="keep")
        return root
    save(state(0), root)
    ckptkit.make_manifest(root)
    return root


def set_newer(root: Path) -> None:
    """Make all files later than the manifest, as files are that are written a second after it."""
    made = (root / "ckptkit.json").stat().st_mtime_ns
    for file in root.iterdir():
        if file.name != "ckptkit.json":
            os.utime(file, ns=(made + 10**9, made + 10**9))


def problems_of(root: Path, *, fast: bool) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleManifest)
        return [problem.message for part in ckptkit.verify(root, fast=fast) for problem in part.problems]


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_files_that_were_saved_again_are_undamaged(tmp_path: Path, save: Save) -> None:
    root = tmp_path / "model"
    root.mkdir()
    saved(save, root)
    save(state(1), root)
    set_newer(root)
    for fast in (True, False):
        with pytest.warns(StaleManifest, match="ignoring the manifest of an earlier save"):
            assert all(part.is_ok for part in ckptkit.verify(root, fast=fast))
    with pytest.warns(StaleManifest):
        ckptkit.consolidate(root, tmp_path / "out", names="keep")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["layers.3.weight"], state(1)["layers.3.weight"])


def test_the_manifest_of_an_output_is_ignored_once_the_output_was_saved_over(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    root = saved(SAVES["safetensors"], tmp_path / "model", converted=True)
    SAVES["safetensors"](state(1), root)
    set_newer(root)
    with pytest.warns(StaleManifest):
        assert ckptkit.verify(root)[0].is_ok


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(state(0)["layers.3.weight"].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)


def blank(file: Path) -> None:
    """Zeros in the place of most tensors, as a crash leaves them."""
    data = bytearray(file.read_bytes())
    for i in range(6):
        at = data.index(state(0)[f"layers.{i}.weight"].numpy().tobytes())
        data[at : at + 512] = bytes(512)
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [flip, blank, cut])
@pytest.mark.parametrize("save", ["safetensors", "torch.save", "pytorch_model.bin"])
def test_a_damaged_file_is_damaged_also_if_it_was_written_later(
    tmp_path: Path, save: str, damage: Callable[[Path], None]
) -> None:
    root = saved(SAVES[save], tmp_path)
    (file,) = (one for one in root.iterdir() if one.name != "ckptkit.json")
    damage(file)
    set_newer(root)
    assert problems_of(root, fast=False)


@pytest.mark.parametrize("others", ["older", "newer"])
def test_a_shard_of_another_save_is_a_problem(tmp_path: Path, others: str) -> None:
    root = saved(SAVES["shards"], tmp_path)
    shard = sorted(root.glob("*.safetensors"))[1]
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard)
    if others == "newer":
        set_newer(root)
    assert problems_of(root, fast=False)


def test_files_that_were_only_copied_keep_their_manifest(tmp_path: Path) -> None:
    for number, save in enumerate(SAVES.values()):
        root = tmp_path / str(number)
        root.mkdir()
        saved(save, root)
        set_newer(root)
        assert problems_of(root, fast=False) == []
        assert all(part.has_manifest for part in ckptkit.verify(root))
