"""One rank's part of a training run. All ranks call the same methods in the same order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ckptkit.errors import CkptError, Mismatch
from ckptkit.training.config import TrainConfig
from ckptkit.training.data.batches import Batch, Corpus, indices_of_rank
from ckptkit.training.metrics import StepMetrics, flops_per_token, peak_flops, peak_memory_since_last_call
from ckptkit.training.models.blueprint import Blueprint
from ckptkit.training.saving.run import Run
from ckptkit.training.seeds import derive_seed
from ckptkit.training.shard import build_sharded_model, param_dtype

LAST_LR = 0.1  # learning rate at the last step, as a fraction of the highest


@dataclass(slots=True)
class Progress:
    """The position of a run: optimizer steps, sequences seen, and tokens in the loss so far.

    `sequences` is a position in one order of the data. `seed`, `sequence_length` and `data`, the CRC-32 of the tokens,
    identify this order. `base` is the checksum of the base weights of adapters; 0 without adapters, and if the base
    weights are in the checkpoint.
    """

    seed: int
    sequence_length: int
    data: int
    base: int = 0
    step: int = 0
    sequences: int = 0
    tokens: int = 0

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name in asdict(self):
            setattr(self, name, {"base": 0, **state}[name])  # checkpoints of older versions have no `base`


class Trainer:
    """A model, its optimizer and its position in the data; `step` takes one step together with the other ranks."""

    def __init__(
        self, config: TrainConfig, blueprint: Blueprint, corpus: Corpus, mesh: DeviceMesh, seed: int | None
    ) -> None:
        """Initialize the weights from `seed`; None leaves them uninitialized, to be loaded next."""
        self.config = config
        self.blueprint = blueprint
        self.corpus = corpus
        self.device = torch.device(mesh.device_type)
        self.rank, self.world_size = mesh.get_rank(), mesh.size()
        self.sharded = build_sharded_model(config, blueprint, mesh, seed)
        self.model = self.sharded.model
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                is_matrix = name.replace("_fsdp_wrapped_module.", "") in self.sharded.matrices
                (matrices if is_matrix else others).append(parameter)
        # weight decay for matrices, but not for norms and biases
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self.optimizer = AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
        self._decays = [float(group["weight_decay"]) for group in self.optimizer.param_groups]
        self.scheduler = make_scheduler(config, self.optimizer)
        # Compiled, it never stores the logits of the batch in fp32, which are the largest tensor of a step.
        self._sum_losses = torch.compile(sum_losses) if config.compile else sum_losses
        self.progress = Progress(config.seed, corpus.length, corpus.checksum)
        self.must_stop = False
        peak = peak_flops(mesh.device_type, param_dtype(config, mesh.device_type))
        self._peak = peak and peak * self.world_size
        self._flops_per_token = flops_per_token(
            self.sharded.multiplied,
            blueprint.layers,
            blueprint.attention_width,
            config.sequence_length,
            frozen=self.sharded.frozen,
        )

    def step(self, has_stop_signal: Callable[[], bool] = lambda: False) -> StepMetrics:
        """Take one step, after which `must_stop` is whether any rank had a stop signal.

        Raises `CkptError`, with unchanged weights, if the loss or the gradient norm is not finite.
        """
        started = time.perf_counter()
        progress = self.progress
        torch.manual_seed(derive_seed(progress.seed, progress.step, self.rank))  # for dropout
        batches = self._next_batches()
        local_tokens = sum(batch.loss_token_count for batch in batches)
        tokens = torch.full((), local_tokens, device=self.device)  # a copy from the CPU would wait for the device
        dist.all_reduce(tokens)
        local_sum = self._accumulate_gradients(batches, tokens)
        sums = torch.stack([local_sum, torch.full_like(local_sum, has_stop_signal())])
        dist.all_reduce(sums)
        norm = self.sharded.sharding.clip_gradients(self.model, self.config.clip)
        # the only wait for the device in a step: the optimizer still runs while the next step is prepared
        numbers = torch.stack([local_sum, *sums, *(number.to(sums) for number in (norm, tokens))]).tolist()
        local_loss, loss, stop_signals, grad_norm, token_count = numbers
        local_loss /= max(1, local_tokens)
        loss /= max(1, token_count)
        self.must_stop = stop_signals > 0
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise CkptError(
                f"step {progress.step + 1}: the loss is {loss} and the gradient norm {grad_norm}; the run stops here",
                path=self.config.run,
                hint="resume from the latest checkpoint with a lower --lr or a longer --warmup",
            )
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        progress.step += 1
        progress.sequences += self.config.batch_size
        progress.tokens += int(token_count)
        allocated, reserved = peak_memory_since_last_call(self.device.type)
        per_second = token_count / (time.perf_counter() - started)
        return StepMetrics(
            step=progress.step,
            loss=loss,
            local_loss=local_loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=progress.tokens,
            tokens_per_second=per_second,
            mfu=per_second * self._flops_per_token / self._peak if self._peak else None,
            memory_allocated=allocated,
            memory_reserved=reserved,
        )

    def save(self, run: Run, **metrics: float) -> Path:
        """Save the current state with these metrics, and return the path of the checkpoint."""
        return run.save(
            self.progress.step,
            self.model,
            self.optimizer,
            metrics=metrics,
            scheduler=self.scheduler,
            progress=self.progress,
        )

    def load(self, run: Run, path: Path) -> None:
        """Load the checkpoint at `path`. Raises `Mismatch` for another order of the data or other base weights."""
        expected = replace(self.progress)
        run.load(self.model, self.optimizer, path=path, scheduler=self.scheduler, progress=self.progress)
        for name in ("seed", "sequence_length", "data"):
            ours, theirs = getattr(expected, name), getattr(self.progress, name)
            if ours != theirs:
                raise Mismatch(
                    f"expected {name} {theirs} as in the checkpoint, found {ours}: its position in the "
                    "data would be wrong",
                    path=path,
                    hint="pass the same data, seed and length, or start a new run with --weights",
                )
        if expected.base and expected.base != self.progress.base:
            raise Mismatch(
                "the checkpoint has only adapters, which were trained on another base",
                path=path,
                hint="pass the base that the run was started from with --weights",
            )
        # the learning rate and weight decay of the configuration may differ from the saved values
        self.scheduler.base_lrs = [self.config.lr] * len(self._decays)
        for group, decay, factor in zip(
            self.optimizer.param_groups, self._decays, self.scheduler.lr_lambdas, strict=True
        ):
            group["initial_lr"] = self.config.lr
            group["lr"] = self.config.lr * factor(self.progress.step)
            group["weight_decay"] = decay

    def _next_batches(self) -> list[Batch]:
        """Return this rank's micro-batches of the next global batch; every rank has the same number of them."""
        start, size = self.progress.sequences, self.config.batch_size
        mine = indices_of_rank(range(start, start + size), self.rank, self.world_size)
        largest = math.ceil(size / self.world_size)
        parts = math.ceil(largest / (self.config.micro_batch_size or largest))
        return [self.corpus.batch_at(indices_of_rank(mine, part, parts)) for part in range(parts)]

    def _accumulate_gradients(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        """Accumulate the gradients of the mean loss per token; `tokens` is their number on all ranks.

        Returns the sum of the losses on this rank, in double precision.
        """
        # A mean per rank would give tokens of a short batch more weight. FSDP averages over ranks: undo that.
        scale = self.world_size / tokens.clamp(min=1)
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in batches:
            with nullcontext() if batch is batches[-1] else self.sharded.sharding.accumulating_gradients(self.model):
                moved = batch.to(self.device)
                # no variable for the logits: it would keep them in memory during backward
                loss = self._sum_losses(
                    self.blueprint.compute_logits(self.model, moved.inputs, moved.positions), moved.targets
                )
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            losses += loss.detach()
        return losses


def sum_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross entropies, in fp32; logits [batch, length, vocabulary], targets [batch, length]."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def make_scheduler(config: TrainConfig, optimizer: Optimizer) -> LambdaLR:
    """Return the learning-rate schedule: linear warmup over `warmup` steps, then cosine decay to a tenth."""

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        done = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
        return LAST_LR + (1 - LAST_LR) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)
