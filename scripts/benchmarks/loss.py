"""Measure the head and the loss of a training step: as `train` computes them, compiled, and fused by torch."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from scripts.markdown import ROOT, paragraph

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, WIDTH = 512, 256


def loss(runs: int, device: str) -> None:
    """Measure the head and the loss, forward and backward, in bf16, beside torch's `linear_cross_entropy`."""
    command = [sys.executable, "-m", "scripts.benchmarks.loss", "--runs", str(runs), "--device", device]
    print(subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout, end="")


def measure_ways(runs: int, device: str) -> None:
    """Print the table: time, memory, and how far loss and gradients are from those in fp64."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from ckptkit.training.trainer import sum_losses

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    vocabulary = 32_000 if device == "cpu" else 128_256
    inputs = torch.randn(TOKENS, WIDTH, generator=generator).to(device, torch.bfloat16)
    head = (torch.randn(vocabulary, WIDTH, generator=generator) / 20).to(device, torch.bfloat16)
    targets = torch.randint(vocabulary, (TOKENS,), generator=generator).to(device)
    compiled = torch.compile(sum_losses)

    def apart(sum_losses: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda inputs, head: sum_losses(F.linear(inputs, head)[None], targets[None])

    ways = {"train": apart(sum_losses), "train --compile": apart(compiled)}
    if hasattr(F, "linear_cross_entropy"):  # from torch 2.13
        chunks = nn.LinearCrossEntropyOptions()
        ways["linear_cross_entropy"] = lambda x, w: F.linear_cross_entropy(x, w, targets, reduction="sum")
        ways["the same in chunks"] = lambda x, w: F.linear_cross_entropy(x, w, targets, reduction="sum", options=chunks)

    def step(way: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        x, w = inputs.to(dtype, copy=True).requires_grad_(), head.to(dtype, copy=True).requires_grad_()
        total = way(x, w)
        return [total.detach(), *torch.autograd.grad(total, (x, w))]

    def in_fp64(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w), targets, reduction="sum")

    exact = step(in_fp64, torch.float64)
    logits = TOKENS * vocabulary * 2
    what = f"""{TOKENS} tokens, a width of {WIDTH}, a vocabulary of {vocabulary:,}; forward and backward on `{device}`
        in bf16, in which the logits have {logits / 1e6:.0f} MB; medians of {runs} runs."""
    print(paragraph(what))
    print("| head and loss | time | largest allocation | error of the loss | error of the gradients |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, way in ways.items():
        found = step(way)  # compiles
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
        times = []
        for _ in range(runs):
            started = time.perf_counter()
            float(step(way)[0])
            times.append(time.perf_counter() - started)
        largest = largest_allocation(partial(step, way))
        cells = f"{statistics.median(times):.3f} s | {largest / 1e6:.0f} MB | {errors[0]:.1e} | {max(errors[1:]):.1e}"
        print(f"| {name} | {cells} |")


def largest_allocation(function: Callable[[], object]) -> int:
    """Return the bytes of the largest single allocation of torch's while a function runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events: list[Any] = profiled.profiler.kineto_results.events()
    return max(int(event.nbytes()) for event in events if event.name() == "[memory]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--device")
    measure_ways(**vars(parser.parse_args()))
