"""Estimates held against published figures, FSDP2's own shards, autograd's saved tensors and torch's memory tracker."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import AdamW
from transformers import AutoConfig, AutoModelForCausalLM

from ckptkit import estimate, open_layout
from ckptkit.errors import Corrupt, IOFailure, NotACheckpoint, Unsupported, Usage
from ckptkit.layout.dtypes import DTYPES
from ckptkit.plugins.estimate.estimate import Estimated
from ckptkit.plugins.estimate.memory import (
    Budget,
    Setup,
    make_budget,
    norm_activation_bytes,
    read_architecture,
    saved_activation_bytes,
    shard_numel,
)
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from ckptkit.training.models.config import ModelConfig
from ckptkit.training.models.llama import Llama
from ckptkit.training.shard import set_prefetch, set_recomputation
from tests.models.test_fit import FAMILIES, SIZES

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
GB = 10**9
STATES = ("parameters", "gradients", "optimizer")


def only(found: Estimated) -> Budget:
    (budget,) = found.budgets
    return budget


def states(budget: Budget) -> int:
    return sum(budget.peak_bytes_by_component[part] for part in STATES)


def test_states_of_llama_8b_on_8_gpus() -> None:
    found = estimate(LLAMA_8B, world_size=8, strategy="full_shard")
    assert found.model.numel == 8_030_261_248
    assert found.model.largest_block_numel == pytest.approx(218e6, rel=0.001)
    assert states(only(found)) == pytest.approx(16.1 * GB, rel=0.005)  # 16 bytes a parameter, not 12 or 8
    assert states(only(found)) == 16 * found.model.numel // 8


def test_a_dtype_may_be_torchs_own() -> None:
    found = estimate(LLAMA_8B, world_size=8, param_dtype=torch.float32, master_dtype=torch.float32)
    assert found == estimate(LLAMA_8B, world_size=8, param_dtype="fp32", master_dtype="fp32")


def test_states_of_llama_70b_on_8_gpus() -> None:
    found = estimate(LLAMA_70B, world_size=8, strategy="full_shard", gpu_memory=80 * GB)
    assert states(only(found)) == pytest.approx(141 * GB, rel=0.005)
    assert 12 * found.model.numel / 8 == pytest.approx(106 * GB, rel=0.005)  # what it is said to be
    assert found.disk["export_bfloat16"] == pytest.approx(141 * GB, rel=0.005)
    assert found.model.root_unit_numel * 2 == pytest.approx(4.2 * GB, rel=0.005)
    assert found.largest_unit == found.model.root_unit_numel * 2
    assert found.fits(only(found)) is False
    assert found.fits_at(only(found)) == 32


def test_70b_does_not_fit_on_four_24_gb_cards_even_with_bf16_states() -> None:
    for dtype in ("float32", "bfloat16"):
        found = estimate(LLAMA_70B, world_size=4, master_dtype=dtype, gpu_memory=24 * GB)
        assert not any(map(found.fits, found.budgets))
        assert all(budget.peak_bytes_by_component["parameters"] >= 35 * GB for budget in found.budgets)


def test_bf16_states_of_70b_leave_no_room_and_are_warned_of() -> None:
    found = estimate(LLAMA_70B, world_size=8, master_dtype="bf16", strategy="full_shard", gpu_memory=80 * GB)
    assert states(only(found)) == pytest.approx(70.6 * GB, rel=0.005)
    assert found.fits(only(found)) is False
    assert any("lose small updates" in note for note in found.notes)
    assert not any("lose small updates" in note for note in estimate(LLAMA_70B, world_size=8).notes)


def test_activations_of_llama_8b_with_4_sequences_of_2048() -> None:
    found = estimate(LLAMA_8B, world_size=8, strategy="full_shard", micro_batch_size=4, sequence_length=2048)
    inputs = saved_activation_bytes(found.model, only(found).setup)
    assert inputs == pytest.approx(2.15 * GB, rel=0.005)
    logits = only(found).moments["loss"]["logits"]
    assert logits / 12 * 2 == pytest.approx(2.1 * GB, rel=0.005)  # bf16
    assert logits / 12 * 4 == pytest.approx(4.2 * GB, rel=0.005)  # fp32


def test_strategies_share_the_states_among_more_or_fewer_gpus() -> None:
    found = estimate(LLAMA_8B, world_size=16, replicas=4)
    by_name = {budget.setup.strategy: budget for budget in found.budgets}
    whole = 16 * found.model.numel
    assert {name: whole // states(budget) for name, budget in by_name.items()} == {
        "full_shard": 16, "shard_grad_op": 16, "hybrid_shard": 4, "ddp": 1,
    }  # fmt: skip
    kept = by_name["shard_grad_op"].moments["loss"]["gathered"] - by_name["full_shard"].moments["loss"]["gathered"]
    assert kept == found.model.all_blocks_numel * 2


def test_offloaded_states_are_the_hosts() -> None:
    plain = only(estimate(LLAMA_8B, world_size=8, strategy="full_shard"))
    found = only(estimate(LLAMA_8B, world_size=8, strategy="full_shard", cpu_offload=True))
    assert (states(found), found.host, plain.host) == (0, states(plain), 0)
    assert found.peak == plain.peak - states(plain)


def test_hybrid_shard_is_left_out_only_where_nobody_asked_for_it() -> None:
    assert [budget.setup.strategy for budget in estimate(LLAMA_8B, world_size=1).budgets] == [
        "full_shard", "shard_grad_op", "ddp",
    ]  # fmt: skip
    for options in ({"replicas": 2}, {"strategy": "hybrid_shard"}):
        with pytest.raises(Usage, match=r"world_size: expected a multiple of 2 \(replicas\), found 7"):
            estimate(LLAMA_8B, world_size=7, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"world_size": 0}, "world_size: expected 1 or more, found 0"),
        ({"micro_batch_size": 0}, "micro_batch_size: expected 1 or more, found 0"),
        ({"recompute_every": -1}, "recompute_every: expected 0 or more, found -1"),
        ({"strategy": "zero1"}, "unknown strategy `zero1`"),
        ({"strategy": "ddp", "replicas": 2}, "expected hybrid_shard for 2 replicas, found ddp"),
        ({"param_dtype": "int8"}, "param_dtype: unknown dtype `int8`"),
        ({"master_dtype": "float8_e5m2"}, "master_dtype: unknown dtype `float8_e5m2`"),
        ({"sequence_length": 8193}, r"at most 8192 \(max_position_embeddings\)"),
    ],
)
def test_what_does_not_go_together_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Usage, match=said):
        estimate(LLAMA_8B, **{"world_size": 8, **options})


def test_no_number_of_gpus_is_enough_for_what_is_not_sharded() -> None:
    found = estimate(LLAMA_70B, world_size=8, gpu_memory=5 * GB)
    assert [found.fits_at(budget) for budget in found.budgets] == [None] * 4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_parameters_are_those_of_transformers(model_type: str, tied: bool) -> None:
    config = AutoConfig.for_model(model_type, **SIZES, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = read_architecture(config.to_dict())
    assert found.numel == sum(parameter.numel() for parameter in model.parameters())
    assert found.largest_block_numel == sum(parameter.numel() for parameter in model.model.layers[0].parameters())


def test_other_models_are_built_by_transformers_without_memory() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=3, n_head=4, vocab_size=100, n_positions=64)
    model = AutoModelForCausalLM.from_config(config)
    found = estimate(config.to_dict(), world_size=2)
    assert found.model.numel == sum(parameter.numel() for parameter in model.parameters())
    assert found.model.largest_block_numel == sum(
        parameter.numel() for parameter in model.transformer.h[0].parameters()
    )
    assert list(found.model.tied) == ["lm_head.weight"]
    assert (found.model.layers, found.model.inner, found.budgets[0].setup.sequence_length) == (3, 128, 64)
    assert any("`gpt2` are counted as if" in note for note in found.notes)
    with pytest.raises(Unsupported, match="t5"):
        estimate({"model_type": "t5"}, world_size=2)
    with pytest.raises(Unsupported, match="none-such"):
        estimate({"model_type": "none-such"}, world_size=2)


def test_of_experts_those_count_that_a_token_meets() -> None:
    config = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=8, num_experts_per_tok=2)
    found = read_architecture(config.to_dict())
    assert found.inner == 2 * SIZES["intermediate_size"]
    assert found.largest_block_numel > 8 * 3 * 32 * 48


def test_a_config_that_lacks_a_size_is_unsupported() -> None:
    config = {key: value for key, value in LLAMA_8B.items() if key != "hidden_size"}
    with pytest.raises(Unsupported, match="lacks a size"):
        estimate(config, world_size=2)
    with pytest.raises(Unsupported, match="found -1"):
        estimate(LLAMA_8B | {"vocab_size": -1}, world_size=2)


def test_a_config_comes_from_a_file_or_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    for model in (path, tmp_path, str(tmp_path)):
        assert estimate(model, world_size=8).model.numel == 8_030_261_248
    path.write_text("{")
    with pytest.raises(Corrupt, match="not valid JSON"):
        estimate(path, world_size=8)
    path.write_text('{"hidden_size": 8}')
    with pytest.raises(NotACheckpoint, match="no `model_type`"):
        estimate(path, world_size=8)
    path.unlink()
    with pytest.raises(NotACheckpoint, match=r"no config\.json"):
        estimate(tmp_path, world_size=8)
    with pytest.raises(Usage, match="a Hub id like"):
        estimate(path, world_size=8)


def test_a_config_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its cache, as after a download; the Hub itself is out of a test's reach."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--model"
    for part in ("refs", "blobs", f"snapshots/{commit}"):
        (repository / part).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs" / "one").write_text(json.dumps(LLAMA_8B))
    (repository / "snapshots" / commit / "config.json").symlink_to("../../blobs/one")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert estimate("org/model", world_size=8).model.numel == 8_030_261_248
    with pytest.raises(IOFailure, match="org/other"):
        estimate("org/other", world_size=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("key_value_heads", [2, 4])
def test_activations_are_what_autograd_saves(dtype: str, key_value_heads: int) -> None:
    config = ModelConfig(
        hidden_size=96, intermediate_size=272, head_dim=24, num_key_value_heads=key_value_heads, num_hidden_layers=3
    )
    model = Llama(config).to(getattr(torch, dtype))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.randint(256, (2, 128)))
    measured = sum(storage.nbytes() for address, storage in saved.items() if address not in own)
    architecture = read_architecture(json.loads(config.to_json()))
    setup = Setup(world_size=1, micro_batch_size=2, sequence_length=128, param_dtype=DTYPES[dtype], recompute_every=0)
    counted = saved_activation_bytes(architecture, setup) + norm_activation_bytes(config.hidden_size, setup)
    assert counted == pytest.approx(measured, rel=0.02)  # besides token ids, the angles of RoPE, means of the norms


def shard(model: Llama, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard: bool) -> None:
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)


UNEVEN = ModelConfig(hidden_size=40, intermediate_size=67, head_dim=10, vocab_size=257, num_hidden_layers=3)


def hold_states(path: Path, place: RankPlace, report: Report) -> None:
    with process_group(place, "cpu") as mesh:
        for tied in (True, False):
            model = Llama(replace(UNEVEN, tie_word_embeddings=tied))
            shard(model, mesh, MixedPrecisionPolicy(), reshard=True)
            optimizer = AdamW(model.parameters())
            model(torch.randint(257, (1, 8))).sum().backward()
            optimizer.step()
            moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
            report(
                {
                    "rank": place.rank,
                    "tied": tied,
                    "parameters": local_bytes(model.parameters()),
                    "gradients": local_bytes(parameter.grad for parameter in model.parameters()),
                    "optimizer": local_bytes(moments),
                }
            )
            weights, state = get_state_dict(model, optimizer)
            state_dict_saver.save({"model": weights, "optim": state}, checkpoint_id=path / f"tied-{tied}")


def local_bytes(tensors: Any) -> int:
    return sum(tensor.to_local().nbytes for tensor in tensors if isinstance(tensor, DTensor))


@pytest.mark.slow
def test_states_are_the_bytes_of_fsdp2s_own_shards_and_checkpoints(tmp_path: Path) -> None:
    """Two ranks and odd sizes: rank 0 has the larger half of each tensor."""
    heard: list[dict[str, Any]] = []
    launch(partial(hold_states, tmp_path), 2, heard.append)
    assert len(heard) == 4
    for found in heard:
        config = json.loads(replace(UNEVEN, tie_word_embeddings=found["tied"]).to_json())
        estimated = estimate(config, world_size=2, strategy="full_shard")
        parts = only(estimated).peak_bytes_by_component
        if found["rank"] == 0:
            assert {part: found[part] for part in STATES} == {part: parts[part] for part in STATES}
        else:
            assert found["parameters"] == 4 * estimated.model.numel - parts["parameters"] < parts["parameters"]
        saved = open_layout(tmp_path / f"tied-{found['tied']}").tensors
        assert estimated.disk["model_and_optimizer"] == sum(tensor.spec.nbytes for tensor in saved.values())
        weights = [tensor for name, tensor in saved.items() if name.startswith("model.")]
        assert estimated.disk["model"] == sum(tensor.spec.nbytes for tensor in weights)


TRACKED = ModelConfig(
    hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    head_dim=32, tie_word_embeddings=False,
)  # fmt: skip
WIDE = replace(TRACKED, vocab_size=32768)
TRACKED_SETUPS = [
    (TRACKED, Setup(world_size=4, sequence_length=1024)),
    (TRACKED, Setup(world_size=4, sequence_length=1024, recompute_every=0, prefetch=2)),
    (TRACKED, Setup(world_size=4, sequence_length=1024, recompute_every=3, param_dtype=DTYPES["float32"])),
    (TRACKED, Setup(world_size=4, sequence_length=512, strategy="shard_grad_op", micro_batch_size=2)),
    (TRACKED, Setup(world_size=8, sequence_length=512, strategy="hybrid_shard")),
    (TRACKED, Setup(world_size=4, sequence_length=512, strategy="ddp")),
    (WIDE, Setup(world_size=8, sequence_length=512)),
    (replace(WIDE, tie_word_embeddings=True), Setup(world_size=8, sequence_length=8)),
]


def track_peaks(place: RankPlace, report: Report) -> None:
    """The most bytes that torch counts while it makes believe to train: no memory, no computing, no other ranks."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for config, setup in TRACKED_SETUPS:
        dist.init_process_group("fake", rank=0, world_size=setup.world_size, store=FakeStore())
        shape = (setup.world_size // setup.shard_count, setup.shard_count)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        with FakeTensorMode():
            report(track_peak(config, setup, mesh if shape[0] > 1 else mesh["shard"]))
        dist.destroy_process_group()


def track_peak(config: ModelConfig, setup: Setup, mesh: DeviceMesh) -> int:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    model = Llama(config)
    blocks = list(model.model.layers)
    set_recomputation(blocks, setup.recompute_every)
    policy = MixedPrecisionPolicy(getattr(torch, setup.param_dtype.name), torch.float32)
    shard(model, mesh, policy, reshard=setup.strategy != "shard_grad_op")
    set_prefetch(cast("list[FSDPModule]", blocks), setup.prefetch)
    tokens = torch.randint(config.vocab_size, (setup.micro_batch_size, setup.sequence_length))
    if (
        setup.shard_count == setup.world_size
    ):  # else FSDP2 holds on to what it reduced when gradients add up (torch 2.13)
        loss(model, tokens).backward()  # from now on there are gradients
    tracker = FSDPMemTracker(model)
    with tracker:
        loss(model, tokens).backward()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def loss(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten(), reduction="sum")


@pytest.mark.nightly
def test_peaks_are_what_torchs_memory_tracker_finds() -> None:
    peaks: list[int] = []
    launch(track_peaks, 1, peaks.append)
    for (config, setup), peak in zip(TRACKED_SETUPS, peaks, strict=True):
        found = make_budget(read_architecture(json.loads(config.to_json())), setup)
        counted = found.peak - found.peak_bytes_by_component["optimizer"]  # no optimizer was there
        absent = 0 if setup.shard_count == setup.world_size else found.peak_bytes_by_component["gradients"]
        assert 0.995 * peak <= counted <= 1.1 * peak + absent, setup


def test_shards_of_a_small_tensor_are_not_smaller_than_a_row() -> None:
    model = read_architecture(json.loads(UNEVEN.to_json()))
    assert shard_numel(model, 1) == model.numel
    rows = sum(shape[-1] if len(shape) > 1 else 1 for shape in model.parameters.values())
    assert shard_numel(model, 10**6) == rows
