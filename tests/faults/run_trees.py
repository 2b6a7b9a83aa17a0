"""Small runs of trainers: a checkpoint below the files that say which one is meant, and beside what loaders keep."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.faults.trained import Make, Truth, moments, named, ranks, save
from tests.faults.trees import MAKERS as EARLIER
from tests.faults.trees import OWN_NAMES as EARLIER_NAMES
from tests.faults.trees import core, flat_names, save_dcp, save_orbax
from tests.producers import spawn


def grain(root: Path, state: Truth, _: int, processes: int) -> Truth:
    """The default of orbax, and beside its arrays Grain's place in the data of each process."""
    truth = save_orbax(root / "items", state, "zarr", is_ocdbt=True)
    (root / "_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2}')
    (root / "iter").mkdir()
    for process in range(processes):
        seen = json.dumps({"version": 2, "last_seen_indices": {"0": 7 + process}})
        (root / "iter" / f"process_{process}-of-{processes}.json").write_text(seen)
    return truth


def slime(root: Path, state: Truth, step: int, count: int) -> Truth:
    """slime: Megatron's `iter_N` and its tracker, beside a place in the data."""
    truth = core(root / f"iter_{step:07d}", state, step, count)
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    save({"sample_offset": 3}, root / "rollout" / f"global_dataset_state_dict_{step - 1}.pt")
    return truth


def ray(root: Path, state: Truth, step: int, _: int) -> Truth:
    """Ray Train: DCP of the loop's `AppState` in a directory called by a date, and the file that names it."""
    name = f"checkpoint_2026-11-26_05-10-{step:02d}.887563"
    states = {key: {"exp_avg": value} for key, value in moments(state).items()}
    save_dcp({"app": {"model": state, "optim": {"state": states}, "epoch": step}}, root / name)
    result = {"version": 0, "checkpoint_dir_name": name, "metrics": {"loss": 0.5}}
    snapshot = {"ray_version": "2.56.0", "checkpoint_results": [result], "latest_checkpoint_result": result}
    (root / "checkpoint_manager_snapshot.json").write_text(json.dumps(snapshot))
    (root / ".validate_storage_marker").touch()
    averages = {f"state.{key}.exp_avg": value for key, value in moments(state).items()}
    return flat_names(state, "app.model") | flat_names(averages, "app.optim")


def skyrl(root: Path, state: Truth, step: int, count: int) -> Truth:
    """SkyRL with FSDP: verl's files of ranks below `policy`, beside states of loader and trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spawn(count, _save_skyrl, root / f"global_step_{step}" / "policy", state, step)
    for name in ("data.pt", "trainer_state.pt"):
        save({"global_step": step}, root / f"global_step_{step}" / name)
    (root / "latest_ckpt_global_step.txt").write_text(str(step))
    return named(state)


def _save_skyrl(root: Path, state: dict[str, Tensor], step: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks(root, state, step, world)
    extra = {"fsdp_strategy": "fsdp2", "world_size": world, "rank": rank, "rng": {"numpy": rank}}
    torch.save(extra, root / f"extra_state_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        (root / "fsdp_config.json").write_text(json.dumps({"fsdp_strategy": "fsdp2", "world_size": world}))


RUNS: dict[str, Make] = {make.__name__: make for make in (grain, slime, ray, skyrl)}
MAKERS = EARLIER | RUNS
OWN_NAMES = EARLIER_NAMES | {"grain", "slime"}
