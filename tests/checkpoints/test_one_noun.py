"""The one question which checkpoint a path means, asked of every command and every call: all give the same answer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptkit
from ckptkit import storage
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import CkptError, IOFailure, Unsupported
from tests.command import ckptkit as cli
from tests.producers import Oddments, save_alone, spawn

# -- which one is meant ------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of which the names of directories have steps in two ways, `w` the step in each."""
    for name, step in (("iter_0000400", 400.0), ("500", 500.0)):
        save_alone({"model": {"w": torch.full((4,), step)}}, tmp_path / "run" / name)
    return tmp_path / "run"


def test_all_take_the_highest_step(run: Path, tmp_path: Path) -> None:
    latest = run / "500"
    assert ckptkit.ls(run).latest == latest
    assert ckptkit.inspect(run).whole == latest
    assert ckptkit.open(run).path == latest
    assert ckptkit.open_layout(run).root == latest
    assert ckptkit.consolidate(run, tmp_path / "out").source == latest
    found = RunFolder(run).latest()
    assert found is not None
    assert (found.path, found.step) == (latest, 500)
    assert Checkpoint.open(run).step == ckptkit.inspect(latest).step == 500


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("named", [str, Path])
def test_the_storage_reader_takes_a_run(run: Path, named: Callable[[Path], str | Path]) -> None:
    state = {"model": {"w": torch.zeros(4)}}
    dcp.load(state, storage_reader=storage.Reader(named(run)), no_dist=True)
    assert state["model"]["w"].tolist() == [500.0] * 4


