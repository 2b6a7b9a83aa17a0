"""Measure any training loop: when its steps ended, their losses, its memory. Knows no loop and no ckptkit."""

from __future__ import annotations

import json
import resource
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

REPORT = "report.json"


def peak_rss() -> int:
    """Return the most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class Watch:
    """A watch on a loop: made when all is imported and the ranks have met, before there is a model; told of each step.

    `ends` are seconds of a clock that began anywhere, `losses` the means per token over all ranks, memory is in bytes.
    """

    imports: int = field(default_factory=peak_rss)
    ends: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0
    allocated: int = 0
    reserved: int = 0

    def note(self, loss: float, allocated: int | None = None, reserved: int | None = None) -> None:
        """Note that a step has ended; memory is the GPU's highest since the last one."""
        self.ends.append(time.perf_counter())
        self.losses.append(loss)
        self.allocated = max(self.allocated, allocated or 0)
        self.reserved = max(self.reserved, reserved or 0)

    def tell(self, home: Path) -> None:
        """Leave a report, of the rank with the most memory. A collective, where there are ranks."""
        self.peak = peak_rss()
        memory = torch.tensor([self.imports, self.peak, self.allocated, self.reserved])
        if dist.is_initialized():
            dist.all_reduce(memory, dist.ReduceOp.MAX)
        self.imports, self.peak, self.allocated, self.reserved = memory.tolist()
        if not dist.is_initialized() or dist.get_rank() == 0:
            (home / REPORT).write_text(json.dumps(asdict(self)))
