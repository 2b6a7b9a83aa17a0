"""Megatron's `torch_dist` directories, which are DCP without key paths, against the library's own loader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit.ops.consolidate import consolidate
from ckptkit.ops.verify import verify
from tests.conftest import Produce, Produced
from tests.formats.contract import raw_bytes
from tests.trainers.produced_megatron import STEP, VARIANTS, load, megatron

pytest.importorskip("megatron.core", reason="megatron-core is not installed")


@pytest.fixture(scope="module")
def made(produce: Produce) -> Produced:
    return produce(megatron)


def layers_of(made: Produced, variant: str, stacked: str) -> Tensor:
    """The tensor that the library loads, layer by layer and expert by expert, stacked as the file has it."""
    own = {key.partition(":")[2]: value for key, value in made.truth.items() if key.startswith(f"{variant}:")}
    name = stacked.replace("linear_qkv.layer_norm_", "@").replace("mlp.linear_fc1.layer_norm_", "#")
    name = name.replace("self_attention.@", "input_layernorm.").replace("#", "pre_mlp_layernorm.")
    if name in own:
        return own[name]
    names = [name.replace("decoder.layers.", f"decoder.layers.{layer}.") for layer in range(2)]
    if names[0] in own:
        return torch.stack([own[one] for one in names])
    experts = [[own[one.replace("experts.experts.", f"experts.local_experts.{i}.")] for i in range(4)] for one in names]
    return torch.stack([torch.stack(one) for one in experts])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_is_what_the_library_loads(made: Produced, variant: str, tmp_path: Path) -> None:
    done = consolidate(made.root / variant / "torch_dist", tmp_path / "out")
    assert {left.name for left in done.dropped if "_extra_state" not in left.name} == {"optimizer"}
    assert any("Megatron's own" in note for note in done.notes)
    found = ckptkit.open(tmp_path / "out")
    assert sum(lazy.numel for lazy in found.values()) == sum(
        value.numel() for key, value in made.truth.items() if key.count(":") == 1 and key.startswith(f"{variant}:")
    )
    for name, lazy in found.items():
        assert raw_bytes(lazy.torch()) == raw_bytes(layers_of(made, variant, name)), name


def test_moments_have_a_way_to_them(made: Produced) -> None:
    found = ckptkit.inspect(made.root / "swiglu" / "torch_dist")
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    assert found.layout.key(name) == ("optimizer", "state", "exp_avg", "decoder.layers.mlp.linear_fc2.weight")
    assert (found.trainer, found.step, found.world_size, found.parameters) == ("Megatron", 3, 2, 6048)
    assert found.groups["optimizer"].under == ("optimizer",)
    moments = [f"swiglu:decoder.layers.{layer}.mlp.linear_fc2.weight:exp_avg" for layer in range(2)]
    expected = torch.stack([made.truth[moment] for moment in moments])
    assert torch.equal(ckptkit.open(made.root / "swiglu" / "torch_dist")[name].torch(), expected)


def test_the_library_loads_it_after_resharding(made: Produced, tmp_path: Path) -> None:
    source, result = made.root / "moe" / "torch_dist", tmp_path / "torch_dist" / STEP
    ckptkit.reshard(source, result, to=3)
    assert ckptkit.diff(source, result).is_equal
    one, two = (ckptkit.inspect(path) for path in (source, result))
    assert one.parameters == two.parameters
    assert one.groups["optimizer"].nbytes == two.groups["optimizer"].nbytes
    loaded = load(tmp_path, "moe")
    assert loaded.keys() == {key for key in made.truth if key.startswith("moe:")}
    for key, tensor in loaded.items():
        assert raw_bytes(tensor) == raw_bytes(made.truth[key]), key


def test_a_rename_reaches_the_moments(made: Produced, tmp_path: Path) -> None:
    ckptkit.reshard(made.root / "dense" / "torch_dist", tmp_path / STEP, to=2, rename=["^decoder=>encoder"])
    opened = ckptkit.open(tmp_path / STEP)
    assert not [name for name in opened if "decoder" in name]
    assert "optimizer.state.exp_avg.encoder.layers.mlp.linear_fc2.weight" in opened


def test_all_of_it_is_verified(made: Produced) -> None:
    found = [part for part in verify(made.root / "dense" / "torch_dist") if part.path.name == STEP]
    assert [(part.is_ok, part.unchecked_bytes) for part in found] == [(True, 0)]
