"""What ckptkit writes under the names of a family it reads back, or refuses to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.errors import Unsupported
from ckptkit.models.names import FAMILIES, load_family
from tests.models.names.hub_models import config_of, saved

_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": None,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 64, "tie_word_embeddings": True}
_NAMED = {"gpt_neox": {"num_key_value_heads": 4}, "gpt2": _GPT2}
TYPES = sorted({kind for name in FAMILIES if name != "transformers" for kind in load_family(name).types})


def save_model(model_type: str, root: Path) -> dict[str, torch.Tensor]:
    changes: dict[str, Any] = _EXPERTS | _NAMED.get(model_type, {})
    return saved(config_of(model_type, **changes), root)


@pytest.mark.parametrize("model_type", TYPES)
def test_each_family_is_read_back(tmp_path: Path, model_type: str) -> None:
    truth = save_model(model_type, tmp_path / "hub")
    families = [load_family(name) for name in FAMILIES if model_type in load_family(name).types]
    for name in (family.name for family in families if not family.is_model_only):
        ckptkit.convert(tmp_path / "hub", tmp_path / name, to="dcp", names=name, sync=False)
        done = ckptkit.consolidate(tmp_path / name, tmp_path / f"{name}-back", base=str(tmp_path / "hub"), sync=False)
        found = load_file(done.output / "model.safetensors")
        assert found.keys() == truth.keys()
        assert all(torch.equal(found[own], tensor) for own, tensor in truth.items())


@pytest.mark.parametrize("to", ["hf", "pt", "ranks"])
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, to: str) -> None:
    """Norms of gemma lie around zero; only files in DCP tell whether Megatron's do."""
    save_model("gemma", tmp_path / "hub")
    with pytest.raises(Unsupported, match="`gemma` under megatron's names cannot be read back") as raised:
        ckptkit.convert(tmp_path / "hub", tmp_path / "out", to=to, names="megatron")
    assert "--to dcp --names megatron" in str(raised.value.hint)
    assert not (tmp_path / "out").exists()


def test_it_is_read_back_from_other_ranks(tmp_path: Path) -> None:
    truth = save_model("gemma", tmp_path / "hub")
    ckptkit.convert(tmp_path / "hub", tmp_path / "start", to="dcp", names="megatron")
    ckptkit.reshard(tmp_path / "start", tmp_path / "three", to=3)
    done = ckptkit.consolidate(tmp_path / "three", tmp_path / "out", base=str(tmp_path / "hub"))
    assert load_file(done.output / "model.safetensors").keys() == truth.keys()
