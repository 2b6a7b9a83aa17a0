"""Checkpoints by DeepSpeed itself, of every kind that it has, with the state that the engine had when it saved them.

`import deepspeed` takes longer than all that follows, so one group of processes saves a directory of each kind. The
truth has `KIND/NAME` for each tensor, NAME as ckptkit is to call it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.producers import Truth, _on_ranks

ROWS, WIDTH = 13, 6
BATCH = 6

# by kind: the stage, and what is unusual
KINDS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "zero1": (1, ("bf16", "groups", "tied", "frozen")),
    "zero2": (2, ("fp16", "frozen")),
    "zero2-fp32": (2, ()),
    "round-robin": (2, ("round_robin_gradients",)),
    "aligned": (2, ("parameter_alignment",)),
    "zero3": (3, ("bf16", "groups", "tied", "frozen", "sub_groups")),
    "hpz": (3, ("bf16", "hpz")),
    "bf16-optimizer": (1, ("bf16", "accumulated")),
    "zero0": (0, ("bf16",)),
    "zero0-fp32": (0, ("tied",)),
}
ON_THREE = ("zero1", "zero2-fp32", "zero3")
CONVERTED = ("zero1", "zero3")
TINY = "tiny"  # of which most ranks have nothing


class Model(nn.Module):
    """Odd sizes, so that ranks' shares begin and end in the middle of rows; a buffer, and one that is not saved."""

    def __init__(self, flags: tuple[str, ...], width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(ROWS, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width + 1)
        self.down = nn.Linear(width + 1, width, bias=False)
        self.head = nn.Linear(width, ROWS, bias=False)
        self.register_buffer("frequencies", torch.arange(3.0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        if "tied" in flags:
            self.head.weight = self.embed.weight
        if "frozen" in flags:
            self.up.requires_grad_(False)
            self.norm.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens))
        return self.head(self.down(torch.relu(self.up(hidden)))).float()


def settings(stage: int, flags: tuple[str, ...]) -> dict[str, Any]:
    """What DeepSpeed is configured with."""
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero |= {flag: True for flag in ("round_robin_gradients", "parameter_alignment") if flag in flags}
    zero |= {"sub_group_size": 60} if "sub_groups" in flags else {}
    zero |= {"zero_hpz_partition_size": 2} if "hpz" in flags else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": "bf16" in flags},
        "fp16": {"enabled": "fp16" in flags, "initial_scale_power": 4},
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if "accumulated" in flags else {}),
    }


def start(model: nn.Module, stage: int, flags: tuple[str, ...], **more: Any) -> Any:
    """The engine that trains a model; without ZeRO the optimizer records the names of its parameters."""
    import deepspeed

    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    trained = [parameter for _, parameter in named]
    matrices = {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1}
    vectors = {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}
    alone: Any = trained if stage else named
    optimizer = torch.optim.AdamW([matrices, vectors] if "groups" in flags else alone, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(stage, flags) | more)
    return engine


