"""Write the inputs of `scripts/bench trainers`, as the trainers' own libraries do. Run by torchrun; no ckptkit here."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 2048
BYTES = 14  # of a parameter: master, two moments, and the 16-bit copy


class Model(nn.Module):
    """Square layers behind one another, of about so many parameters together."""

    def __init__(self, parameters: float) -> None:
        super().__init__()
        count = max(2, round(parameters / WIDTH**2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i % 4 == 0) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last layer gives."""
        for layer in self.layers:
            x = layer(x)
        return x


def save_zero(root: Path, size_gb: float, stage: int) -> None:
    """Make one step of AdamW in bfloat16 with ZeRO, and save."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled first
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
    }
    torch.manual_seed(0)
    model = Model(size_gb * 1e9 / BYTES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=True)
    engine.backward(engine(torch.randn(1, WIDTH, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    engine.save_checkpoint(str(root), tag="global_step1")


def main() -> None:
    """Parse the command line and save as one of torchrun's ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["zero"])
    parser.add_argument("root", type=Path)
    parser.add_argument("--size-gb", type=float, default=1.2)
    parser.add_argument("--stage", type=int, default=2)
    options = parser.parse_args()
    save_zero(options.root, options.size_gb, options.stage)


if __name__ == "__main__":
    main()
