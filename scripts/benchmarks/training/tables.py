"""Make the tables of the training benchmark from the reports that its loops left. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ckptkit.training.config import TrainConfig
from scripts.markdown import paragraph, table

WARM_UP = 3  # steps that are not counted: caches fill, and code is compiled
SAME = {"cpu": 1e-3, "cuda": 3e-2}  # how far losses of the same training lie apart at most: in fp32, and in bf16

Facts = dict[str, Any]


@dataclass(frozen=True)
class Loop:
    """A loop to be measured: a command about `{settings}` and `{ranks}`, and in what its settings differ from all.

    `alone` is one process on one device, however many ranks others have.
    """

    name: str
    command: str
    changes: dict[str, Any] = field(default_factory=dict)
    alone: bool = False


@dataclass
class Measured:
    """The reports of a loop's runs, or what stopped it."""

    loop: Loop
    reports: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    def speed(self, config: TrainConfig) -> float:
        """Return the median of its tokens per second."""
        return median(speed(report, config) for report in self.reports)

    def most(self, name: str) -> float:
        """Return the most of one kind of memory that any run took, in MiB."""
        return float(max(report[name] for report in self.reports) / 2**20)

    def losses(self, step: int) -> list[float]:
        """Return the losses of a step in all runs; steps count from 1."""
        return [report["losses"][step - 1] for report in self.reports]


def speed(report: dict[str, Any], config: TrainConfig) -> float:
    """Return tokens per second from the end of the last step that is not counted to the end of the last one."""
    ends = report["ends"][: config.steps - 1]
    tokens = config.batch_size * config.sequence_length * (len(ends) - WARM_UP)
    return float(tokens / (ends[-1] - ends[WARM_UP - 1]))


def describe(facts: Facts, config: TrainConfig) -> str:
    """Return the text that the tables are to be read with."""
    runs = "One run" if facts["runs"] == 1 else f"Medians of {facts['runs']} runs, taken in turns"
    if config.device == "cpu":
        own = f"""fp32; each of {facts["ranks"]} ranks has one thread, and the plain loop is one process of as many. RSS
            is that of the largest process, and what its imports take of it is no loop's."""
    else:
        own = "bf16, with weights, AdamW's moments and sums of gradients in fp32; the plain loop is one process."
    if facts["peak_flops"]:
        own += f""" MFU is of {facts["peak_flops"] / 1e12:,.0f} TFLOP/s, at {facts["flops_per_token"] / 1e9:.2f} GFLOP a
            token: 6 per parameter that it is multiplied with, 12 per layer, channel and position of attention (PaLM,
            appendix B: causal attention counts in full, recomputation not at all)."""
    tokens = config.batch_size * config.sequence_length
    return paragraph(
        f"""On {facts["gpu"] or "the CPU"}: a Llama of {facts["parameters"] / 1e6:,.1f} M parameters, {facts["steps"]}
        steps of {tokens:,} tokens (sequences of {config.sequence_length}, {facts["ranks"]} ranks), of which the first
        {WARM_UP} are not counted; fused AdamW, gradients clipped, the same weights and tokens for all. {runs}. A loss
        that is more than {SAME[config.device]} off the first row's has a mark (!). {own}"""
    )


def cpu_table(results: Sequence[Measured], config: TrainConfig, _: Facts) -> str:
    """Return the table of tokens per second, memory and losses."""
    head = ["", "tokens/s", "relative", "peak RSS", "imports alone", "loss, first step", "loss, last step"]
    rows = [head]
    for result in results:
        if result.failure is None:
            memory = [f"{result.most(name):.0f} MiB" for name in ("peak", "imports")]
            rows.append([*begin(result, results[0], config), *memory, *losses(result, results[0], config)])
        else:
            rows.append(failure(result))
    return table(rows)


def gpu_table(results: Sequence[Measured], config: TrainConfig, facts: Facts) -> str:
    """Return the table of tokens per second, MFU, memory of the GPU and losses."""
    head = ["", "tokens/s", "relative", "MFU", "allocated", "reserved", "loss, first step", "loss, last step"]
    rows = [head]
    for result in results:
        if result.failure is None:
            memory = [f"{result.most(name) / 1024:.1f} GiB" for name in ("allocated", "reserved")]
            cells = [mfu(result, config, facts), *memory, *losses(result, results[0], config)]
            rows.append([*begin(result, results[0], config), *cells])
        else:
            rows.append(failure(result))
    return table(rows)


def begin(result: Measured, first: Measured, config: TrainConfig) -> list[str]:
    """Return a row's first cells: name, speed, and its ratio to the first row's."""
    ratio = "" if first.failure else f"{result.speed(config) / first.speed(config):.2f}"
    return [result.loop.name, f"{result.speed(config):,.0f}", ratio]


def losses(result: Measured, first: Measured, config: TrainConfig) -> list[str]:
    """Return the losses of the first and the last step; marked where any run's is another than the first row's."""
    cells = []
    for step in (1, config.steps - 1):
        every = result.losses(step)
        wanted = first.losses(step)[0] if first.reports else every[0]
        same = all(abs(loss - wanted) <= SAME[config.device] for loss in every)
        cells.append(f"{every[0]:.4f}" + ("" if same else " (!)"))
    return cells


def failure(result: Measured) -> list[str]:
    """Return the row of a loop that did not end well."""
    return [result.loop.name, f"failed: {result.failure}"[:100]]


def mfu(result: Measured, config: TrainConfig, facts: Facts) -> str:
    """Return the share of the GPUs' peak that the model's own operations make up, where the peak is known."""
    if not facts["peak_flops"]:
        return ""
    gpus = 1 if result.loop.alone else facts["ranks"]
    return f"{result.speed(config) * facts['flops_per_token'] / facts['peak_flops'] / gpus:.1%}"


def saves_table(report: dict[str, Any]) -> str:
    """Return the table of what each kind of save costs: seconds, and shares of a step."""
    step = report["step"]
    rows = [["save", "the loop waits", "wait / step", "cost / step", "visible after", "MB", "MB/s"]]
    for kind, saves in report["kinds"].items():
        stopped, visible, cost = (median(save[name] for save in saves) for name in ("stopped", "visible", "cost"))
        size = saves[0]["nbytes"] / 1e6
        times = [f"{stopped:.3f} s", f"{stopped / step:.0%}", f"{cost / step:.0%}", f"{visible:.3f} s"]
        rows.append([kind, *times, f"{size:,.1f}", f"{size / visible:,.0f}"])
    text = f"""Saves of the model, its optimizer and progress, synced to the disk; a step takes {step:.3f} s. The cost
        is the wait, and the time by which the steps take longer until the checkpoint is visible."""
    return f"\n{paragraph(text)}\n{table(rows)}"
