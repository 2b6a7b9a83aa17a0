"""The saver of the libraries' directories: an error on one rank is raised on all, and no rank waits for another."""

from __future__ import annotations

import os
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checks.make_manifest import make_manifest
from ckptkit.checks.verify import verify
from ckptkit.conversion.convert import consolidate
from ckptkit.errors import CkptError, IOFailure
from ckptkit.integrations.background import BackgroundSaver, delete_manifests
from ckptkit.storage.ranks import Ranks
from tests import producers
from tests.conftest import Produce
from tests.producers import spawn


class NotCopyable:
    def __deepcopy__(self, _: Any) -> Any:
        raise RuntimeError("no copy")


class OwnPlanner(DefaultSavePlanner):
    pass


def _fail_together(home: Path) -> None:
    saver = BackgroundSaver()
    if dist.get_rank() == 0:  # as a rank that fails before its first save: the other does not call it
        saver.wait()
        saver.then((home / "called").touch)

    def write(folder: Path) -> None:
        if dist.get_rank() == 1:
            saver.defer(lambda *_: None, folder / "state", NotCopyable())

    with pytest.raises(CkptError, match="rank 1 failed: RuntimeError: no copy"):
        saver.save(home / "step_1", write)
    os.chdir(home if dist.get_rank() == 0 else "/")
    with pytest.raises(IOFailure, match="rank 1 does not see the files of rank 0 in this directory"):
        saver.save(Path("step_1"), write)


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    spawn(2, _fail_together, tmp_path, timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["called"]


def test_the_manifest_of_an_export_inside_stays(produce: Produce, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-3"
    shutil.copytree(produce(producers.accelerate).root, checkpoint)
    written = {part.path / MANIFEST for part in make_manifest(checkpoint)}
    (checkpoint / MANIFEST).touch()
    consolidate(checkpoint, tmp_path / "export")
    (tmp_path / "export").rename(checkpoint / "export")
    assert written
    delete_manifests(checkpoint)
    assert {*checkpoint.rglob(MANIFEST)} == {checkpoint / "export" / MANIFEST}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_with_a_planner_of_the_library_is_torchs_own(tmp_path: Path) -> None:
    saver = pickle.loads(pickle.dumps(BackgroundSaver(partial(Ranks, is_alone=True))))
    state = {"weight": torch.arange(4.0)}

    def write(folder: Path) -> None:
        dcp.save(state, checkpoint_id=folder / "deferred", planner=DefaultSavePlanner())
        dcp.save(state, checkpoint_id=folder / "own", planner=OwnPlanner())
        dcp.save(state, checkpoint_id=folder / "alone", no_dist=True)
        assert [path.name for path in sorted(folder.iterdir())] == ["alone", "own"]

    saver.save(tmp_path / "step_1", write)
    state["weight"].zero_()
    saver.wait()
    for name in ("deferred", "own", "alone"):
        loaded = {"weight": torch.empty(4)}
        dcp.load(loaded, checkpoint_id=tmp_path / "step_1" / name)
        assert loaded["weight"].tolist() == [0, 1, 2, 3]
    assert verify(tmp_path / "step_1" / "deferred")[0].has_manifest