def train(engine: Any, steps: range) -> list[float]:
    """The losses of some steps. All ranks together see the same data, however many they are."""
    losses = []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in steps:
        noise = torch.Generator().manual_seed(step)
        batch = torch.randint(0, ROWS, (BATCH, 5), generator=noise)
        tokens = batch[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
        loss = nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    return losses


def live_state(model: nn.Module, stage: int, flags: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """What DeepSpeed says that the masters and moments of the trained parameters are, and the model's buffers."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    for name, parameter in model.named_parameters():
        if stage and parameter.requires_grad and "round_robin_gradients" not in flags:  # where this answer is wrong
            yield f"model.{name}", safe_get_full_fp32_param(parameter)
            for what in ("exp_avg", "exp_avg_sq"):
                moment = safe_get_full_optimizer_state(parameter, what)
                yield f"optimizer.state.{name}.{what}", moment.reshape(whole_shape(parameter))
    for name, buffer in model.named_buffers():
        if name != "scratch":
            yield f"model.{name}", buffer


def link_moments(optimizer: Any) -> None:
    """Let DeepSpeed find the moments of all groups: it looks for them when the first group has made its first step."""
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def whole_shape(parameter: Any) -> Any:
    """The shape of a parameter, also where ZeRO 3 has left nothing of it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def frozen_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters that are not trained, put together from all ranks."""
    import deepspeed

    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                yield f"model.{name}", parameter.detach().cpu().clone()


def save_all(root: Path, kinds: tuple[str, ...]) -> Mapping[str, Any]:
    """Train a model and save it once for each kind."""
    be_cpu()
    truth: dict[str, Tensor] = {}
    for kind in kinds:
        stage, flags = (3, ("bf16",)) if kind == TINY else KINDS[kind]
        model = Model(flags, 1 if kind == TINY else WIDTH)
        engine = start(model, stage, flags)
        train(engine, range(2))
        engine.save_checkpoint(str(root / kind), client_state={"my_epoch": 1})
        link_moments(engine.optimizer)
        found = {**dict(live_state(model, stage, flags)), **dict(frozen_state(model))}
        truth |= {f"{kind}/{name}": value.detach().clone() for name, value in found.items()}
    return truth


def save_and_go_on(root: Path, kinds: Mapping[str, tuple[int, tuple[str, ...]]]) -> Mapping[str, Any]:
    """Train models in fp32, save each, and train on: the losses that whoever resumes should have."""
    be_cpu()
    losses = {}
    for kind, (stage, flags) in kinds.items():
        engine = start(Model(flags), stage, flags)
        train(engine, range(4))
        engine.save_checkpoint(str(root / kind))
        losses[kind] = torch.tensor(train(engine, range(4, 8)))
    return losses


def resume(root: Path, kinds: Mapping[str, tuple[int, tuple[str, ...]]]) -> Mapping[str, Any]:
    """Let DeepSpeed resume from universal checkpoints: the losses of the next steps."""
    be_cpu()
    losses = {}
    for kind, (stage, flags) in kinds.items():
        engine = start(Model(flags), stage, flags, checkpoint={"load_universal": True})
        path, _ = engine.load_checkpoint(str(root / kind))
        assert path is not None
        assert engine.global_steps == 4
        losses[kind] = torch.tensor(train(engine, range(4, 8)))
    return losses


def save_pipelines(root: Path) -> Mapping[str, Any]:
    """Train pipelines of two stages and save them; of one the first and the last layer have the same weight."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    be_cpu()
    deepspeed.init_distributed("gloo")
    first, last = LayerSpec(nn.Embedding, ROWS, WIDTH), LayerSpec(nn.Linear, WIDTH, ROWS)
    tied = (
        TiedLayerSpec("embed", nn.Embedding, ROWS, WIDTH),
        TiedLayerSpec("embed", nn.Embedding, ROWS, WIDTH, forward_fn=lambda layer, x: x @ layer.weight.t()),
    )
    truth: dict[str, Tensor] = {}
    for kind, (front, back) in (("plain", (first, last)), ("tied", tied)):
        torch.manual_seed(0)
        model = PipelineModule(
            [front, LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.LayerNorm, WIDTH), back],
            num_stages=2,
            loss_fn=lambda out, tokens: nn.functional.cross_entropy(out.flatten(0, 1).float(), tokens.flatten()),
            partition_method="uniform",
            activation_checkpoint_interval=0,
        )
        engine = start(model, 1, ("bf16", "accumulated"), gradient_accumulation_steps=2)
        tokens = torch.randint(0, ROWS, (2, 5))
        for _ in range(2):
            engine.train_batch(iter([(tokens, tokens)] * 2))
        engine.save_checkpoint(str(root / kind))
        link_moments(engine.optimizer)
        stages: list[dict[str, Tensor]] = [{}, {}]
        dist.all_gather_object(stages, dict(live_state(model, 1)))
        truth |= {f"{kind}/{name}": value for stage in reversed(stages) for name, value in stage.items()}
    return truth


def be_cpu() -> None:
    """Tell DeepSpeed which process this is, that there is no accelerator, and to do without code of C++ to be compiled.

    It trains in fp16 on any CPU: it asks whether oneDNN is fast at that, and torch computes it anyhow. The lock of a
    compilation that was interrupted would stop every later one.
    """
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank()), "RANK": str(dist.get_rank())}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "LOCAL_SIZE": str(dist.get_world_size())}
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def on_two(root: Path) -> Truth:
    """A directory of each kind, by two ranks."""
    return _on_ranks(2, save_all, root, tuple(KINDS))


def universal(root: Path) -> Truth:
    """What DeepSpeed's own tool makes of ZeRO 1 and 3, beside that."""
    truth = _on_ranks(2, save_all, root, CONVERTED)
    code = (
        "import sys; from argparse import Namespace; from deepspeed.checkpoint.ds_to_universal import main\n"
        "for kind in sys.argv[2:]: main(Namespace(input_folder=f'{sys.argv[1]}/{kind}/global_step2',"
        "output_folder=f'{sys.argv[1]}/{kind}/global_step2_universal', num_extract_workers=1, num_merge_workers=1,"
        "keep_temp_folder=False, strict=True, inject_missing_state=True))"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run(
        [sys.executable, "-c", code, str(root), *CONVERTED], check=True, capture_output=True, env=environment
    )
    return truth


def pipelines(root: Path) -> Truth:
    """Pipelines of two stages, which are saved layer by layer."""
    return _on_ranks(2, save_pipelines, root)


def on_three(root: Path) -> Truth:
    """The kinds that cut by numbers of ranks, by three: uneven, and with ranks that have nothing but padding."""
    return _on_ranks(3, save_all, root, (*ON_THREE, TINY))


def going_on(root: Path) -> Truth:
    """Directories of ZeRO in fp32 by two ranks, and the losses of the next steps."""
    kinds = {"one": (1, ("groups",)), "two": (2, ()), "three": (3, ("sub_groups",))}
    return _on_ranks(2, save_and_go_on, root, kinds)


def resumed(ranks: int, root: Path, kinds: Mapping[str, tuple[int, tuple[str, ...]]]) -> Truth:
    """The losses of the next steps of universal checkpoints, by name, each at the stage that is given."""
    return _on_ranks(ranks, resume, root, kinds)
