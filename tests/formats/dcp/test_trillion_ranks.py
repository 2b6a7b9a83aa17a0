"""The sparse checkpoint of `scripts/bench trillion`, small: torch reads its tensors, and ckptkit plans all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from scripts.benchmarks.trillion import HIDDEN, INNER
from scripts.benchmarks.trillion_steps import Mesh, make

EXPERT = "model.model.layers.1.mlp.experts.3.up_proj.weight"  # whole on a rank of the last stage
SHARDED = "model.model.layers.1.self_attn.kv_b_proj.weight"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_it_and_ckptkit_plans_it(tmp_path: Path) -> None:
    make(tmp_path / "in", layers=2, experts=4, mesh=Mesh(stages=2, group=32))
    metadata = dcp.FileSystemReader(tmp_path / "in").read_metadata()
    of = {
        name: [info.relative_path for index, info in metadata.storage_data.items() if index.fqn == name]
        for name in (EXPERT, SHARDED)
    }
    assert of == {EXPERT: ["__56_0.distcp"], SHARDED: [f"__{rank}_0.distcp" for rank in range(48, 64)]}
    entries = metadata.state_dict_metadata
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    state = {name: torch.ones(tensors[name].size, dtype=torch.bfloat16) for name in of}
    dcp.load(state, checkpoint_id=tmp_path / "in", no_dist=True)
    assert not any(tensor.any() for tensor in state.values())

    sizes = [entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors.values()]
    assert dry_run("consolidate", tmp_path)["nbytes"] == sum(sizes)


def test_reshard_spreads_experts_over_all_ranks(tmp_path: Path) -> None:
    make(tmp_path / "in", layers=2, experts=8, mesh=Mesh(stages=2, group=32))
    files = {file["name"]: file["nbytes"] for file in dry_run("reshard", tmp_path, "--to", "8")["files"]}
    shards = [nbytes for name, nbytes in files.items() if name.endswith(".distcp")]
    expert = 3 * 2 * HIDDEN * INNER
    assert len(shards) == 8
    assert max(shards) - min(shards) < expert / 2


def dry_run(command: str, root: Path, *options: str) -> dict[str, Any]:
    """Return the plan of a command, in a process of its own."""
    paths = str(root / "in"), str(root / "out")
    line = [sys.executable, "-m", "ckptkit", command, *paths, *options, "--dry-run", "--json"]
    plan: dict[str, Any] = json.loads(subprocess.run(line, capture_output=True, check=True).stdout)
    return plan
