"""Files of another save of the same training, which are undamaged, between those that the manifest describes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckptkit
from ckptkit.errors import Corrupt
from ckptkit.storage import Reader, find_cause
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


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Return a checkpoint of step 2 with the data file of step 1."""
    first, second = (save(tmp_path / f"ckpt-{step}", step) for step in (1, 2))
    (name,) = (path.name for path in first.glob("*.distcp"))
    shutil.copy(first / name, second / name)
    return second


def load(root: Path) -> None:
    try:
        dcp.load({"model": {"w": torch.zeros(16, 8)}}, storage_reader=Reader(root, unasked="ignore"), no_dist=True)
    except CheckpointException as error:
        raise find_cause(error) or error from error


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda root: ckptkit.consolidate(root, root.parent / "out"), id="consolidate"),  # the model only
        pytest.param(lambda root: ckptkit.reshard(root, root.parent / "out", to=2), id="reshard"),
        pytest.param(lambda root: ckptkit.diff(root, root.with_name("ckpt-1")), id="diff"),
        pytest.param(lambda root: ckptkit.diff(root.with_name("ckpt-1"), root), id="diff the other"),
        pytest.param(ckptkit.stats, id="stats"),
        pytest.param(lambda root: ckptkit.stats(root, root.with_name("ckpt-1")), id="stats of two"),
        pytest.param(load, id="load"),
    ],
)
def test_a_file_of_another_save_is_refused(mixed: Path, read: Callable[[Path], Any]) -> None:
    with pytest.raises(Corrupt, match="found one of another save or rank") as caught:
        read(mixed)
    assert caught.value.path is not None
    assert caught.value.path.parent == mixed
    assert not mixed.with_name("out").exists()


def test_a_salvage_takes_nothing_from_a_file_of_another_save(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(Corrupt, match="found one of another save or rank"):
        ckptkit.reshard(mixed, tmp_path / "out", to=1, salvage=True)
    third = save(tmp_path / "ckpt-3", 3)
    done = ckptkit.reshard(mixed, tmp_path / "out", to=1, salvage=True, fill_from=third)
    assert done.salvaged is not None
    assert {one.name for one in done.salvaged.filled} == set(ckptkit.open(third))
    assert ckptkit.diff(tmp_path / "out", third).is_equal


def test_damage_in_what_is_not_read_keeps_no_model_from_its_output(tmp_path: Path) -> None:
    root = save(tmp_path / "ckpt-1", 1)
    item = next(one for one in ckptkit.open(root).layout.tensors["optim.state.w.exp_avg"].chunks)
    with (root / item.path).open("r+b") as file:
        file.seek(item.offset)
        file.write(bytes(64))
    ckptkit.consolidate(root, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
