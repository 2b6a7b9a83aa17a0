"""OLMo-core's names against what its own converters make of models of transformers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

import ckptkit
from ckptkit.errors import Mismatch, Unsupported
from tests.models.names.hub_models import EXPERTS, config_of, saved
from tests.models.names.others_code import one_module
from tests.models.names.shelf import check_both_ways, check_same, random_like, to_the_hub
from tests.tiers import nightly_but

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_PACKAGES = ("olmo_core", "olmo_core.nn", "olmo_core.nn.hf", "olmo_core.nn.conversion")


@pytest.fixture(scope="module")
def converters() -> ModuleType:
    return one_module("olmo_core.nn.hf.convert", *_PACKAGES)


def theirs(converters: ModuleType, config: object, hub: dict[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """What OLMo-core makes of the Hub's tensors."""
    found: dict[str, Tensor] = converters.convert_state_from_hf(config, dict(hub), model_type=model_type)
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.parametrize("model_type", nightly_but(["olmo2"], ["olmo2", "olmo3", "llama", "qwen3", "flex_olmo"]))
def test_olmo_cores_own_converters(model_type: str, converters: ModuleType, tmp_path: Path) -> None:
    """Equal names and bits, of weights and of moments, in chunks that were cut anywhere; and back by its own code."""
    config = config_of(model_type, **({"num_experts": EXPERTS} if model_type == "flex_olmo" else {}))
    hub = saved(config, tmp_path)
    for arrays in (hub, random_like(hub)):
        own = theirs(converters, config, arrays, model_type)
        check_both_ways("olmo", own, arrays, config.to_dict())
        check_same(converters.convert_state_to_hf(config, own), arrays)
    if model_type == "flex_olmo":
        assert own["blocks.0.feed_forward_moe.experts.mlp.w1"].shape == (EXPERTS * 32, 24)


def test_a_training_of_olmo_core_becomes_a_model(converters: ModuleType, tmp_path: Path) -> None:
    config = config_of("olmo2")
    hub = saved(config, tmp_path / "hub")
    own = theirs(converters, config, hub, "olmo2")
    dcp.save({"model": own, "optim": {"state": {}}}, checkpoint_id=tmp_path / "step10" / "model_and_optim")
    ckptkit.consolidate(tmp_path / "step10", tmp_path / "out", base=tmp_path / "hub")
    made = ckptkit.open(tmp_path / "out")
    check_same({name: made[name].torch() for name in made}, hub)


def test_norms_that_are_greater_by_one_are_refused() -> None:
    own = {"blocks.0.attention.w_q.weight": torch.zeros(2, 2)}
    with pytest.raises(Unsupported, match="gemma3_text"):
        to_the_hub("olmo", own, {"model_type": "gemma3_text"})


def test_experts_that_do_not_share_the_rows(converters: ModuleType, tmp_path: Path) -> None:
    config = config_of("flex_olmo", num_experts=EXPERTS)
    own = theirs(converters, config, saved(config, tmp_path), "flex_olmo")
    with pytest.raises(Mismatch, match="expected a multiple of 5 rows \\(number of experts\\), found 96"):
        to_the_hub("olmo", own, config.to_dict() | {"num_experts": 5})
