"""Measure steps, and write the metrics of a run. `local_loss`, memory and speed differ between ranks."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ckptkit.errors import Corrupt, IOFailure, Usage
from ckptkit.io.small_files import open_line_writer, read_current_content, replace_file
from ckptkit.training.config import TrainConfig

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"

# FLOP/s of dense bf16 matrix products with fp32 accumulation, by a substring of torch's device name; from NVIDIA's data
# sheets, without sparsity. The first match wins, so a longer name stands before its prefix.
PEAKS = {
    "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12, "L4": 121e12,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one step.

    `loss` and `local_loss` are means per token over all ranks and on this rank. `grad_norm` is the norm before
    clipping. `tokens` counts since the start of the run. `mfu` is the model FLOP/s divided by the peak of all GPUs,
    None if the peak is unknown. Memory is the peak on this rank's GPU, in bytes.
    """

    step: int
    loss: float
    local_loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_second: float
    mfu: float | None = None
    memory_allocated: int | None = None
    memory_reserved: int | None = None
    checkpoint: str | None = None


def flops_per_token(
    parameters: int, layers: int, attention_width: int, sequence_length: int, *, frozen: int = 0
) -> int:
    """Return the FLOPs of training per token, forward and backward: 6 per parameter, 12 per attended position.

    This is the convention of PaLM's appendix B: causal attention counts in full, recomputation does not count.
    Each of the `frozen` parameters counts 4, because backward does not compute its gradient.
    """
    return 6 * parameters - 2 * frozen + 12 * layers * attention_width * sequence_length


def peak_flops(device_type: str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s that a rank's GPU can reach in `dtype`, None if unknown."""
    if device_type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in PEAKS.items() if known in name), None)


def peak_memory_since_last_call(device_type: str) -> tuple[int | None, int | None]:
    """Return the peak memory of this rank's GPU since the last call, in bytes: allocated and reserved."""
    if device_type != "cuda":
        return None, None
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return allocated, reserved


class Log(AbstractContextManager["Log"]):
    """Writes the metrics of a run as one JSON line per step, and for TensorBoard if configured. Only rank 0 writes.

    For a run in a store the lines are uploaded with each checkpoint and at the end.
    """

    def __init__(self, config: TrainConfig, rank: int) -> None:
        self._lines = open_line_writer(config.run / METRICS) if rank == 0 else None
        self._board: Any = None
        if config.tensorboard and rank == 0:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise Usage("TensorBoard is not installed", hint="pip install 'ckptkit-fsdp[tensorboard]'") from error
            self._board = SummaryWriter(str(config.run / TENSORBOARD))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the buffered lines, unless the disk or store has failed."""
        if self._board is not None:
            self._board.close()
        if self._lines is not None and not (kind and issubclass(kind, IOFailure)):
            self._lines.flush_lines()

    def write_step(self, step: StepMetrics) -> None:
        """Append the metrics of one step."""
        numbers = asdict(step)
        if self._lines is not None:
            self._lines.add_line(f"{json.dumps(numbers)}\n".encode())
            if step.checkpoint:
                self._lines.flush_lines()
        if self._board is not None:
            for name, value in numbers.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(name, value, step.step)


def drop_metrics_after_step(run: Path, step: int) -> None:
    """Remove the steps after `step` from a run's metrics, because the resumed run repeats them. Raises `Corrupt`."""
    path = run / METRICS
    lines = read_current_content(path).decode(errors="replace").splitlines(keepends=True)
    kept = []
    for line in lines:
        if not line.endswith("\n"):  # a crash may have cut the last line
            continue
        try:
            written = int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError) as error:
            hint = "move the file away to go on without the steps so far"
            raise Corrupt(f"not the metrics of a step: {line.strip()[:80]}", path=path, hint=hint) from error
        if written <= step:
            kept.append(line)
    replace_file(path, "".join(kept).encode())
