"""Two policies of one model, a sparse update apart, saved by whoever trained them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.producers import save_alone

State = dict[str, Tensor]

SHAPES = {
    "embed.weight": (40, 16),
    "layers.0.up.weight": (24, 16),
    "layers.0.up.bias": (24,),
    "layers.1.up.weight": (24, 16),
    "layers.1.up.bias": (24,),
    "scale": (),
    "nothing": (0, 4),
}


def policy(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def updated(state: Mapping[str, Tensor], changes: Mapping[str, int], seed: int = 1) -> State:
    """The state with so many elements of each of some tensors changed, wherever these are."""
    generator = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in state.items()}
    for name, count in changes.items():
        where = torch.randperm(after[name].numel(), generator=generator)[:count]
        flat = after[name].view(-1)
        flat[where] = (flat[where].float() * 1.5 + 1).to(flat.dtype)
    return after


def step(state: Mapping[str, Tensor], seed: int = 1) -> State:
    """The state after a sparse update: one tensor changes as a whole, two stay as they are."""
    return updated(state, {"embed.weight": 7, "layers.0.up.weight": 5, "layers.1.up.bias": 24, "scale": 1}, seed)


def as_hf(root: Path, state: Mapping[str, Tensor]) -> Path:
    root.mkdir(parents=True)
    save_file(dict(state), root / "model.safetensors", metadata={"format": "pt"})
    return root


def as_dcp(root: Path, state: Mapping[str, Tensor]) -> Path:
    save_alone({"model": dict(state), "optim": {"state": {"scale": {"exp_avg": torch.ones(())}}}}, root)
    return root


def as_pt(root: Path, state: Mapping[str, Tensor]) -> Path:
    root.mkdir(parents=True)
    torch.save(dict(state), root / "state.pt")
    return root


def load(root: Path) -> State:
    return {name: tensor for file in sorted(root.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def files(root: Path, suffix: str = ".safetensors") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.iterdir()) if path.suffix == suffix}
