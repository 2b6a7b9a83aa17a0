"""Files of another save of the same training, which are undamaged, between those that the manifest describes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.errors import Corrupt
from tests.producers import save_alone


def save(root: Path, value: float) -> Path:
    """Save a model beside the state of its optimizer in one file, as one rank does, with a manifest."""
    state = {
        "model": {"w": torch.full((16, 8), value), "b": torch.full((16,), value)},
        "optim": {"state": {name: {"exp_avg": torch.full((64, 64), value)} for name in "wb"}},
    }
    save_alone(state, root)
    ckptkit.make_manifest(root)
    return root


def test_a_file_of_another_save_is_refused_though_only_the_model_is_read(tmp_path: Path) -> None:
    first, second = (save(tmp_path / f"ckpt-{step}", step) for step in (1, 2))
    (name,) = (path.name for path in first.glob("*.distcp"))
    shutil.copy(first / name, second / name)
    with pytest.raises(Corrupt, match="found one of another save or rank") as caught:
        ckptkit.consolidate(second, tmp_path / "out")
    assert caught.value.path == second / name
    with pytest.raises(Corrupt, match="found one of another save or rank"):
        ckptkit.reshard(second, tmp_path / "out", to=2)
    assert not (tmp_path / "out").exists()


def test_damage_in_what_is_not_read_keeps_no_model_from_its_output(tmp_path: Path) -> None:
    root = save(tmp_path / "ckpt-1", 1)
    item = next(one for one in ckptkit.open(root).layout.tensors["optim.state.w.exp_avg"].chunks)
    with (root / item.path).open("r+b") as file:
        file.seek(item.offset)
        file.write(bytes(64))
    ckptkit.consolidate(root, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
