"""What is saved of a model under another family's names, and filled from one under the Hub's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit import consolidate, convert
from tests.conversion.salvaging.damage import assert_truth, cut, load_dcp, load_hf
from tests.conversion.salvaging.test_salvage_files import save, weights


@pytest.mark.parametrize("family", ["torchtitan", "meta"])
def test_the_hub_s_model_fills_another_family_s(family: str, tmp_path: Path) -> None:
    truth, other = weights(), weights(1)
    model, base = save(tmp_path / "model", truth), save(tmp_path / "base", other)
    root = tmp_path / "ckpt-10"
    convert(model, root, to="dcp", names=family, world_size=3, under="model", base=model)
    file = root / "__1_0.distcp"
    cut(file, file.stat().st_size * 2 // 3)
    done = consolidate(root, tmp_path / "out", salvage=True, base=model)
    assert done.salvaged is not None
    lost = {one.name for one in done.salvaged.lost}
    found = load_hf(tmp_path / "out")
    assert found.keys() == truth.keys() - lost
    assert found
    assert_truth(found, truth)
    filled = consolidate(root, tmp_path / "whole", salvage=True, base=model, fill_from=base)
    assert filled.salvaged is not None
    assert not filled.salvaged.lost
    assert {one.name for one in filled.salvaged.filled} == lost
    mixed = {name: (other if name in lost else truth)[name] for name in truth}
    assert_truth(load_hf(tmp_path / "whole"), mixed)
    convert(root, tmp_path / "dcp", to="dcp", salvage=True, fill_from=base)
    kept = load_dcp(tmp_path / "dcp")
    assert len(kept) == len(truth)


def test_experts_that_are_whole_come_out_of_a_stack_that_is_not(tmp_path: Path) -> None:
    """Of experts in one tensor just those are lost that the missing rank had."""
    pytest.importorskip("transformers")
    import json

    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=8,
        intermediate_size=12,
        moe_intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=12,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "hub")
    truth = load_hf(tmp_path / "hub")
    said = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert said["model_type"] == "qwen3_moe"
    root = tmp_path / "ckpt-10"
    convert(tmp_path / "hub", root, to="dcp", names="torchtitan", world_size=2, under="model", base=tmp_path / "hub")
    (root / "__1_0.distcp").unlink()
    done = consolidate(root, tmp_path / "out", salvage=True, base=tmp_path / "hub")
    assert done.salvaged is not None
    found = load_hf(tmp_path / "out")
    assert_truth(found, truth)
    experts = {name for name in found if ".experts." in name}
    assert {name.split(".experts.")[1].split(".")[0] for name in experts} == {"0", "1"}