class Named(os.PathLike[str]):
    """A path of somebody else's class."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def refused(source: Any) -> str:
    """What `push` says of a checkpoint that it took, where nobody is logged in."""
    with pytest.raises(IOFailure, match="there is no token") as raised:
        ckptkit.push(source, "org/model")
    return raised.value.message


WAYS: dict[str, Callable[[Path], Any]] = {
    "str": str,
    "Path": Path,
    "PathLike": Named,
    "URL": lambda path: path.absolute().as_uri(),
    "Checkpoint": Checkpoint.open,
}
CALLS: dict[str, Callable[[Any, Path], object]] = {
    "inspect": lambda source, _: ckptkit.inspect(source),
    "open": lambda source, _: ckptkit.open(source),
    "open_layout": lambda source, _: ckptkit.open_layout(source),
    "verify": lambda source, _: ckptkit.verify(source, against=source, stats=True),
    "stats": lambda source, _: ckptkit.stats(source),
    "stats of two": lambda source, _: ckptkit.stats(source, source),
    "diff": lambda source, _: ckptkit.diff(source, source),
    "ls": lambda source, _: ckptkit.ls(source),
    "make_manifest": lambda source, _: ckptkit.make_manifest(source, overwrite=True),
    "pin": lambda source, _: [ckptkit.pin(source), ckptkit.unpin(source)],
    "report": lambda source, out: ckptkit.report(source, out / "page.html"),
    "consolidate": lambda source, out: ckptkit.consolidate(source, out / "model"),
    "convert": lambda source, out: ckptkit.convert(source, out / "file.pt", to="pt"),
    "reshard": lambda source, out: ckptkit.reshard(source, out / "resharded", to=2),
    "cp": lambda source, out: ckptkit.cp(source, out / "copy"),
    "delta": lambda source, out: ckptkit.delta(source, source, out / "delta", force=True),
    "average": lambda source, out: ckptkit.average([source, source], out / "mean"),
    "push": lambda source, _: refused(source),
    "doctor": lambda source, _: ckptkit.doctor(source),
    "explain": lambda source, _: ckptkit.explain("Missing key in checkpoint state_dict: w", source),
}
# tests/adapters/test_merge.py names those of `merge` in several ways, tests/plugins/deltas those of `apply`
SOURCELESS = {
    "apply",
    "apply_in_place",
    "inspect_delta",
    "verify_delta",
    "estimate",
    "finalize",
    "merge",
    "prove",
    "pull",
    "prune",
    "prune_uploads",
    "smoke",
    "train",
    "unpin",
    "watch",
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_may_be_named_in_any_way(
    call: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    save_alone({"model": {"w": torch.arange(6.0)}}, tmp_path / "run" / "ckpt-1")
    (tmp_path / "out").mkdir()
    assert CALLS[call](WAYS[way](tmp_path / "run" / "ckpt-1"), tmp_path / "out") is not None


def test_every_public_function_is_among_them() -> None:
    public = {name for name in ckptkit.__all__ if name[0].islower()}
    assert public <= {call.split()[0] for call in CALLS} | SOURCELESS


# -- a folder of unrelated checkpoints ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_unrelated_checkpoints_are_listed_each(tmp_path: Path) -> None:
    save_alone({"model": {"w": torch.ones(4)}}, tmp_path / "folder" / "b")
    (tmp_path / "folder" / "a").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "folder" / "a" / "model.safetensors")
    (tmp_path / "folder" / "notes").mkdir()
    listed = ckptkit.ls(tmp_path / "folder")
    assert [(one.path.name, one.format, one.is_complete) for one in listed.checkpoints] == [
        ("a", "hf", True),
        ("b", "dcp", True),
    ]
    assert listed.latest is None
    with pytest.raises(Unsupported, match="several checkpoints are in this directory: a, b") as raised:
        ckptkit.inspect(tmp_path / "folder")
    assert raised.value.hint == "pass one of them"
    done = cli("inspect", tmp_path / "folder")
    assert (done.returncode, "a, b" in done.stderr) == (3, True)


# -- what trainers leave -----------------------------------------------------------------------------------------------


def _save_by_rank(root: Path) -> None:
    model = Oddments()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    rank = torch.distributed.get_rank()
    torch.save(get_model_state_dict(model), root / f"model_world_size_2_rank_{rank}.pt")
    torch.save({"rng": torch.get_rng_state()}, root / f"extra_state_world_size_2_rank_{rank}.pt")


def save_verl(run: Path) -> Path:
    """FSDP2's own shards by torch.save on two ranks, under verl's names, with its tracker and its loader's state."""
    actor = run / "global_step_4" / "actor"
    actor.mkdir(parents=True)
    spawn(2, _save_by_rank, actor)
    torch.save({"epoch": 1}, actor.parent / "data.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("4")
    return actor.parent


def save_deepspeed(run: Path) -> Path:
    """What ZeRO leaves, by name; nothing of use is in the files."""
    root = run / "global_step500"
    root.mkdir(parents=True)
    for rank in range(2):
        torch.save({"optimizer_state_dict": {}}, root / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    torch.save({"module": {"w": torch.ones(2)}}, root / "mp_rank_00_model_states.pt")
    (run / "latest").write_text("global_step500")
    return root


def save_accelerate(run: Path) -> Path:
    """A file for each rank beside what a Trainer leaves."""
    root = run / "checkpoint-7"
    root.mkdir(parents=True)
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, root / f"pytorch_model_fsdp_rank{rank}.bin")
    (root / "trainer_state.json").write_text(json.dumps({"log_history": [], "global_step": 7}))
    return root


BY_RANK = {
    "verl": save_verl,
    "Accelerate, by transformers' Trainer": save_accelerate,
}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", BY_RANK)
def test_files_of_ranks_are_complete_with_those_of_all_ranks(trainer: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    root = BY_RANK[trainer](run)
    (listed,) = ckptkit.ls(run).checkpoints
    assert (listed.path, listed.is_complete, listed.trainer, listed.world_size) == (root, True, trainer, 2)
    assert ckptkit.inspect(run).trainer == trainer
    next(root.rglob("*model*rank*0.*")).unlink()
    (listed,) = ckptkit.ls(run).checkpoints
    assert (listed.path, listed.is_complete, listed.trainer) == (root, False, trainer)
    for command in (["verify", root], ["consolidate", root, tmp_path / "out"]):
        done = cli(*command)
        assert (done.returncode in (1, 3), "for rank 0" in done.stdout + done.stderr) == (True, True)


@pytest.mark.filterwarnings("ignore::ckptkit.checkpoints.checkpoint.LatestDiffers")
def test_a_run_with_something_to_read_is_read(tmp_path: Path) -> None:
    root = save_deepspeed(tmp_path / "run")
    save_alone({"model": {"w": torch.ones(2)}}, tmp_path / "run" / "global_step400")
    assert ckptkit.inspect(tmp_path / "run").step == 400
    assert [(one.step, one.is_complete) for one in ckptkit.ls(tmp_path / "run").checkpoints] == [
        (400, True),
        (500, False),
    ]
    sound, unread = ckptkit.verify(tmp_path / "run")
    assert (sound.problems, unread.path) == ((), root)
    assert "expected a ZeRO partition" in unread.problems[0].message


def test_one_rank_alone_has_the_whole_model(tmp_path: Path) -> None:
    for file in ("mp_rank_00_model_states.pt", "mp_rank_00/model_optim_rng.pt", "model_world_size_1_rank_0.pt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        torch.save({"model": {"w": torch.arange(3.0)}}, tmp_path / file)
        opened = ckptkit.open(tmp_path)
        assert [tensor.torch().tolist() for tensor in opened.values()] == [[0.0, 1.0, 2.0]]
        shutil.rmtree(tmp_path / "mp_rank_00", ignore_errors=True)
        (tmp_path / file).unlink(missing_ok=True)


def test_a_model_with_rank_files_beside_it_is_read(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    torch.save({}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    save_deepspeed(tmp_path)
    assert list(ckptkit.open(tmp_path)) == ["w"]
    assert ckptkit.ls(tmp_path).checkpoints


# -- several at once ---------------------------------------------------------------------------------------------------


def test_several_are_verified(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_alone({"model": {"w": torch.arange(6.0)}}, tmp_path / name)
    assert [part.path.name for part in ckptkit.verify(tmp_path / "a", tmp_path / "b")] == ["a", "b"]
    assert cli("verify", tmp_path / "a", tmp_path / "b", "--against", tmp_path / "a").returncode == 0
    (tmp_path / "b" / "__0_0.distcp").unlink()
    done = cli("verify", tmp_path / "a", tmp_path / "b", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, [one["ok"] for one in found["checkpoints"]]) == (1, [True, False])
    with pytest.raises(CkptError):
        ckptkit.verify(tmp_path / "a", tmp_path / "absent")
    assert cli("verify", tmp_path / "a", tmp_path / "absent").returncode == 3
