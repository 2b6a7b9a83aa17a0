"""Saves that go wrong on one rank of two: the older checkpoint stays, and nothing half-done is seen."""

import os
import resource
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from ckptkit.errors import CkptError, Corrupt, IOFailure, Mismatch
from ckptkit.runs import Run
from ckptkit.train.config import TrainConfig
from ckptkit.train.launch import Report, launch
from ckptkit.train.loop import make_optimizer
from ckptkit.train.model_config import ModelConfig
from ckptkit.train.ranks import Place, on_rank_0, process_group
from ckptkit.train.shard import build_model
from ckptkit.train.state import Progress, load, open_stage, save


def save_until_rank_1_dies(run: Path, place: Place, report: Report) -> None:
    config = TrainConfig(run=run)
    with process_group(place, "cpu") as mesh:
        model = build_model(config.model, seed=0, mesh=mesh)
        optimizer = make_optimizer(model, config)
        dst = Run(run).checkpoint
        save(dst(1), model, optimizer, Progress(seed=0, step=1))

        if place.rank == 1:
            limit_file_size(1000)
        with pytest.raises(IOFailure, match="rank 1 could not save it"):
            save(dst(2), model, optimizer, Progress(seed=0, step=2))
        if place.rank == 0:
            report([path.name for path in run.iterdir()])

        if place.rank == 1:
            on_rank_0(partial(open_stage, dst(2), []))
            os.kill(os.getpid(), signal.SIGKILL)
        save(dst(2), model, optimizer, Progress(seed=0, step=2))


def limit_file_size(nbytes: int) -> None:
    """Let the disk refuse, on this rank alone."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def load_alone(tmp_path: Path, path: Path, model: ModelConfig) -> tuple[Progress, dict[str, torch.Tensor]]:
    with process_group(Place(0, 1, 0, 1, (tmp_path / "meeting").as_uri()), "cpu") as mesh:
        sharded = build_model(model, seed=1, mesh=mesh)
        progress = load(path, sharded, make_optimizer(sharded, TrainConfig(run=tmp_path)))
        return progress, {name: tensor.full_tensor() for name, tensor in sharded.state_dict().items()}


def save_alone(tmp_path: Path, path: Path) -> None:
    config = TrainConfig(run=tmp_path)
    with process_group(Place(0, 1, 0, 1, (tmp_path / "meeting").as_uri()), "cpu") as mesh:
        model = build_model(config.model, seed=0, mesh=mesh)
        save(path, model, make_optimizer(model, config), Progress(seed=7, step=2, sequences=3, tokens=4))


def test_a_failed_save_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    heard: list[list[str]] = []
    with pytest.raises(CkptError, match="rank 1 was ended by SIGKILL"):
        launch(partial(save_until_rank_1_dies, run), 2, heard.append)
    assert heard[0] == ["ckpt-1"]
    assert [checkpoint.step for checkpoint in Run(run).checkpoints()] == [1]
    progress, _ = load_alone(tmp_path, run / "ckpt-1", ModelConfig())
    assert progress == Progress(seed=0, step=1)

    save_alone(tmp_path, run / "ckpt-2")  # over what the killed one left
    assert sorted(path.name for path in run.iterdir()) == ["ckpt-1", "ckpt-2"]


def test_a_checkpoint_of_another_shape_or_without_a_tensor_is_a_mismatch(tmp_path: Path) -> None:
    save_alone(tmp_path, tmp_path / "ckpt-2")
    with pytest.raises(Mismatch, match="rank 0 could not load it"):
        load_alone(tmp_path, tmp_path / "ckpt-2", ModelConfig(hidden_size=32))
    with pytest.raises(Mismatch, match="rank 0 could not load it"):
        load_alone(tmp_path, tmp_path / "ckpt-2", ModelConfig(num_hidden_layers=3))


def test_a_checkpoint_with_a_lost_or_cut_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    save_alone(tmp_path, tmp_path / "ckpt-2")
    (shard,) = (tmp_path / "ckpt-2").glob("*.distcp")
    os.truncate(shard, 1000)
    with pytest.raises((Corrupt, Mismatch)) as raised:
        load_alone(tmp_path, tmp_path / "ckpt-2", ModelConfig())
    assert raised.value.path == tmp_path / "ckpt-2"
    shard.unlink()
    with pytest.raises(IOFailure) as missing:
        load_alone(tmp_path, tmp_path / "ckpt-2", ModelConfig())
    assert missing.value.path == shard
