"""Every way to shard, on one to four ranks: it starts from the weights of the seed, and trains like the plain model."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ckptkit.errors import Usage
from ckptkit.training.config import TrainConfig
from ckptkit.training.initial import initialize_model
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from ckptkit.training.models.blueprint import Blueprint
from ckptkit.training.models.config import ModelConfig
from ckptkit.training.models.llama import LlamaBlueprint
from ckptkit.training.models.lora import Lora, LoraBlueprint
from ckptkit.training.shard import ShardedModel, build_sharded_model, param_dtype

# so that nothing divides evenly by two, three or four
SHAPE = ModelConfig(hidden_size=40, intermediate_size=67, head_dim=10, num_hidden_layers=3)
RUN = TrainConfig(run=Path("unused"), seed=5, device="cpu")
TOKENS = torch.randint(256, (8, 12), generator=torch.Generator().manual_seed(0))
STEPS, LIMIT = 2, 0.5

EVERYWHERE = {
    "FSDP2": RUN,
    "FSDP2 shard_grad_op": replace(RUN, strategy="shard_grad_op", prefetch=2),
    "FSDP2 ddp": replace(RUN, strategy="ddp"),
    "FSDP2 recompute": replace(RUN, recompute_every=1, prefetch=0),
    "FSDP2 recompute every second": replace(RUN, recompute_every=2, micro_batch_size=1),
    "FSDP2 accumulating": replace(RUN, micro_batch_size=1),
    "FSDP2 ddp accumulating": replace(RUN, strategy="ddp", micro_batch_size=1),
    "FSDP2 frozen": replace(RUN, freeze=("*.mlp.*", "model.norm.weight")),
    "FSDP1": replace(RUN, fsdp="1"),
    "FSDP1 shard_grad_op": replace(RUN, fsdp="1", strategy="shard_grad_op", prefetch=0),
    "FSDP1 ddp": replace(RUN, fsdp="1", strategy="ddp"),
    "FSDP1 recompute": replace(RUN, fsdp="1", recompute_every=1),
    "FSDP1 accumulating": replace(RUN, fsdp="1", micro_batch_size=1),
    "FSDP1 ddp accumulating": replace(RUN, fsdp="1", strategy="ddp", micro_batch_size=1),
    "FSDP1 frozen": replace(RUN, fsdp="1", freeze=("*.mlp.*", "model.norm.weight")),
    "FSDP2 adapters": replace(RUN, lora_rank=3),
    "FSDP2 adapters ddp accumulating": replace(RUN, lora_rank=3, strategy="ddp", micro_batch_size=1),
    "FSDP2 adapters recompute": replace(RUN, lora_rank=2, lora_targets=("q_proj", "lm_head"), recompute_every=1),
}
ON_TWO = {
    "FSDP1 adapters": replace(RUN, lora_rank=3, fsdp="1"),
    "FSDP1 adapters accumulating": replace(RUN, lora_rank=3, fsdp="1", micro_batch_size=1),
    "FSDP1 adapters shard_grad_op": replace(RUN, lora_rank=3, fsdp="1", strategy="shard_grad_op", prefetch=0),
    "FSDP1 adapters recompute": replace(RUN, lora_rank=2, fsdp="1", recompute_every=1),
}
ON_ONE = {name: EVERYWHERE[name] for name in ("FSDP2", "FSDP1 ddp accumulating", "FSDP2 adapters")}
UNTIED = {"FSDP1 by size": replace(RUN, fsdp="1", wrap="size", wrap_parameters=5000), "FSDP2 untied": RUN}
ON_FOUR = {
    **{name: EVERYWHERE[name] for name in ("FSDP2", "FSDP2 ddp", "FSDP1 accumulating", "FSDP2 adapters")},
    "FSDP2 hybrid": replace(RUN, strategy="hybrid_shard", replicas=2),
    "FSDP2 hybrid accumulating": replace(RUN, strategy="hybrid_shard", replicas=2, micro_batch_size=1),
    "FSDP1 hybrid": replace(RUN, fsdp="1", strategy="hybrid_shard", replicas=2),
    "FSDP2 adapters hybrid": replace(RUN, lora_rank=3, strategy="hybrid_shard", replicas=2),
    "FSDP1 adapters hybrid": replace(RUN, lora_rank=3, fsdp="1", strategy="hybrid_shard", replicas=2),
}
FEW = {
    name: (EVERYWHERE | ON_TWO)[name]
    for name in ("FSDP2", "FSDP2 accumulating", "FSDP2 frozen", "FSDP2 adapters", "FSDP1", "FSDP1 adapters recompute")
}
HYBRID = {name: ON_FOUR[name] for name in ("FSDP2 hybrid accumulating", "FSDP1 hybrid", "FSDP2 adapters hybrid")}


def blueprint_of(config: TrainConfig, shape: ModelConfig) -> Blueprint:
    llama = LlamaBlueprint(shape)
    if config.lora_rank is None:
        return llama
    lora = Lora(config.lora_rank, config.lora_alpha, seed=config.seed)
    return LoraBlueprint(llama, lora, param_dtype(config, "cpu"), None)


def learn(config: TrainConfig, sharded: ShardedModel, place: RankPlace) -> Iterator[tuple[float, float]]:
    """Loss on this rank and norm of all gradients, step by step."""
    model = sharded.model
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    mine = TOKENS.tensor_split(place.world_size)[place.rank]
    for _ in range(STEPS):
        parts = mine.split(config.micro_batch_size or len(mine))
        total = 0.0
        for i, part in enumerate(parts):
            with nullcontext() if i + 1 == len(parts) else sharded.sharding.accumulating_gradients(model):
                loss = loss_of(model, part) / len(parts)
                loss.backward()
                total += float(loss.detach())
        norm = float(sharded.sharding.clip_gradients(model, LIMIT))
        optimizer.step()
        optimizer.zero_grad()
        yield total, norm


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def whole(model: nn.Module) -> dict[str, Any]:
    """The model's tensors, gathered, for a pipe."""
    state: dict[str, Any] = get_model_state_dict(model)
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone().numpy() for k, v in state.items()}


