"""The sparse checkpoint of `scripts/bench trillion`, small: torch reads its tensors, and ckptkit plans all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

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
    state = {name: torch.ones(metadata.state_dict_metadata[name].size, dtype=torch.bfloat16) for name in of}
    dcp.load(state, checkpoint_id=tmp_path / "in", no_dist=True)
    assert not any(tensor.any() for tensor in state.values())

    command = [sys.executable, "-m", "ckptkit", "consolidate", tmp_path / "in", tmp_path / "out", "--dry-run", "--json"]
    plan = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    sizes = [(entry.size.numel(), entry.properties.dtype) for entry in metadata.state_dict_metadata.values()]
    assert plan["nbytes"] == sum(numel * dtype.itemsize for numel, dtype in sizes)
