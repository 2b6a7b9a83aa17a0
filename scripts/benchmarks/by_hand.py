"""Do what people do where they have no tool: load safetensors whole; compare, survey and average them with torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def load(root: str) -> dict[str, Tensor]:
    """Return every tensor of a directory of safetensors."""
    return {
        name: tensor for path in sorted(Path(root).glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def diff(one: str, other: str) -> None:
    """Print the largest difference and the relative one of each tensor."""
    ours, theirs = load(one), load(other)
    for name in ours.keys() | theirs.keys():
        a, b = ours[name].float(), theirs[name].float()
        gap = a - b
        print(name, gap.abs().max().item(), (gap.norm() / a.norm()).item())


def stats(root: str) -> None:
    """Print norm, mean, deviation, extremes, and how many numbers are NaN, infinite or zero."""
    for name, tensor in load(root).items():
        wide = tensor.float()
        extremes = wide.min().item(), wide.max().item()
        counts = [int(mask.sum()) for mask in (wide.isnan(), wide.isinf(), wide == 0)]
        print(name, wide.norm().item(), wide.mean().item(), wide.std().item(), *extremes, *counts)


def average(*roots: str) -> None:
    """Write the mean of all but the last, accumulated in fp32, there."""
    *sources, out = roots
    first = load(sources[0])
    total = {name: tensor.float() for name, tensor in first.items()}
    for source in sources[1:]:
        for name, tensor in load(source).items():
            total[name] += tensor.float()
    mean = {name: (tensor / len(sources)).to(first[name].dtype) for name, tensor in total.items()}
    Path(out).mkdir()
    save_file(mean, Path(out) / "model.safetensors", metadata={"format": "pt"})


SCRIPTS: dict[str, Callable[..., None]] = {"diff": diff, "stats": stats, "average": average}

if __name__ == "__main__":
    SCRIPTS[sys.argv[1]](*sys.argv[2:])