def local(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def describe(variants: dict[str, TrainConfig], shape: ModelConfig, place: RankPlace, report: Report) -> None:
    with process_group(place, "cpu") as mesh:
        for name, config in variants.items():
            sharded = build_sharded_model(config, blueprint_of(config, shape), mesh, config.seed)
            before = whole(sharded.model)
            held = sum(local(parameter).numel() for parameter in sharded.model.parameters())
            numbers = list(learn(config, sharded, place))
            report((name, place.rank, before, whole(sharded.model), numbers, held))


def plain(shape: ModelConfig, config: TrainConfig) -> tuple[Any, Any, list[tuple[float, float]]]:
    """What a model in one process starts from, ends with, and its losses and norms."""
    blueprint = blueprint_of(config, shape)
    model = blueprint.build()
    initialize_model(blueprint, model, RUN.seed)
    for name, parameter in model.named_parameters():
        if config.freeze and (".mlp." in name or name == "model.norm.weight"):
            parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    numbers = []
    for _ in range(STEPS):
        loss = loss_of(model, TOKENS)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((float(loss.detach()), float(norm)))
    return before, model.state_dict(), numbers


@pytest.mark.parametrize(
    ("world_size", "variants", "shape"),
    [
        pytest.param(1, ON_ONE, SHAPE, id="one rank", marks=pytest.mark.nightly),
        pytest.param(2, FEW, SHAPE, id="two ranks, few", marks=pytest.mark.slow),
        pytest.param(
            2, UNTIED, replace(SHAPE, tie_word_embeddings=False), id="two ranks, untied", marks=pytest.mark.slow
        ),
        pytest.param(2, EVERYWHERE | ON_TWO, SHAPE, id="two ranks", marks=pytest.mark.nightly),
        pytest.param(4, HYBRID, SHAPE, id="four ranks, hybrid", marks=pytest.mark.slow),
        pytest.param(4, ON_FOUR, SHAPE, id="four ranks", marks=pytest.mark.nightly),
    ],
)
def test_every_sharding_trains_like_the_plain_model(
    world_size: int, variants: dict[str, TrainConfig], shape: ModelConfig
) -> None:
    heard: list[Any] = []
    launch(partial(describe, variants, shape), world_size, heard.append)
    assert len(heard) == world_size * len(variants)
    for name, config in variants.items():
        before, after, numbers = plain(shape, config)
        ranks = [found for found in heard if found[0] == name]
        held = sum(found[5] for found in ranks)
        copies = world_size if config.strategy == "ddp" else config.replicas
        every = blueprint_of(config, shape).build().parameters()
        assert held == copies * sum(parameter.numel() for parameter in every), name
        for _, _, initial, trained, steps, _ in ranks:
            assert initial.keys() == before.keys(), name
            assert all(torch.equal(torch.from_numpy(initial[key]), before[key]) for key in before), name
            for key, tensor in after.items():
                torch.testing.assert_close(torch.from_numpy(trained[key]), tensor, msg=f"{name}: {key}")
            assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in numbers], rel=1e-4), name
        for step in range(STEPS):
            mean = sum(found[4][step][0] for found in ranks) / world_size
            assert mean == pytest.approx(numbers[step][0], rel=1e-5), name


