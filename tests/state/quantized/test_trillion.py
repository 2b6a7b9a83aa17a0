"""Layers of the shape of Kimi K2 in sparse files: planned, and an expert of them converted.

Memory is asserted, times are not. `python -m scripts.benchmarks.quantized` plans all 61 layers, a trillion parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from scripts.benchmarks.trillion import EXPERTS, GROUP, HIDDEN, INNER, write
from tests import command
from tests.state.quantized.few_bits import scheme_of

OWN = "model.layers.1.mlp.experts.0"


def run(*arguments: object) -> dict[str, Any]:
    """What a command prints, in a process of its own."""
    done = command.ckptkit(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_library(root: Path, name: str) -> Tensor:
    """What compressed-tensors makes of a packed weight."""
    from compressed_tensors.compressors import BaseCompressor

    scheme = scheme_of({"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True})
    file = root / json.loads((root / "model.safetensors.index.json").read_text())["weight_map"][f"{name}_packed"]
    with safe_open(file, "pt") as tensors:
        parts = {f"weight_{end}": tensors.get_tensor(f"{name}_{end}") for end in ("packed", "scale", "shape")}
    compressor: Any = BaseCompressor.get_value_from_registry("pack-quantized")
    plain: Tensor = compressor.decompress(parts, scheme)["weight"]
    return plain


def convert_one_expert(root: Path, out: Path) -> dict[str, Any]:
    done = run("consolidate", root, out, "--dtype", "bf16", "--include", f"{OWN}.*")
    found = load_file(out / "model.safetensors")
    assert found.keys() == {f"{OWN}.{one}_proj.weight" for one in ("gate", "up", "down")}
    for name, tensor in found.items():
        assert torch.equal(tensor, by_library(root, name)), name
    return done


@pytest.mark.slow
def test_an_expert_is_what_compressed_tensors_makes(tmp_path: Path) -> None:
    write(tmp_path / "in", layers=2, experts=1)
    done = convert_one_expert(tmp_path / "in", tmp_path / "out")
    assert done["peak_rss_bytes"] < 600e6  # transformers, which is asked for the names, is most of it


@pytest.mark.nightly
def test_experts_of_every_layer_are_planned_in_bounded_memory(tmp_path: Path) -> None:
    write(tmp_path / "in", layers=4)
    plan = run("consolidate", tmp_path / "in", tmp_path / "out", "--dtype", "bf16", "--dry-run")
    assert plan["nbytes"] > 0.1e12
    packed = (4 - 1) * EXPERTS * 3
    assert sum(change.startswith("int32 times scales") for change in plan["cast"].values()) == packed
    done = convert_one_expert(tmp_path / "in", tmp_path / "out")
    assert done["nbytes"] == 3 * 2 * HIDDEN * INNER
    assert done["peak_rss_bytes"] < 700e6


@pytest.mark.slow
def test_holes_are_no_weights(tmp_path: Path) -> None:
    """A file whose data never arrived has scales of 0: an error, and no zeros in silence."""
    write(tmp_path / "in", layers=2, experts=1, filled=0)
    options = ("--dtype", "bf16", "--include", f"{OWN}.*", "--json")
    done = command.ckptkit("consolidate", tmp_path / "in", tmp_path / "out", *options)
    assert done.returncode == 3
    assert "expected [" in json.loads(done.stdout)["error"]["message"]