def describe_compiled(compiled: dict[str, TrainConfig], shape: ModelConfig, place: RankPlace, report: Report) -> None:
    """Compile without C++ where torch lets the backend be chosen: kernels are torch's, and gcc takes a minute."""
    if hasattr(torch.compiler, "set_default_backend"):
        torch.compiler.set_default_backend("aot_eager")
    describe(compiled, shape, place, report)


@pytest.mark.nightly
def test_compiled_blocks_train_the_same() -> None:
    shape = replace(SHAPE, num_hidden_layers=1)
    compiled = {
        "FSDP2": replace(RUN, compile=True),
        "FSDP1 adapters": replace(RUN, fsdp="1", compile=True, lora_rank=3, recompute_every=1),
    }
    heard: list[Any] = []
    launch(partial(describe_compiled, compiled, shape), 2, heard.append)
    for name, _, _, trained, steps, _ in heard:
        _, after, numbers = plain(shape, compiled[name])
        assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in numbers], rel=1e-4), name
        for key, tensor in after.items():
            torch.testing.assert_close(torch.from_numpy(trained[key]), tensor, msg=f"{name}: {key}")


def refuse(place: RankPlace, report: Report) -> None:
    with process_group(place, "cpu") as mesh:
        for wrong, said in [
            (replace(RUN, strategy="hybrid_shard", replicas=3), "a divisor of 2 ranks, 2 or more, found 3"),
            (replace(RUN, strategy="hybrid_shard"), "a divisor of 2 ranks, 2 or more, found 1"),
            (replace(RUN, cpu_offload=True), "cpu_offload: expected a GPU"),
            (replace(RUN, freeze=("*.absent",)), r"a glob that matches a parameter, found `\*\.absent`"),
            (replace(RUN, freeze=("*",)), "expected a parameter that is not frozen, found none"),
            (replace(RUN, fsdp="1", wrap="size"), "a unit could separate them"),
            (replace(RUN, fsdp="1", strategy="ddp", freeze=("model.[en]*",)), "expected shards of each frozen unit"),
            (replace(RUN, fsdp="1", strategy="ddp", freeze=("*.layers.0.*",)), "expected shards of each frozen unit"),
            (replace(RUN, fsdp="1", strategy="ddp", lora_rank=2), "expected shards of each frozen unit"),
        ]:
            with pytest.raises(Usage, match=said):
                build_sharded_model(wrong, blueprint_of(wrong, SHAPE), mesh, 0)
    report("done")


def test_what_cannot_be_sharded_is_refused_before_anything_is_built() -> None:
    heard: list[str] = []
    launch(refuse, 2, heard.append)
    assert heard == ["done"] * 2
